'use strict'

const { aborted } = require('./channel.js')
const { split } = require('./commands.js')
const { CommandTimeout, RunEnded, RunFailed } = require('./errors.js')
const { EventStream } = require('./events.js')

/** What came of a run. */
class Result {
  constructor(facts) {
    Object.assign(this, facts)
  }

  /** Throws RunFailed if the run failed, and gives the result back otherwise. */
  check() {
    if (this.outcome === 'failed') throw new RunFailed(this.error ?? { code: 'internal', message: this.reason })
    return this
  }
}

/**
 * A run that is watched and steered: an async iterable of its events, an EventEmitter, and a promise per command.
 *
 * This is what a launched and an attached run have in common. A subclass brings the events, carries the commands
 * (`_request`), and says when all is over (`_finish`, `_fail`).
 */
class Run extends EventStream {
  #error
  #left = false
  #over
  #settle

  /** How the run ended; null before, and after a death. */
  result = null

  constructor(options) {
    super(options)
    this.#over = new Promise((resolve, reject) => (this.#settle = { resolve, reject }))
    // Who neither waits nor iterates has not asked for the error.
    this.#over.catch(() => {})
  }

  get ended() {
    return this.result !== null || this.#error !== undefined
  }

  /** Says whether a loop is over once its queue is empty: undefined, or `{error}`. */
  _iterationEnd() {
    if (this.#error) return { error: this.#left ? undefined : this.#error }
    return this.result ? {} : undefined
  }

  _finish(result) {
    if (this.ended) return
    this.phase = 'ended'
    this.activity = 'none'
    this.result = result
    this.#settle.resolve(result)
    this.#close()
  }

  _fail(error) {
    if (this.ended) return
    this.phase = 'ended'
    this.activity = 'none'
    this.#error = error
    this.#settle.reject(error)
    if (this.listenerCount('error') > 0) this.emit('error', error)
    this.#close()
  }

  /** Ends what this client knows of a run that goes on without it. */
  _leave(error) {
    this.#error = error
    this.#left = true
    this.#settle.reject(error)
    this.#close()
  }

  #close() {
    this._wake()
    this.emit('close', this.result)
  }

  /** Makes the result of a run from its `end` event. */
  _resultOf(end, more = {}) {
    return new Result({
      outcome: end.outcome,
      reason: end.reason,
      step: end.step,
      checkpoint: end.checkpoint,
      exitCode: end.exit_code,
      error: this._failure,
      metrics: this.#metrics(),
      resumable: end.resumable,
      resumeArgs: end.resume_args,
      runDir: this.runDir,
      restarts: 0,
      shutdown: [],
      ...more,
    })
  }

  #metrics() {
    const { type, seq, ts, ...metrics } = this._lastStep ?? {}
    if (this._lastEval) metrics.valid_loss = this._lastEval.valid_loss
    return metrics
  }

  async wait(call = {}) {
    return this._within('wait', this.#over, call)
  }

  /** Waits for a promise as long as `timeout` and `signal` let it, and keeps Node's process alive meanwhile. */
  async _within(name, promise, { timeout = 0, signal }) {
    if (signal?.aborted) throw aborted(signal)
    const release = this._hold()
    let timer
    let onAbort
    const givenUp = new Promise((_, reject) => {
      if (timeout > 0) timer = setTimeout(() => reject(new CommandTimeout(name, timeout, this._whatItDid())), timeout)
      onAbort = () => reject(aborted(signal))
      signal?.addEventListener('abort', onAbort, { once: true })
    })
    try {
      return await Promise.race([promise, givenUp])
    } finally {
      clearTimeout(timer)
      signal?.removeEventListener('abort', onAbort)
      release()
    }
  }

  async #command(cmd, options) {
    const { parameters, call } = split(cmd, options)
    return resultOf(await this.request(cmd, parameters, call))
  }

  _refuseIfOver(cmd) {
    if (this.#error) throw this.#error
    if (this.result) throw new RunEnded(cmd, this.result)
  }

  /** Sends any command by its names on the wire, and resolves with the whole response. */
  async request(cmd, parameters = {}, call = {}) {
    this._refuseIfOver(cmd)
    const release = this._hold()
    try {
      return await this._request(cmd, parameters, { ...call, doing: () => this._whatItDid() })
    } finally {
      release()
    }
  }

  pause(options) {
    return this.#command('pause', options)
  }

  resume(options) {
    return this.#command('resume', options)
  }

  checkpoint(options) {
    return this.#command('checkpoint', options)
  }

  stop(options) {
    return this.#command('stop', options)
  }

  async set(values, call = {}) {
    const { call: checked } = split('set', call)
    return resultOf(await this.request('set', { values }, checked))
  }

  eval(options) {
    return this.#command('eval', options)
  }

  generate(options) {
    return this.#command('generate', options)
  }

  status(options) {
    return this.#command('status', options)
  }

  ping(options) {
    return this.#command('ping', options)
  }

  /** Resolves with the stored events themselves. */
  async replay(options) {
    const { parameters, call } = split('replay', options)
    const events = []
    await this.request('replay', parameters, { ...call, onReplay: (event) => events.push(event) })
    return events
  }

  async [Symbol.asyncDispose ?? Symbol.for('nodejs.asyncDispose')]() {
    await this.close()
  }
}

/** Gives a response's result, with the `seq` of the event that carried the effect. */
function resultOf({ result, at_seq: atSeq }) {
  return atSeq === undefined ? { ...result } : { ...result, at_seq: atSeq }
}

module.exports = { Run, resultOf }
