// The script by which the TUI of @mlx-node/trl starts a worker.

import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs'
import path from 'node:path'
import { test } from 'node:test'

import { folder, packageFolder, withoutWorker, worker } from './helpers.mjs'

const script = path.join(packageFolder, 'mlx-tui.mjs')
const REAL = { skip: withoutWorker, timeout: 120_000 }

function config(t, lines = '') {
  const dir = folder()
  fs.writeFileSync(path.join(dir, 'd.jsonl'), '{"text":"a"}\n')
  const file = path.join(dir, 'c.toml')
  fs.writeFileSync(file, `model = "m"\ndata = "d.jsonl"\nrun_dir = "run"\nmax_steps = 5\n${lines}`)
  return file
}

const env = { ...process.env, TRAINWIRE_COMMAND: JSON.stringify(worker), TRAINWIRE_CONFIG: '' }

/** Runs the script as the TUI does, with a stdin that stays open. */
async function tui(...words) {
  const child = spawn(process.execPath, [script, ...words, '--engine=fake'], { env, stdio: ['pipe', 'pipe', 'inherit'] })
  let text = ''
  child.stdout.on('data', (chunk) => (text += chunk))
  const [status] = await once(child, 'close')
  return { status, messages: text.trim().split('\n').map((line) => JSON.parse(line)) }
}

test('the TUI gets its own dialect over the inherited stdout, and exit code 0', REAL, async (t) => {
  const { status, messages } = await tui(config(t))
  assert.equal(status, 0)
  assert.ok(!messages.some((message) => message.type === 'hello'))
  const step = messages.find((message) => message.type === 'step')
  assert.equal(typeof step.trainingTimeMs, 'number')
  assert.equal(messages.filter((message) => message.type === 'step').length, 5)
})

test('STOP ends the run, and --resume goes on with it', REAL, async (t) => {
  const file = config(t)
  const child = spawn(process.execPath, [script, file, 'max_steps=100000', '--engine=fake'], { env, stdio: ['pipe', 'pipe', 'inherit'] })
  let text = ''
  let told = false
  child.stdout.on('data', (chunk) => {
    text += chunk
    if (told || !text.includes('"type":"step"')) return
    told = true
    child.stdin.write('STOP\n')
  })
  assert.deepEqual(await once(child, 'exit'), [0, null])
  assert.ok(!text.includes('"type":"complete"'))

  const { status, messages } = await tui(file, 'max_steps=40', '--resume')
  assert.equal(status, 0)
  assert.ok(messages.find((message) => message.type === 'step').step > 1)
})

test('the end of stdin stops the run as well', REAL, async (t) => {
  const child = spawn(process.execPath, [script, config(t), 'max_steps=100000', '--engine=fake'], { env, stdio: ['pipe', 'pipe', 'inherit'] })
  await once(child.stdout, 'data')
  child.stdout.resume()
  child.stdin.end()
  assert.deepEqual(await once(child, 'exit'), [0, null])
})

test('signals reach the worker, and exit codes come back', REAL, async (t) => {
  const child = spawn(process.execPath, [script, config(t), 'max_steps=100000', '--engine=fake'], { env, stdio: ['pipe', 'pipe', 'inherit'] })
  await once(child.stdout, 'data')
  child.stdout.resume()
  child.kill('SIGTERM')
  assert.deepEqual(await once(child, 'exit'), [0, null])

  const refused = spawnSync(process.execPath, [script, config(t), 'batch_sise=3', '--engine=fake'], { env, encoding: 'utf8' })
  assert.equal(refused.status, 3)
})

test('the config may come from the environment, and what is missing is said', { timeout: 120_000 }, () => {
  const run = (words, more) => spawnSync(process.execPath, [script, ...words], { env: { ...env, ...more }, encoding: 'utf8' })
  const bare = run([])
  assert.equal(bare.status, 2)
  assert.match(bare.stderr, /no config/)
  const missing = run(['c.toml'], { TRAINWIRE_COMMAND: '/nowhere/trainwire' })
  assert.equal(missing.status, 2)
  assert.match(missing.stderr, /\/nowhere\/trainwire.*cannot be started/)
  const told = run(['--resume'], { TRAINWIRE_CONFIG: 'from-env.toml', TRAINWIRE_COMMAND: '["/bin/echo","-n"]' })
  assert.equal(told.stdout, 'run from-env.toml --resume --dialect=mlx-tui --on-eof=stop')
})
