'use strict'

const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')

const samples = require('./lines.json')

const TRANSPORT = new Set(['hello', 'response', 'heartbeat', 'gap'])

const folders = []
process.once('exit', () => folders.forEach((folder) => fs.rmSync(folder, { recursive: true, force: true })))

/**
 * Gives the `command` of a fake worker that plays a script: `{worker: [actions]}`, or `{attempts: [[actions], …]}` for
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
 * Turns a recorded session, the stdout of a worker, into a script: `hello` at once, the rest after `start`; each
 * response waits for its command.
 */
function session(file) {
  const worker = []
  for (const line of fs.readFileSync(file, 'utf8').split('\n')) {
    if (line === '') continue
    const message = JSON.parse(line)
    if (message.type === 'response' && message.cmd !== 'start' && message.cmd !== null) {
      worker.push({ await: message.cmd }, { answer: message.cmd, ...pick(message, ['result', 'error', 'at_seq']) })
    } else if (message.type === 'response') {
      if (message.cmd === 'start') worker.push({ answer: 'start', ...pick(message, ['result', 'error', 'at_seq']) })
    } else worker.push({ raw: `${line}\n` })
    if (message.type === 'hello') worker.push({ await: 'start' })
    if (message.type === 'end') worker.push({ exit: message.exit_code })
  }
  return { worker }
}

const pick = (object, keys) => Object.fromEntries(keys.filter((key) => key in object).map((key) => [key, object[key]]))

/** Completes a message from a sample of its type, for tests of code that handles events. */
function sample(type, fields = {}) {
  if (!Object.hasOwn(samples, type)) throw new TypeError(`There is no message type ${type}.`)
  const message = { ...samples[type], ...fields }
  if (!TRANSPORT.has(type)) Object.assign(message, { seq: fields.seq ?? 1, ts: fields.ts ?? 1_700_000_000_001 })
  return message
}

module.exports = { fakeWorker, session, sample }
