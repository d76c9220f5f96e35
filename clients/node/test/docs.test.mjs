// The reference names everything that is public, nothing that is not, and its examples run.

import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import fs from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { test } from 'node:test'

import * as trainwire from 'trainwire'
import * as testing from 'trainwire/testing'
import { fakeWorker } from 'trainwire/testing'

import { folder, packageFolder, python, repository, withoutWorker } from './helpers.mjs'

const reference = fs.readFileSync(path.join(repository, 'docs', 'node-client.md'), 'utf8')
const declarations = fs.readFileSync(path.join(packageFolder, 'index.d.ts'), 'utf8')
/** Every word that stands in code style outside the examples. */
const named = new Set(
  [...reference.replaceAll(/```[\s\S]*?```/g, '').matchAll(/`([^`]+)`/g)].flatMap(([, code]) => code.match(/[A-Za-z_]\w*/g) ?? []),
)

/** Gives the members of an interface or class as it is declared. */
function members(name) {
  const [, body] = new RegExp(`(?:interface|class) ${name}\\b[^{]*\\{(\\}|[\\s\\S]*?\\n\\})`).exec(declarations)
  return [...body.matchAll(/^ {2}(?:readonly )?(\w+)[?(<:]/gm)].map(([, member]) => member)
}

const classes = Object.keys(trainwire).filter((name) => /^[A-Z][a-z]/.test(name))

test('every exported name, member and option is in the reference', () => {
  const wanted = [...Object.keys(trainwire), ...Object.keys(testing)].filter((name) => name !== 'default' && name !== 'module.exports')
  const interfaces = ['Run', 'LaunchedRun', 'LaunchOptions', 'WorkerOptions', 'AttachOptions', 'CallOptions', 'ShutdownTimes', 'Supervision', 'Result', 'CheckpointInfo', 'Series']
  for (const name of [...interfaces, ...classes]) wanted.push(...members(name))
  assert.deepEqual(wanted.filter((name) => !named.has(name)), [])
})

test('what the declarations promise is there', async () => {
  const command = fakeWorker({ worker: [{ hello: {} }, { start: {} }, { finish: {} }] })
  const run = await trainwire.launch({ model: 'm', data: 'd', run_dir: folder() }, { command })
  const result = await run.wait()
  for (const name of [...members('Run'), ...members('LaunchedRun')]) assert.ok(name in run, name)
  for (const name of members('Result')) assert.ok(name in result, name)
  assert.deepEqual(Object.keys(result).filter((name) => !members('Result').includes(name)), [])
  const declared = [...declarations.matchAll(/^export (?:declare )?(?:function|const|class) (\w+)/gm)].map(([, name]) => name)
  assert.deepEqual(declared.sort(), Object.keys(trainwire).filter((name) => name !== 'default' && name !== 'module.exports').sort())
  const metrics = /type MetricName =([\s\S]*?)\n\n/.exec(declarations)[1].match(/\w+/g)
  assert.deepEqual(metrics, [...trainwire.METRICS])
})

test('every message type of the schema has a sample, and the client knows it', () => {
  const schema = JSON.parse(fs.readFileSync(path.join(packageFolder, 'schema.json'), 'utf8'))
  const samples = JSON.parse(fs.readFileSync(path.join(packageFolder, 'testing', 'lines.json'), 'utf8'))
  const types = schema.$defs.Message.oneOf.map(({ $ref }) => schema.$defs[$ref.split('/').pop()].properties?.type.const ?? 'response')
  assert.deepEqual(types.sort(), Object.keys(samples).sort())
  const { KNOWN_TYPES } = createRequire(import.meta.url)('../lib/channel.js')
  assert.deepEqual(types, [...KNOWN_TYPES].sort())
})

test('the fake worker plays every action that its page lists', () => {
  const page = fs.readFileSync(path.join(packageFolder, 'testing', 'README.md'), 'utf8')
  const program = fs.readFileSync(path.join(packageFolder, 'testing', 'worker.js'), 'utf8')
  const listed = [...page.matchAll(/\*\*(\w+)\*\*:/g)].map(([, name]) => name)
  const played = [.../#acts = \{([\s\S]*?)\n {2}\}/.exec(program)[1].matchAll(/^ {4}(\w+): /gm)].map(([, name]) => name)
  assert.deepEqual(listed.sort(), played.sort())
})

test('the examples of the reference and of the README run as they stand', { skip: withoutWorker, timeout: 240_000 }, () => {
  const dir = folder()
  fs.mkdirSync(path.join(dir, 'node_modules'))
  fs.symlinkSync(packageFolder, path.join(dir, 'node_modules', 'trainwire'))
  fs.writeFileSync(path.join(dir, 'chat.jsonl'), '{"text":"a"}\n')
  fs.writeFileSync(path.join(dir, 'script.json'), '{"step_ms": 5}')
  const worker = path.join(dir, 'trainwire')
  fs.writeFileSync(worker, `#!/bin/sh\nexec '${python}' -m trainwire_worker "$@" --engine fake --script '${dir}/script.json'\n`, { mode: 0o755 })
  const readme = fs.readFileSync(path.join(packageFolder, 'README.md'), 'utf8')
  const outputs = [...`${reference}${readme}`.matchAll(/```js\n([\s\S]*?)```/g)].map(([, code], i) => {
    const file = path.join(dir, `example-${i}.mjs`)
    fs.writeFileSync(file, code.replaceAll('/path/to/trainwire', worker))
    const done = spawnSync(process.execPath, [file], { cwd: dir, encoding: 'utf8', timeout: 120_000 })
    assert.equal(done.status, 0, `${code}\n${done.stderr}`)
    return done.stdout.trim().split('\n')
  })
  assert.equal(outputs.length, 6)
  const [first, attached, steered, read, fake] = outputs
  assert.equal(first.length, 41)
  assert.match(first.at(-1), /^completed \d.* \S+final 0$/)
  assert.equal(attached.at(-1), 'completed')
  assert.equal(steered.at(-1), 'stopped 0')
  assert.match(read.at(-1), /^40 .*final$/)
  assert.deepEqual(fake, ['attempt', 'init', 'step', 'step', 'step', 'WorkerDied SIGKILL'])
})
