// Compiled, never run: what the declarations promise to a front end's author.

import { attach, history, launch, validate, WorkerDied, type Run, type RunEvent } from 'trainwire'
import { fakeWorker, sample } from 'trainwire/testing'

function describe(event: RunEvent): string {
  switch (event.type) {
    case 'step': {
      const loss: number | null = event.loss
      return `${event.step} ${loss}`
    }
    case 'checkpoint':
      return event.path
    case 'end':
      return event.outcome === 'completed' ? 'done' : event.reason
    case 'gap':
      return `${event.from_seq}–${event.to_seq}`
    case 'error':
      return event.message
    default:
      // @ts-expect-error only step events have a loss
      return event.loss
  }
}

export async function main(): Promise<void> {
  const run = await launch(
    { model: 'm', data: 'd.jsonl', learning_rate: 1e-4 },
    { command: ['trainwire'], supervise: { restarts: 2 }, signal: AbortSignal.timeout(1000) },
  )
  run.on('step', (event) => event.loss?.toFixed(3))
  run.on('error', (error) => error.message)
  run.on('close', (result) => result?.exitCode)
  // @ts-expect-error there is no such event
  run.on('stepp', () => {})
  for await (const event of run) describe(event)

  const { step, changed } = await run.pause({ timeout: 1000 })
  await run.resume({ steps: 3 })
  await run.set({ learning_rate: 1e-5 })
  // @ts-expect-error a key that cannot be changed while a run trains
  await run.set({ batch_size: 4 })
  // @ts-expect-error options are spelled in camelCase
  await run.eval({ max_batches: 2 })
  const { valid_loss } = await run.eval({ maxBatches: 2 })
  const { text } = await run.generate({ messages: [{ role: 'user', content: 'Hello?' }] })
  const { outcome, metrics, checkpoint, exitCode } = (await run.wait()).check()
  const facts: [number, boolean, number | null, string, string, number | null | undefined, string | null, number] = [
    step, changed, valid_loss, text, outcome, metrics.loss, checkpoint, exitCode,
  ]

  // @ts-expect-error launch needs a command
  await launch({ model: 'm', data: 'd' }, {})
  // @ts-expect-error a misspelled key
  await launch({ model: 'm', data: 'd', learningRate: 1 }, { command: ['trainwire'] })
  await launch({ model: 'm' }, { command: ['trainwire'], rows: [{ text: 'a' }] })
  await validate('config.toml', { command: ['trainwire'] })

  const other: Run = await attach('runs/a')
  await other.close()
  const { loss, valid_loss: validation } = await history('runs/a', { metrics: ['loss', 'valid_loss'] })
  const points: (number | null)[] = [...loss.values, ...validation.values]
  // @ts-expect-error there is no such metric
  await history('runs/a', { metrics: ['losss'] })

  const fake = await launch({ model: 'm', data: 'd' }, { command: fakeWorker({ worker: [{ hello: {} }] }) })
  const first = sample('step', { loss: 1 })
  first.loss?.toFixed(2)
  try {
    await fake.wait()
  } catch (error) {
    if (error instanceof WorkerDied) error.signal?.startsWith('SIG')
  }
  void [facts, points]
}
