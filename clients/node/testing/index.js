'use strict'

const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')

const samples = require('./lines.json')

const TRANSPORT = new Set(['hello', 'response', 'heartbeat', 'gap'])

const folders = []
process.once('exit', () => folders.forEach((folder) => fs.rmSync(folder, { recursive: true, force: true })))

/**
 * Gives the `command` of a fake worker that plays a script: `{worker: [actions]}`, or `{attempts: [[actions], …]}`,
 * one list for each process that the client starts.
 */
function fakeWorker(script) {
  if (!Array.isArray(script?.worker) && !Array.isArray(script?.attempts)) {
    throw new TypeError('A script has `worker`, a list of actions, or `attempts`, a list of such lists.')
  }
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'trainwire-fake-'))
  folders.push(folder)
  const file = path.join(folder, 'script.json')
  fs.writeFileSync(file, JSON.stringify(script))
  return [process.execPath, path.join(__dirname, 'worker.js'), file]
}

/**
 * Turns a recorded session, the stdout of a worker, into a script that plays its lines as they stand.
 *
 * Before the first line that names a command (an event's `cause`, a response's `id`) that command is awaited, and the
 * client's id is put in from there on.
 */
function session(file) {
  const lines = fs.readFileSync(file, 'utf8').split('\n').filter(Boolean).map((line) => JSON.parse(line))
  const commands = new Map()
  for (const { type, id, cmd } of lines) if (type === 'response' && id !== null) commands.set(id, cmd)
  const worker = []
  for (const line of lines) {
    const id = line.type === 'response' ? line.id : line.cause
    if (commands.has(id)) {
      worker.push({ await: commands.get(id), as: id })
      commands.delete(id)
    }
    const { pid, ...hello } = line
    worker.push(line.type === 'hello' ? { hello } : { verbatim: line })
    if (line.type === 'end') worker.push({ exit: line.exit_code })
  }
  return { worker }
}

/** Completes a message from a sample of its type, for tests of code that handles events. */
function sample(type, fields = {}) {
  if (!Object.hasOwn(samples, type)) throw new TypeError(`There is no message type ${type}.`)
  const message = { ...samples[type], ...fields }
  if (!TRANSPORT.has(type)) Object.assign(message, { seq: fields.seq ?? 1, ts: fields.ts ?? 1_700_000_000_001 })
  return message
}

module.exports = { fakeWorker, session, sample }
