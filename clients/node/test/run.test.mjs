// What Node people expect of a run: events, signals, loops, errors. The worker is the fake one.

import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { test } from 'node:test'

import * as trainwire from 'trainwire'
import { fakeWorker } from 'trainwire/testing'

import control from '../lib/control.js'
import { collect, exists, folder, packageFolder, types, until } from './helpers.mjs'

const { launch, attach, validate } = trainwire
const PATIENT = { timeout: 120_000 }

/** Launches a fake worker that plays these actions after its start. */
async function start(t, actions, options = {}) {
  const run_dir = path.join(folder(), 'run')
  const script = Array.isArray(actions) ? { worker: [{ hello: {} }, { start: {} }, ...actions] } : actions
  const config = { model: 'm', data: 'd.jsonl', run_dir }
  const run = await launch(config, { command: fakeWorker(script), ...options })
  t.after(() => run.kill())
  return run
}

test('listeners get every event, by its type and as `event`, and `close` with the result', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 3 }, { finish: {} }])
  const steps = []
  const all = []
  run.on('step', (event) => steps.push(event.step))
  run.on('event', (event) => all.push(event.type))
  const [result] = await once(run, 'close')
  assert.deepEqual(steps, [1, 2, 3])
  assert.deepEqual(all, ['attempt', 'init', 'step', 'step', 'step', 'complete', 'end'])
  assert.equal(result.outcome, 'completed')
})

test('a failed run throws nothing at those who do not listen for errors', PATIENT, async (t) => {
  const failure = [{ send: { type: 'error', code: 'non_finite', message: 'The loss stayed nan.', hint: '$drop' } }, { finish: { outcome: 'failed', exit_code: 6 } }]
  const silent = await start(t, failure)
  const result = await silent.wait()
  assert.equal(result.outcome, 'failed')
  assert.throws(() => result.check(), (error) => error instanceof trainwire.RunFailed && error.code === 'non_finite')

  const run = await start(t, failure)
  const [error] = await once(run, 'error')
  assert.ok(error instanceof trainwire.RunFailed)
  assert.equal(error.message, 'The loss stayed nan.')
})

test('a death reaches those who listen for errors', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 1 }, { die: 'SIGKILL' }])
  const [error] = await once(run, 'error')
  assert.ok(error instanceof trainwire.WorkerDied)
  assert.equal(error.signal, 'SIGKILL')
  assert.match(error.message, /ended by SIGKILL/)
})

test('an aborted launch throws AbortError and starts nothing', PATIENT, async (t) => {
  const reason = new Error('changed my mind')
  await assert.rejects(start(t, [], { signal: AbortSignal.abort(reason) }), (error) => {
    return error.name === 'AbortError' && error.code === 'ABORT_ERR' && error.cause === reason
  })
})

test('abort while the config is prepared starts nothing', PATIENT, async (t) => {
  for (const call of [launch, validate]) {
    const controller = new AbortController()
    const calling = call({ model: 'm', data: 'd' }, { command: ['/no/such/program'], signal: controller.signal })
    controller.abort()
    await assert.rejects(calling, { name: 'AbortError' })
  }
})

test('abort while the worker is silent ends it', PATIENT, async (t) => {
  for (const call of [launch, validate]) {
    const pidFile = path.join(folder(), 'pid')
    const program = `require('fs').writeFileSync(${JSON.stringify(pidFile)}, String(process.pid)); setInterval(() => {}, 1000)`
    const controller = new AbortController()
    const calling = call({ model: 'm', data: 'd' }, { command: [process.execPath, '-e', program, '--'], signal: controller.signal })
    await until('the program wrote its number', () => fs.existsSync(pidFile) && fs.readFileSync(pidFile, 'utf8') !== '')
    controller.abort()
    await assert.rejects(calling, { name: 'AbortError' })
    assert.ok(!exists(Number(fs.readFileSync(pidFile, 'utf8'))))
  }
})

test('a validation whose worker is silent ends in its time, and no worker is left', PATIENT, async (t) => {
  const command = fakeWorker({ worker: [{ hang: true }] })
  await assert.rejects(validate({ model: 'm' }, { command, helloTimeout: 200 }), trainwire.CommandTimeout)
})

test('abort ends loops at once and the run gracefully', PATIENT, async (t) => {
  const controller = new AbortController()
  const stopped = { outcome: 'stopped', reason: 'stop', step: 2, checkpoint: '/c' }
  const actions = [{ steps: 2 }, { await: 'stop' }, { answer: 'stop', result: stopped }, { finish: stopped }]
  const run = await start(t, actions, { signal: controller.signal })
  const seen = []
  await assert.rejects(
    async () => {
      for await (const event of run) {
        seen.push(event.type)
        if (event.step === 2) controller.abort()
      }
    },
    { name: 'AbortError' },
  )
  assert.equal(seen.at(-1), 'step')
  const result = await run.wait()
  assert.equal(result.outcome, 'stopped')
  assert.deepEqual(result.shutdown.map(({ name }) => name), ['stop'])
})

test('a call given up by its signal or its time leaves the run alone', PATIENT, async (t) => {
  const run = await start(t, [{ await: 'pause' }, { await: 'eval' }, { await: 'ping' }, { answer: 'ping', result: { ts: 3 } }, { finish: {} }])
  const controller = new AbortController()
  const pausing = run.pause({ signal: controller.signal })
  controller.abort()
  await assert.rejects(pausing, { name: 'AbortError' })
  await assert.rejects(run.eval({ timeout: 50 }), trainwire.CommandTimeout)
  await assert.rejects(run.wait({ timeout: 50 }), trainwire.CommandTimeout)
  await assert.rejects(run.wait({ signal: AbortSignal.abort() }), { name: 'AbortError' })
  assert.deepEqual(await run.ping(), { ts: 3 })
  assert.equal((await run.wait()).outcome, 'completed')
})

test('a loop that is left goes on where it was', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 5 }, { finish: {} }])
  assert.deepEqual(types(await collect(run, (event) => event.step === 2)), ['attempt', 'init', 'step', 'step'])
  assert.deepEqual(types(await collect(run)), ['step', 'step', 'step', 'complete', 'end'])
  assert.deepEqual(await collect(run), [])
})

test('two loops at a time each get every event', PATIENT, async (t) => {
  const run = await start(t, [{ await: 'ping' }, { steps: 3 }, { finish: {} }])
  const first = collect(run)
  const second = collect(run)
  await run.request('ping', {}, { timeout: 1 }).catch(() => {})
  assert.deepEqual(types((await first).slice(-5)), ['step', 'step', 'step', 'complete', 'end'])
  assert.deepEqual(types((await second).slice(-5)), ['step', 'step', 'step', 'complete', 'end'])
})

test('next may be called ahead', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 3 }, { finish: {} }])
  const iterator = run[Symbol.asyncIterator]()
  const found = await Promise.all(Array.from({ length: 8 }, () => iterator.next()))
  assert.deepEqual(found.map(({ value }) => value?.type), ['attempt', 'init', 'step', 'step', 'step', 'complete', 'end', undefined])
  assert.equal(found.at(-1).done, true)
})

test('leaving an `await using` block stops the run', PATIENT, async (t) => {
  const actions = [{ steps: 1 }, { await: 'stop' }, { answer: 'stop', result: {} }, { finish: { outcome: 'stopped', reason: 'stop' } }]
  const run = await start(t, actions)
  await run[Symbol.asyncDispose]()
  assert.equal(run.result.outcome, 'stopped')
})

test('a run that was told to stop is not started again', PATIENT, async (t) => {
  const run = await start(t, [{ await: 'stop' }, { die: 'SIGSEGV' }], { supervise: true })
  await assert.rejects(run.stop(), trainwire.WorkerDied)
  await assert.rejects(run.wait(), (error) => error.restarts === 0)
})

test('supervision tells of each restart', PATIENT, async (t) => {
  const dying = [{ hello: {} }, { start: {} }, { die: 'SIGKILL' }]
  const run = await start(t, { attempts: [dying, dying, [{ hello: {} }, { start: {} }, { finish: {} }]] }, { supervise: { restarts: 2 } })
  const told = []
  run.on('restart', ({ restarts, error }) => told.push([restarts, error.signal]))
  assert.equal((await run.wait()).restarts, 2)
  assert.deepEqual(told, [[1, 'SIGKILL'], [2, 'SIGKILL']])
})

test('a worker that is refused after its death is reported as such', PATIENT, async (t) => {
  const run = await start(t, { attempts: [[{ hello: {} }, { start: {} }, { die: 'SIGKILL' }], [{ hello: { protocol: 2 } }, { hang: true }]] }, { supervise: { restarts: 1 } })
  await assert.rejects(run.wait(), trainwire.ProtocolMismatch)
  assert.ok(!exists(run.pid))
})

test('a worker that refuses start and stays is told to leave', PATIENT, async (t) => {
  const run = await start(t, {
    worker: [
      { hello: {} },
      { await: 'start' },
      { answer: 'start', error: { code: 'unknown_param', message: 'start has no parameter.' } },
      { await: 'eof' },
      { finish: { outcome: 'failed', reason: 'end of input', exit_code: 20, seq: '$drop' } },
    ],
  })
  assert.equal((await run.wait()).outcome, 'failed')
})

test('how the worker is found is never guessed', PATIENT, async () => {
  const config = { model: 'm', data: 'd' }
  await assert.rejects(launch(config), (error) => error instanceof trainwire.WorkerNotFound && /needs `command`/.test(error.message))
  await assert.rejects(launch(config, { command: 'trainwire' }), TypeError)
  await assert.rejects(launch(config, { command: ['/nowhere/trainwire'] }), (error) => {
    return error instanceof trainwire.WorkerNotFound && error.message.includes('/nowhere/trainwire') && error.cause.code === 'ENOENT'
  })
  await assert.rejects(launch(config, { command: ['/etc'] }), /may not be executed/)
  await assert.rejects(launch(config, { command: ['trainwire'], cwd: '/nowhere' }), /working folder \/nowhere does not exist/)
})

test('misspelled options and configs of no known kind are refused', PATIENT, async (t) => {
  const config = { model: 'm', data: 'd' }
  await assert.rejects(launch(config, { command: ['x'], max_queue: 3 }), /launch has no option max_queue; it takes .*maxQueue/)
  await assert.rejects(launch(config, { command: ['x'], maxQueue: 0 }), RangeError)
  await assert.rejects(launch(42, { command: ['x'] }), TypeError)
  await assert.rejects(launch('nowhere.toml', { command: ['x'] }), /nowhere\.toml cannot be read/)
  await assert.rejects(attach('.', { timeout: 3 }), TypeError)
  const run = await start(t, [{ finish: {} }])
  await assert.rejects(async () => run.eval({ max_batches: 3 }), /eval has no option max_batches; it takes maxBatches/)
})

test('a config file is read where it lies, and names the run', PATIENT, async (t) => {
  const dir = folder()
  fs.writeFileSync(path.join(dir, 'mine.toml'), 'model = "m"\ndata = "d.jsonl"\nchat_template_args = {deep = [1, 2]}\nrun_dir = "here"\n')
  const expected = { model: 'm', data: 'd.jsonl', chat_template_args: { deep: [1, 2] }, run_name: 'mine' }
  const script = { worker: [{ hello: {} }, { await: 'start', with: { config: expected } }, { send: { type: 'end', seq: '$drop' } }] }
  const run = await launch(path.join(dir, 'mine.toml'), { command: fakeWorker(script) })
  assert.equal((await run.wait()).outcome, 'completed')
  // The fake worker opens the log relative to its working folder.
  assert.ok(fs.existsSync(path.join(dir, 'here', 'events.jsonl')))

  fs.writeFileSync(path.join(dir, 'broken.toml'), 'model = m')
  await assert.rejects(launch(path.join(dir, 'broken.toml'), { command: ['x'] }), /broken\.toml is not TOML: .*line 1/)
  fs.writeFileSync(path.join(dir, 'broken.json'), '{')
  await assert.rejects(launch(path.join(dir, 'broken.json'), { command: ['x'] }), /broken\.json is not JSON/)
})

test('rows in memory are written into the run folder', PATIENT, async (t) => {
  const run_dir = path.join(folder(), 'run')
  const rows = [{ text: 'ä\u2028b' }, { text: 'c' }]
  const validRows = [{ text: 'd' }]
  const expected = { data: path.join(run_dir, 'rows', 'train.jsonl'), valid_data: path.join(run_dir, 'rows', 'valid.jsonl') }
  const script = { worker: [{ hello: {} }, { await: 'start', with: { config: expected } }, { send: { type: 'end', seq: '$drop' } }] }
  const run = await launch({ model: 'm', run_dir }, { command: fakeWorker(script), rows: new Set(rows), validRows })
  assert.equal((await run.wait()).outcome, 'completed')
  const read = (file) => fs.readFileSync(file, 'utf8').trim().split('\n').map((line) => JSON.parse(line))
  assert.deepEqual(read(expected.data), rows)
  assert.deepEqual(read(expected.valid_data), validRows)
  await assert.rejects(launch({ model: 'm', data: 'd', run_dir }, { command: ['x'], rows: [] }), /exclude each other/)
  await assert.rejects(launch({ model: 'm', run_dir }, { command: ['x'], rows: [] }), /rows is empty/)
})

function program(body, last = { await: 'eof' }) {
  const config = "{model: 'm', data: 'd', run_dir: process.argv[1]}"
  return `
    const { launch } = require(${JSON.stringify(packageFolder)})
    const command = ${JSON.stringify(fakeWorker({ worker: [{ hello: {} }, { start: {} }, { steps: 2 }, last] }))}
    launch(${config}, { command }).then(async (run) => { ${body} })
  `
}

test('what a listener throws reaches the process, and takes no event with it', PATIENT, async (t) => {
  const body = `
    process.on('uncaughtException', (error) => console.log(error.message))
    run.on('step', (event) => { throw new Error('step ' + event.step) })
    console.log((await run.wait()).outcome)
  `
  const done = spawnSync(process.execPath, ['-e', program(body, { finish: {} }), folder()], { encoding: 'utf8', timeout: 90_000 })
  assert.deepEqual(done.stdout.trim().split('\n').sort(), ['completed', 'step 1', 'step 2'], done.stderr)
})

test('an idle client does not keep the process alive', PATIENT, async (t) => {
  const done = spawnSync(process.execPath, ['-e', program('console.log(run.pid)'), folder()], { encoding: 'utf8', timeout: 90_000 })
  assert.equal(done.status, 0, done.stderr)
  const pid = Number(done.stdout)
  await until('the worker saw the end of its stdin', () => !exists(pid))
})

test('a fake worker that hangs leaves with its front end', PATIENT, async (t) => {
  const body = "console.log(run.pid); process.kill(process.pid, 'SIGKILL')"
  const done = spawnSync(process.execPath, ['-e', program(body, { hang: true }), folder()], { encoding: 'utf8', timeout: 90_000 })
  await until('the worker left', () => !exists(Number(done.stdout)))
})

test('what waits for a run keeps the process alive', PATIENT, async (t) => {
  for (const body of ["run.on('step', () => {})", 'for await (const _ of run);', 'await run.wait()', 'await run.eval()']) {
    const child = spawn(process.execPath, ['-e', program(`console.log(run.pid); ${body}`), folder()], { stdio: ['ignore', 'pipe', 'inherit'] })
    const [chunk] = await once(child.stdout, 'data')
    await new Promise((resolve) => setTimeout(resolve, 200))
    assert.equal(child.exitCode, null, body)
    child.kill('SIGKILL')
    await once(child, 'exit')
    await until('the worker saw the end of its stdin', () => !exists(Number(chunk)))
  }
})

test('a listener that is taken off lets the process end', PATIENT, async (t) => {
  const body = "const f = () => {}; run.on('step', f); run.off('step', f); run.once('attempt', f)"
  const done = spawnSync(process.execPath, ['-e', program(body), folder()], { encoding: 'utf8', timeout: 90_000 })
  assert.equal(done.status, 0, done.stderr)
})

test('the log is tailed while it grows, half lines wait', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 2 }, { await: 'ping' }, { log_raw: '{"type":"paus' }, { sleep_ms: 300 }, { log_raw: 'ed","seq":5,"ts":1,"step":2}\n' }, { await: 'pause' }, { send: { type: 'resumed', seq: 6 } }, { finish: {} }])
  await until('the log is there', () => run.lastSeq >= 4)
  // Without a lock the fake worker is taken for dead, so that this process stands in for it.
  fs.writeFileSync(path.join(run.runDir, 'run.lock'), JSON.stringify({ pid: process.pid, since_ms: 0 }))
  const follower = await attach(run.runDir)
  const reading = collect(follower)
  run.ping({ timeout: 1 }).catch(() => {})
  run.pause({ timeout: 1 }).catch(() => {})
  await run.wait()
  fs.rmSync(path.join(run.runDir, 'run.lock'))
  assert.deepEqual(types(await reading), ['attempt', 'init', 'step', 'step', 'paused', 'resumed', 'complete', 'end'])
  assert.equal((await follower.wait()).outcome, 'completed')
})

test('a run of a worker on another host is followed while its lock says so', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 2 }, { await: 'stop' }, { finish: {} }])
  await until('the log is there', () => run.lastSeq >= 4)
  const gone = spawnSync(process.execPath, ['-e', ''])
  const lock = path.join(run.runDir, 'run.lock')
  fs.writeFileSync(lock, JSON.stringify({ pid: gone.pid, since_ms: 0, host: `not-${os.hostname()}` }))
  const follower = await attach(run.runDir)
  const reading = collect(follower)
  await until('the steps were read', () => follower.lastSeq >= 4)
  run.stop({ timeout: 1 }).catch(() => {})
  await run.wait()
  fs.rmSync(lock)
  assert.deepEqual(types(await reading).slice(-1), ['end'])
  fs.writeFileSync(lock, JSON.stringify({ pid: gone.pid, since_ms: 0, host: os.hostname() }))
  assert.equal(await control.workerLives(run.runDir), false)
  fs.writeFileSync(lock, JSON.stringify({ pid: gone.pid, since_ms: 0, host: `not-${os.hostname()}` }))
  assert.equal(await control.workerLives(run.runDir), true)
})

test('an attached run that is left ends its loops without an error', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 2 }, { await: 'stop' }, { finish: {} }])
  await until('the log is there', () => run.lastSeq >= 4)
  fs.writeFileSync(path.join(run.runDir, 'run.lock'), JSON.stringify({ pid: process.pid, since_ms: 0 }))
  const follower = await attach(run.runDir)
  const reading = collect(follower)
  await until('the steps were read', () => follower.lastSeq >= 4)
  await assert.rejects(follower.ping(), trainwire.NoWorker)
  await follower.close()
  assert.deepEqual(types(await reading), ['attempt', 'init', 'step', 'step'])
  await assert.rejects(follower.pause(), trainwire.NoWorker)
})

test('a clock that is set back hides no death from those who follow', PATIENT, async (t) => {
  const run = await start(t, [{ steps: 2 }, { await: 'stop' }, { finish: {} }])
  await until('the log is there', () => run.lastSeq >= 4)
  const holder = spawn(process.execPath, ['-e', 'setInterval(() => {}, 1000)'], { stdio: 'ignore' })
  t.after(() => holder.kill('SIGKILL'))
  fs.writeFileSync(path.join(run.runDir, 'run.lock'), JSON.stringify({ pid: holder.pid, since_ms: 0 }))
  const follower = await attach(run.runDir)
  const reading = collect(follower)
  await until('the steps were read', () => follower.lastSeq >= 4)
  const real = Date.now
  t.mock.method(Date, 'now', () => real() - 3_600_000)
  holder.kill('SIGKILL')
  await once(holder, 'exit')
  await assert.rejects(reading, trainwire.WorkerDied)
})
