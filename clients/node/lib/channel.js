'use strict'

const { LineSplitter } = require('./lines.js')
const { CommandFailed, CommandTimeout } = require('./errors.js')

/** The message types of protocol 1. A worker of a later minor version may send others. */
const KNOWN_TYPES = new Set(
  (
    'init epoch_start step generation checkpoint epoch_end complete log paused resumed status attempt data progress ' +
    'eval_end config_changed command error end hello response heartbeat gap'
  ).split(' '),
)
const PROTOCOL = 1
/** Junk that is kept for an error message, in characters. */
const JUNK_KEPT = 2048

/**
 * Speaks the protocol over any byte stream: bytes in, messages out, a promise for each command. It holds no process.
 *
 * `write(text)` sends a line. `onMessage` gets every message but responses and replayed lines that a command asked
 * for, those of unknown types included; `onJunk` gets lines that are no messages.
 */
class Channel {
  #write
  #onMessage
  #onJunk
  #lines = new LineSplitter(
    (line) => this.#line(line),
    () => this.#junk('(a line without an end)'),
  )
  #next = 1
  #open = new Map()

  /** Lines that were no messages, and the first of them. */
  junk = 0
  junkText = ''

  constructor({ write, onMessage, onJunk }) {
    this.#write = write
    this.#onMessage = onMessage
    this.#onJunk = onJunk
  }

  get openCommands() {
    return this.#open.size
  }

  feed(chunk) {
    this.#lines.push(chunk)
  }

  #line(line) {
    let message
    // A first byte other than `{` is junk without a look at the rest: banners may be long.
    if (line.charCodeAt(0) === 0x7b) {
      try {
        message = JSON.parse(line)
      } catch {
        message = undefined
      }
    }
    const type = message?.type
    if (typeof type !== 'string') {
      if (line.trim() !== '') this.#junk(line)
    } else if (type === 'response') this.#response(message)
    else if (message.replay === true) this.#open.get(message.cause)?.onReplay?.(message)
    else this.#onMessage(message)
  }

  #junk(line) {
    this.junk += 1
    if (this.junkText.length < JUNK_KEPT) this.junkText += `${line.slice(0, JUNK_KEPT)}\n`
    this.#onJunk(line)
  }

  #response(message) {
    const command = this.#open.get(message.id)
    if (command === undefined) return
    const { ok, error = { code: 'internal', message: 'The worker gave no reason.' } } = message
    if (ok) command.settle(null, message)
    else command.settle(new CommandFailed(command.cmd, error))
  }

  /**
   * Sends a command and resolves with its response. `timeout` (ms, 0: none) and `signal` end the waiting, not the
   * command. `doing()` says in a sentence what the worker does, for the message of a timeout.
   */
  request(cmd, parameters, { timeout = 0, signal, onReplay, doing = () => '' } = {}) {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(aborted(signal))
        return
      }
      const id = this.#next++
      let timer
      const onAbort = () => settle(aborted(signal))
      const settle = (error, value) => {
        clearTimeout(timer)
        signal?.removeEventListener('abort', onAbort)
        this.#open.delete(id)
        if (error) reject(error)
        else resolve(value)
      }
      signal?.addEventListener('abort', onAbort, { once: true })
      if (timeout > 0) timer = setTimeout(() => settle(new CommandTimeout(cmd, timeout, doing())), timeout)
      this.#open.set(id, { cmd, settle, onReplay })
      this.#write(`${JSON.stringify({ id, cmd, ...parameters })}\n`)
    })
  }

  /** Fails every open command: the other side is gone. */
  failAll(makeError) {
    for (const command of [...this.#open.values()]) command.settle(makeError(command.cmd))
  }
}

/** Makes the error that Node's own functions reject with when their signal is aborted. */
function aborted(signal) {
  const error = new Error('The operation was aborted', { cause: signal.reason })
  error.name = 'AbortError'
  error.code = 'ABORT_ERR'
  return error
}

module.exports = { Channel, PROTOCOL, KNOWN_TYPES, aborted }
