// The real worker with the scripted engine: the client and the worker mean the same.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs'
import path from 'node:path'
import { test } from 'node:test'

import * as trainwire from 'trainwire'

import { collect, exists, folder, packageFolder, types, until, withoutWorker, worker } from './helpers.mjs'

const { launch, attach, history, latestCheckpoint, validate } = trainwire
const REAL = { skip: withoutWorker, timeout: 120_000 }

/** Launches the real worker; the script says how the engine behaves. */
async function start(t, { script = {}, config = {}, dir = folder(), ...options } = {}) {
  const file = path.join(dir, 'script.json')
  fs.writeFileSync(file, JSON.stringify({ step_ms: 2, ...script }))
  const data = path.join(dir, 'data.jsonl')
  fs.writeFileSync(data, '{"text":"a"}\n')
  const run = await launch(
    { model: 'm', data, run_dir: path.join(dir, 'run'), max_steps: 30, save_every: 10, ...config },
    { command: worker, workerArgs: ['--engine', 'fake', '--script', file], ...options },
  )
  t.after(() => run.kill())
  return run
}

const stepsOf = (events) => events.filter((event) => event.type === 'step').map((event) => event.step)

test('a run goes from attempt to end and leaves its history and checkpoints', REAL, async (t) => {
  const run = await start(t, { script: { valid_examples: 8 }, config: { eval_every: 10 } })
  const events = await collect(run)
  assert.deepEqual(events.map((event) => event.seq), events.map((_, i) => i + 1))
  assert.equal(events[0].type, 'attempt')
  assert.deepEqual(types(events.slice(-3)), ['checkpoint', 'complete', 'end'])
  assert.deepEqual(stepsOf(events), Array.from({ length: 30 }, (_, i) => i + 1))

  const result = await run.wait()
  assert.equal(result.outcome, 'completed')
  assert.equal(result.exitCode, 0)
  assert.equal(result.metrics.step, 30)
  assert.equal(typeof result.metrics.valid_loss, 'number')
  assert.deepEqual(result, result.check())

  const { loss, valid_loss } = await history(run.runDir, { metrics: ['loss', 'valid_loss'] })
  assert.deepEqual(loss.steps, stepsOf(events))
  assert.deepEqual(valid_loss.steps, [10, 20, 30])
  const final = await latestCheckpoint(run.runDir)
  assert.deepEqual([final.path, final.step, final.kind], [result.checkpoint, 30, 'final'])

  const again = await attach(run.runDir)
  assert.deepEqual(await collect(again), events)
})

test('every command has its effect and its answer', REAL, async (t) => {
  const run = await start(t, { script: { valid_examples: 8, step_ms: 20 }, config: { max_steps: 100_000 } })
  assert.equal(typeof (await run.ping()).ts, 'number')
  await collect(run, (event) => event.type === 'step')

  const paused = await run.pause()
  assert.equal(paused.changed, true)
  assert.equal((await run.pause()).changed, false)
  assert.equal((await run.status()).phase, 'paused')
  await collect(run, (event) => event.type === 'paused')

  assert.equal((await run.resume({ steps: 3 })).changed, true)
  const counted = await collect(run, (event) => event.type === 'paused')
  assert.equal(stepsOf(counted).length, 3)

  const set = await run.set({ learning_rate: 5e-5 })
  assert.equal(set.applied.learning_rate, 5e-5)
  await assert.rejects(run.set({ learning_rate: -1 }), (error) => error instanceof trainwire.CommandFailed && error.code === 'bad_params')
  const saved = await run.checkpoint({ name: 'mine' })
  assert.equal(path.basename(saved.path), 'mine')
  assert.equal((await latestCheckpoint(run.runDir)).path, saved.path)
  assert.equal(typeof (await run.eval()).valid_loss, 'number')
  assert.match((await run.generate({ prompt: 'Hello?', maxTokens: 5 })).text, /\w/)
  assert.match((await run.generate({ messages: [{ role: 'user', content: 'Hi' }], adapter: false })).text, /base/)

  const stored = await run.replay({ toSeq: 20, types: ['attempt', 'init'] })
  assert.deepEqual(types(stored), ['attempt', 'init'])
  assert.ok(stored.every((event) => event.replay))

  const stopped = await run.stop()
  assert.equal(stopped.outcome, 'stopped')
  const result = await run.wait()
  assert.deepEqual([result.outcome, result.exitCode, result.checkpoint], ['stopped', 0, stopped.checkpoint])
  await assert.rejects(run.pause(), trainwire.RunEnded)
})

test('a start is awaited, and a run is followed from an event on', REAL, async (t) => {
  const run = await start(t, { script: { step_ms: 10 }, config: { max_steps: 40 } })
  const started = await run.started({ timeout: 90_000 })
  assert.deepEqual([started.run_dir, started.total_steps, started.resumed_from], [run.runDir, 40, null])
  const other = await attach(run.runDir, { fromSeq: 5 })
  const events = await collect(other)
  assert.deepEqual([events[0].seq, events.at(-1).type, other.lastSeq], [5, 'end', events.at(-1).seq])
  assert.equal((await other.wait()).metrics.step, 40)
})

test('a config that the worker refuses shows as error and end', REAL, async (t) => {
  const run = await start(t, { config: { batch_sise: 3 } })
  await assert.rejects(run.started(), (error) => error instanceof trainwire.CommandFailed && error.code === 'config_invalid')
  const events = await collect(run)
  assert.deepEqual(types(events), ['error', 'end'])
  const result = await run.wait()
  assert.equal(result.exitCode, 3)
  assert.throws(() => result.check(), (error) => error.code === 'config_invalid' && /batch_size/.test(error.message))
})

test('validate says what is wrong and leaves nothing behind', REAL, async (t) => {
  const dir = folder()
  const answer = await validate({ model: 'm', data: 'd', run_dir: dir, learningRate: 1 }, { command: worker, workerArgs: ['--engine', 'fake'] })
  assert.equal(answer.valid, false)
  assert.deepEqual(answer.issues.map((issue) => issue.path), ['learningRate'])
  assert.deepEqual(fs.readdirSync(dir), [])
})

test('an attached client watches and steers a living run', REAL, async (t) => {
  const run = await start(t, { script: { step_ms: 20 }, config: { max_steps: 100_000 } })
  await collect(run, (event) => event.type === 'step')
  const other = await attach(run.runDir)
  const reading = collect(other)
  assert.equal(other.pid, run.pid)
  assert.equal((await other.pause()).changed, true)
  assert.equal((await other.status()).phase, 'paused')
  const stopped = await other.stop()
  assert.equal(stopped.outcome, 'stopped')
  assert.equal((await other.wait()).outcome, 'stopped')
  assert.equal((await run.wait()).outcome, 'stopped')
  const events = await reading
  assert.deepEqual(types(events).slice(-1), ['end'])
  assert.deepEqual(events.map((event) => event.seq), events.map((_, i) => i + 1))
  await assert.rejects(other.pause(), trainwire.RunEnded)
})

test('a worker that is killed is started again, and each event comes once', REAL, async (t) => {
  const waits = { do: 'await_order', at: 'boundary' }
  const acts = [{ ...waits, step: 12, attempt: 1 }, { ...waits, step: 31, attempt: 2 }]
  const run = await start(t, { script: { step_ms: 10, acts }, config: { max_steps: 60, save_every: 5 }, supervise: true })
  const events = []
  let killed = 0
  for await (const event of run) {
    events.push(event)
    if (event.type === 'step' && event.step === [12, 31][killed]) {
      killed += 1
      process.kill(run.pid, 'SIGKILL')
    }
  }
  const result = await run.wait()
  assert.equal(result.outcome, 'completed')
  assert.equal(result.restarts, 2)
  assert.deepEqual(events.map((event) => event.seq), events.map((_, i) => i + 1))
  assert.equal(events.filter((event) => event.type === 'attempt').length, 3)
  const { loss } = await history(run.runDir)
  assert.deepEqual(loss.steps, Array.from({ length: 60 }, (_, i) => i + 1))
  const onDisk = await collect(await attach(run.runDir))
  assert.deepEqual(stepsOf(onDisk), loss.steps)
})

test('a death without supervision tells what is known, and the log is read to its end', REAL, async (t) => {
  const run = await start(t, { script: { step_ms: 10 }, config: { max_steps: 100_000, save_every: 5 } })
  await collect(run, (event) => event.step === 7)
  const pausing = assert.rejects(run.pause(), trainwire.WorkerDied)
  process.kill(run.pid, 'SIGKILL')
  await assert.rejects(run.wait(), (error) => {
    assert.ok(error instanceof trainwire.WorkerDied)
    assert.equal(error.signal, 'SIGKILL')
    assert.match(error.lastCheckpoint, /checkpoint-0000/)
    return true
  })
  await pausing
  await assert.rejects(collect(run), trainwire.WorkerDied)
  await assert.rejects(run.status(), trainwire.WorkerDied)
  await until('the engine left', async () => !(await lockIsHeld(run.runDir)))
})

/** Tries to take the run's lock as a worker would. */
async function lockIsHeld(runDir) {
  const child = spawn(worker[0], ['-c', 'import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)', path.join(runDir, 'run.lock')], { stdio: 'ignore' })
  const [code] = await once(child, 'exit')
  return code !== 0
}

test('close stops with a checkpoint, also a paused run', REAL, async (t) => {
  const run = await start(t, { script: { step_ms: 10 }, config: { max_steps: 100_000 } })
  await collect(run, (event) => event.step === 3)
  await run.pause()
  const result = await run.close()
  assert.equal(result.outcome, 'stopped')
  assert.deepEqual(result.shutdown.map(({ name }) => name), ['stop'])
  assert.equal((await latestCheckpoint(run.runDir)).path, result.checkpoint)
})

test('a long save is waited for, rung by rung', REAL, async (t) => {
  const times = { stop: 200, stdin: 200, terminate: 60_000 }
  const run = await start(t, { script: { step_ms: 10, save_ms: 1500 }, config: { max_steps: 100_000, save_every: 5 }, shutdown: times })
  await until('a save begins', async () => (await run.status()).activity === 'checkpoint')
  const told = []
  run.on('shutdown', ({ name }) => told.push(name))
  run.on('checkpoint', () => told.push('checkpoint'))
  const result = await run.close()
  assert.equal(result.outcome, 'stopped')
  assert.deepEqual(told.slice(0, 2), ['stop', 'checkpoint'], 'no other rung before the save is over')
  assert.equal((await latestCheckpoint(run.runDir)).path, result.checkpoint)
})

test('a stopped process is ended all the same', REAL, async (t) => {
  const run = await start(t, { script: { step_ms: 10 }, config: { max_steps: 100_000 }, shutdown: { stop: 200, stdin: 200, terminate: 60_000 } })
  await collect(run, (event) => event.step === 3)
  process.kill(run.pid, 'SIGSTOP')
  const result = await run.close()
  assert.deepEqual(result.shutdown.map(({ name }) => name), ['stop', 'stdin', 'terminate'])
  assert.ok(result.shutdown.every(({ name, ms }) => name === 'terminate' || ms > 150), JSON.stringify(result.shutdown))
  assert.ok(!exists(run.pid))
})

test('a run that was let go trains on, and is found again', REAL, async (t) => {
  const acts = [{ do: 'await_order', at: 'boundary', step: 3 }]
  const run = await start(t, { script: { step_ms: 10, acts }, config: { max_steps: 30 } })
  await collect(run, (event) => event.step === 3)
  await run.detach()
  assert.deepEqual(await collect(run, () => false).then((rest) => rest.every((event) => event.seq > 0)), true)
  await assert.rejects(run.pause(), trainwire.NoWorker)
  assert.ok(exists(run.pid))
  const again = await attach(run.runDir)
  assert.equal((await again.set({ log_every: 5 })).applied.log_every, 5)
  const result = await again.wait()
  assert.deepEqual([result.outcome, result.step], ['completed', 30])
})

test('a client that is killed takes its run with it, saved', REAL, async (t) => {
  const dir = folder()
  const program = `
    const { launch } = require(${JSON.stringify(packageFolder)})
    launch({ model: 'm', data: 'd', run_dir: ${JSON.stringify(path.join(dir, 'run'))}, max_steps: 100000 }, {
      command: ${JSON.stringify(worker)}, workerArgs: ['--engine', 'fake'],
    }).then((run) => run.on('step', (event) => event.step === 5 && console.log(run.pid)))
  `
  const child = spawn(process.execPath, ['-e', program], { stdio: ['ignore', 'pipe', 'inherit'] })
  const [pid] = await once(child.stdout, 'data')
  child.kill('SIGKILL')
  const run = await attach(path.join(dir, 'run'))
  const result = await run.wait({ timeout: 90_000 })
  assert.deepEqual([result.outcome, result.exitCode], ['interrupted', 20])
  assert.ok(result.checkpoint)
  await until('the worker left', () => !exists(Number(pid)))
})

test('a second worker for the same folder is refused', REAL, async (t) => {
  const dir = folder()
  const first = await start(t, { dir, config: { max_steps: 100_000 } })
  await collect(first, (event) => event.type === 'step')
  const second = await start(t, { dir })
  const result = await second.wait()
  assert.equal(result.error.code, 'busy')
  await first.close()
})

test('a lingering run answers until it is stopped', REAL, async (t) => {
  const run = await start(t, { linger: true })
  await collect(run, (event) => event.type === 'complete')
  assert.match((await run.generate({ prompt: 'Hello?' })).text, /\w/)
  await run.stop()
  assert.equal((await run.wait()).outcome, 'completed')
})
