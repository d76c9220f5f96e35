'use strict'

const { spawn } = require('node:child_process')

const { Channel, PROTOCOL, aborted } = require('./channel.js')
const { CommandTimeout, ProtocolMismatch, WorkerDied, WorkerNotFound } = require('./errors.js')

/** How often a worker that saves is asked whether it still does, in ms. */
const SAVE_POLL = 200
/** Characters of stderr that are kept. */
const STDERR_KEPT = 16 << 10
const HELLO_TIMEOUT = 30_000
/** How long stdout may stay open behind a worker that has left: some grandchild holds it. */
const CLOSE_GRACE = 1000

/**
 * How long the worker is given at each rung of the ladder, in ms; `save`: how long a checkpoint that is being written
 * holds up the next rung; `exit`: how long it may stay after its `end` line.
 */
const SHUTDOWN = { stop: 60_000, stdin: 20_000, terminate: 10_000, save: 600_000, exit: 10_000 }

/**
 * One worker process under `serve`, in a process group of its own, with its channel.
 *
 * `onMessage`, `onJunk`, `onStderr` get what it says; `onClose({exitCode, signal})` comes once, when the
 * process is gone and all that it said has been read.
 */
class WorkerProcess {
  #child
  #handlers
  #times
  #exitTimer
  #settled = false
  #hello
  #held = false

  stderr = ''
  closed = false
  /** True once it has said a `hello` that this client understands. */
  greeted = false

  constructor(command, { cwd, env, args, times }, handlers) {
    this.#handlers = handlers
    this.#times = times
    this.channel = new Channel({
      write: (text) => this.#write(text),
      onMessage: (message) => (this.#hello ? this.#greet(message) : handlers.onMessage(message)),
      onJunk: handlers.onJunk,
    })
    const child = spawn(command[0], [...command.slice(1), 'serve', ...args], {
      cwd,
      env: { ...process.env, PYTHONSAFEPATH: '1', ...env },
      stdio: ['pipe', 'pipe', 'pipe'],
      detached: true,
    })
    this.#child = child
    this.command = command
    child.stdout.on('data', (chunk) => this.channel.feed(chunk))
    child.stdout.on('end', () => this.expectExit())
    child.stderr.setEncoding('utf8').on('data', (text) => this.#keepStderr(text))
    // A pipe that breaks is told by `close`.
    for (const stream of [child.stdin, child.stdout, child.stderr]) stream.on('error', () => {})
    child.on('exit', () => {
      const timer = setTimeout(() => this.#destroyStreams(), CLOSE_GRACE)
      child.once('close', () => clearTimeout(timer))
    })
    this.gone = new Promise((resolve) => {
      child.once('error', (error) => this.#settle({ exitCode: null, signal: null, error }, resolve))
      child.once('close', (exitCode, signal) => this.#settle({ exitCode, signal }, resolve))
    })
    this.hold(true)
  }

  get pid() {
    return this.#child.pid
  }

  /** Keeps Node's process alive for this worker, or lets it end. */
  hold(held) {
    if (held === this.#held) return
    this.#held = held
    const method = held ? 'ref' : 'unref'
    for (const part of [this.#child, this.#child.stdin, this.#child.stdout, this.#child.stderr]) part?.[method]?.()
  }

  #keepStderr(text) {
    this.stderr = (this.stderr + text).slice(-STDERR_KEPT)
    this.#handlers.onStderr(text)
  }

  #write(text) {
    if (this.#child.stdin.writable) this.#child.stdin.write(text)
  }

  #destroyStreams() {
    for (const stream of [this.#child.stdin, this.#child.stdout, this.#child.stderr]) stream?.destroy()
  }

  #settle(status, resolve) {
    if (this.#settled) return
    this.#settled = true
    this.closed = true
    clearTimeout(this.#exitTimer)
    this.#hello?.fail(status)
    resolve(status)
    this.#handlers.onClose(status)
  }

  /**
   * Resolves with the `hello` line. Fails if there is no such program, no `hello` in time, or another protocol, or with
   * the AbortError of `abort`; the worker is gone then.
   */
  async greeting(timeout, abort) {
    const onAbort = () => this.signal('SIGKILL')
    abort?.addEventListener('abort', onAbort, { once: true })
    if (abort?.aborted) onAbort()
    try {
      return await this.#hearHello(timeout)
    } catch (error) {
      this.closeStdin()
      this.signal('SIGKILL')
      await this.gone
      throw abort?.aborted ? aborted(abort) : error
    } finally {
      abort?.removeEventListener('abort', onAbort)
    }
  }

  #hearHello(timeout) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        const said = this.channel.junkText.trim()
        finish(reject, new CommandTimeout('hello', timeout, said && `The program said instead: ${said.slice(0, 500)}`))
      }, timeout)
      const finish = (how, value) => {
        clearTimeout(timer)
        this.#hello = undefined
        how(value)
      }
      this.#hello = {
        accept: (hello) => finish(resolve, hello),
        refuse: (error) => finish(reject, error),
        fail: (status) => finish(reject, this.#neverSpoke(status)),
      }
    })
  }

  #neverSpoke({ exitCode, signal, error }) {
    const program = this.command.join(' ')
    if (error) return notFound(this.command, error)
    const said = [this.channel.junkText, this.stderr].join('\n').trim().slice(-2000)
    if (/No module named '?trainwire/.test(said)) {
      return new WorkerNotFound(`The worker is not installed where \`${program}\` looks for it: ${said}`, {
        command: this.command,
      })
    }
    return new WorkerDied({ exitCode, signal, stderr: said, doing: 'starting' })
  }

  #greet(message) {
    if (message.type !== 'hello') return
    if (message.protocol === PROTOCOL) {
      this.greeted = true
      this.#hello.accept(message)
    } else {
      const name = `${message.worker?.name} ${message.worker?.version}`
      this.#hello.refuse(new ProtocolMismatch(name, message.protocol, PROTOCOL))
    }
  }

  get takesCommands() {
    return this.#child.stdin.writable
  }

  /** Kills the worker if it does not leave soon: it has said its last line, or can say no more. */
  expectExit() {
    if (this.closed) return
    this.#exitTimer ??= setTimeout(() => this.signal('SIGKILL'), this.#times.exit)
    if (!this.#held) this.#exitTimer.unref()
  }

  closeStdin() {
    const { stdin } = this.#child
    // What a deaf worker has not read would hold the end back.
    if (stdin.writableLength > 0) stdin.destroy()
    else stdin.end()
  }

  /** Lets go of a worker that goes on alone. */
  leave() {
    this.#destroyStreams()
    this.#child.unref()
  }

  terminate() {
    this.signal('SIGTERM')
    // A stopped process takes no other signal.
    this.signal('SIGCONT')
  }

  /** Sends a signal to the worker's process group. */
  signal(name) {
    if (this.closed || this.pid === undefined) return
    try {
      process.kill(-this.pid, name)
    } catch {
      // It has just left.
    }
  }

  /**
   * Ends the worker, rung by rung, until it is gone: `stop` command, closed stdin, SIGTERM, SIGKILL. While `saving()`
   * resolves with true no further rung is taken before `times.save` has passed. `onRung(name)` tells each rung.
   */
  async shutdown({ times, saving, onRung, stop }) {
    const began = performance.now()
    const rungs = [
      ['stop', times.stop, stop],
      ['stdin', times.stdin, () => this.closeStdin()],
      ['terminate', times.terminate, () => this.terminate()],
      ['kill', CLOSE_GRACE, () => this.signal('SIGKILL')],
    ]
    for (const [name, wait, act] of rungs) {
      if (this.closed) break
      onRung(name)
      act()
      await this.#goneWithin(wait)
      while (!this.closed && performance.now() - began < times.save && (await saving())) await this.#goneWithin(SAVE_POLL)
    }
    if (!this.closed) this.#destroyStreams()
    await this.gone
  }

  #goneWithin(ms) {
    let timer
    const late = new Promise((resolve) => (timer = setTimeout(resolve, ms)))
    return Promise.race([this.gone, late]).finally(() => clearTimeout(timer))
  }
}

function notFound(command, error) {
  const why =
    error.code === 'ENOENT'
      ? 'there is no such program'
      : error.code === 'EACCES'
        ? 'it may not be executed'
        : error.message
  return new WorkerNotFound(
    `The worker \`${command.join(' ')}\` cannot be started: ${why}. \`command\` is the list of words that starts it, ` +
      "for instance ['/path/to/trainwire'] or ['/path/to/python3', '-m', 'trainwire_worker'].",
    { command, cause: error },
  )
}

module.exports = { WorkerProcess, HELLO_TIMEOUT, SHUTDOWN }
