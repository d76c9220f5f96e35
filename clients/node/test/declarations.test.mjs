// The declarations say what workers print and take: recorded lines are compiled as values of their types.

import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import fs from 'node:fs'
import path from 'node:path'
import { test } from 'node:test'

import { folder, packageFolder, repository } from './helpers.mjs'

const tsc = path.join(packageFolder, 'node_modules', 'typescript', 'bin', 'tsc')
const COMPILED = { skip: fs.existsSync(tsc) ? false : 'typescript is not installed', timeout: 120_000 }
const examples = path.join(repository, 'protocol', 'examples')
const read = (file) => fs.readFileSync(path.join(examples, file), 'utf8').trim().split('\n')

/** One line of each kind: of equal keys and of equal types of values one is enough. */
function kinds(lines) {
  const shape = (value) => (value && typeof value === 'object' ? Object.entries(value).map(([k, v]) => [k, shape(v)]) : typeof value)
  return [...new Map(lines.map((line) => [JSON.stringify([line.type ?? line.cmd, shape(line)]), line])).values()]
}

const messages = kinds(
  fs.readdirSync(examples).filter((name) => name.endsWith('.jsonl')).flatMap((name) => read(name).map((line) => JSON.parse(line))),
)
const commands = kinds(
  fs.readdirSync(path.join(examples, 'commands')).flatMap((name) =>
    read(path.join('commands', name)).filter((line) => line.startsWith('{') && line.endsWith('}')).map((line) => JSON.parse(line)),
  ),
).filter(({ cmd, config, values }) => cmd !== 'dance' && !config?.batchsize && !values?.batch_size)

function compile(lines) {
  const dir = folder()
  const types = JSON.stringify(path.join(packageFolder, 'protocol.d.ts'))
  const file = path.join(dir, 'lines.mts')
  fs.writeFileSync(file, [`import type { Command, Message } from ${types}`, ...lines].join('\n'))
  const words = ['--noEmit', '--strict', '--exactOptionalPropertyTypes', '--module', 'nodenext', '--target', 'es2022', '--types', '']
  const { status, stdout } = spawnSync(process.execPath, [tsc, ...words, file], { encoding: 'utf8' })
  return { status, stdout }
}

test('every recorded line is a value of its declared type', COMPILED, () => {
  assert.ok(messages.length > 60)
  assert.ok(commands.length > 15)
  const { status, stdout } = compile([
    ...messages.map((line, n) => `export const m${n}: Message = ${JSON.stringify(line)}`),
    ...commands.map((line, n) => `export const c${n}: Command = ${JSON.stringify(line)}`),
  ])
  assert.equal(status, 0, stdout)
})

test('a line with a field too many, too few or of another type is none', COMPILED, () => {
  const wrong = [
    ['Message', { type: 'paused', ts: 1, seq: 2 }],
    ['Message', { type: 'paused', ts: 1, seq: 2, step: 3, steps: 4 }],
    ['Message', { type: 'paused', ts: 1, seq: 2, step: '3' }],
    ['Message', { type: 'halted', ts: 1, seq: 2, step: 3 }],
    ['Message', { type: 'response', id: 1, cmd: 'ping', ok: true, result: { step: 1 } }],
    ['Message', { type: 'response', id: 1, cmd: 'ping', ok: false }],
    ['Command', { cmd: 'set', values: { batch_size: 4 } }],
    ['Command', { cmd: 'resume', steps: 'two' }],
  ]
  const { stdout } = compile(wrong.map(([type, line], n) => `export const w${n}: ${type} = ${JSON.stringify(line)}`))
  for (const n of wrong.keys()) assert.match(stdout, new RegExp(`lines\\.mts[(:]${n + 2}[,:]`), `line ${n}\n${stdout}`)
})
