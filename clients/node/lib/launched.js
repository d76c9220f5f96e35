'use strict'

const { setTimeout: sleep } = require('node:timers/promises')

const { aborted } = require('./channel.js')
const { latestCheckpoint } = require('./checkpoints.js')
const { CommandFailed, NoWorker, RunEnded, WorkerDied } = require('./errors.js')
const { Run, resultOf } = require('./run.js')
const { Supervision } = require('./supervision.js')
const { HELLO_TIMEOUT, SHUTDOWN, WorkerProcess } = require('./worker.js')

/** How long a worker that is being ended may take to say what it does, in ms. */
const STATUS_PATIENCE = 500
/** How long a worker that refused `start` may take to leave by itself, in ms. */
const REFUSAL_GRACE = 1000

/** A run whose worker this process has started. */
class LaunchedRun extends Run {
  #options
  #config
  #worker
  #end
  #ready
  #closing
  #detached = false
  #stopping = false
  #supervision
  #afterRestart = false
  #waitingRoom = []
  #rungs = []
  #started

  /** How often the worker was started again. */
  restarts = 0
  constructor(config, options) {
    super(options)
    this.#config = config
    this.#options = options
    this.#supervision = new Supervision(options.supervise)
  }

  get pid() {
    return this.#worker.pid
  }

  /** The end of what the worker wrote on stderr. */
  get stderr() {
    return this.#worker.stderr
  }

  /** How many lines of the worker were no messages. */
  get junk() {
    return this.#worker.channel.junk
  }

  async _begin() {
    await this.#spawn(this.#options.resume)
    const { signal } = this.#options
    if (!signal) return
    const onAbort = () => {
      this._abort(aborted(signal))
      this.close()
    }
    signal.addEventListener('abort', onAbort, { once: true })
    this.once('close', () => signal.removeEventListener('abort', onAbort))
    if (signal.aborted) onAbort()
  }

  async #spawn(resume) {
    const { command, cwd, env, workerArgs = [], helloTimeout = HELLO_TIMEOUT } = this.#options
    const worker = new WorkerProcess(
      command,
      {
        cwd,
        env,
        args: workerArgs,
        times: { ...SHUTDOWN, ...this.#options.shutdown },
      },
      {
        onMessage: (message) => this.#admit(() => this.#message(message)),
        onJunk: (line) => this.emit('junk', line),
        onStderr: (text) => this.emit('stderr', text),
        onClose: (status) => this.#admit(() => worker.greeted && this.#closed(status)),
      },
    )
    this.#worker = worker
    // Until the caller holds the run and could listen, what arrives waits.
    this.#waitingRoom = []
    try {
      this.hello = await worker.greeting(helloTimeout, this.#options.signal)
    } catch (error) {
      this.#waitingRoom = undefined
      throw error
    }
    this.#start(resume)
    setImmediate(() => this.#openDoor())
    this._updateHold()
  }

  #admit(act) {
    if (this.#waitingRoom) this.#waitingRoom.push(act)
    else act()
  }

  #openDoor() {
    const waiting = this.#waitingRoom ?? []
    this.#waitingRoom = undefined
    for (const act of waiting) act()
  }

  /** Resolves with what the `start` command came to, when the run is ready to train. */
  async started(call = {}) {
    return this._within('started', this.#started, call)
  }

  #start(resume) {
    const { overwrite, linger } = this.#options
    const parameters = { config: this.#config }
    if (resume !== undefined) parameters.resume = resume
    // A worker that goes on with the run must not wipe what the first one wrote.
    if (overwrite && this.lastSeq === 0) parameters.overwrite = true
    if (linger) parameters.linger = true
    const worker = this.#worker
    const start = worker.channel.request('start', parameters)
    this.#started = start.then(resultOf)
    // Who does not ask gets it from the events.
    this.#started.catch(() => {})
    start.then(
      ({ result }) => {
        this.runId ??= result?.run_id ?? null
        this.runDir ??= result?.run_dir ?? null
      },
      (error) => {
        // The worker says the same in `error` and `end`, and leaves; one that does not has nothing to do any more.
        if (error instanceof CommandFailed) setTimeout(() => worker.closeStdin(), REFUSAL_GRACE).unref()
      },
    )
  }

  #message(message) {
    this._heard(message.type)
    if (message.type === 'hello') return
    if (message.type === 'heartbeat') {
      this._heartbeat(message)
      return
    }
    if (message.type === 'end' && typeof message.outcome === 'string') {
      this.#end = message
      this.#worker.expectExit()
    }
    const continuous = this.#afterRestart
    if (message.seq !== undefined) this.#afterRestart = false
    this._receive(message, { continuous })
  }

  async #closed(status) {
    if (this.ended || this.#detached) return
    const { channel } = this.#worker
    await this._filled()
    if (this.#end) {
      const ends = [...this.#rungs.slice(1).map(({ began }) => began), performance.now()]
      const shutdown = this.#rungs.map(({ name, began }, i) => ({ name, ms: Math.round(ends[i] - began) }))
      const result = this._resultOf(this.#end, { restarts: this.restarts, shutdown })
      channel.failAll((cmd) => new RunEnded(cmd, result))
      this._finish(result)
      return
    }
    const error = await this.#death(status)
    channel.failAll(() => error)
    await this.#restart(error)
  }

  async #death({ exitCode, signal }) {
    const found = this.runDir === null ? null : await latestCheckpoint(this.runDir, { verify: false })
    return new WorkerDied({
      exitCode,
      signal,
      stderr: this.#worker.stderr,
      lastCheckpoint: found?.path ?? this.lastCheckpoint,
      restarts: this.restarts,
      doing: this._doing(),
    })
  }

  get #mayRestart() {
    return this.#supervision.allows && !this.#closing && !this.#stopping && !this._abortError
  }

  async #restart(error) {
    let ready
    this.#ready = new Promise((resolve) => (ready = resolve))
    const release = this._hold()
    try {
      while (this.#mayRestart) {
        this.restarts += 1
        this.emit('restart', { restarts: this.restarts, error })
        await sleep(this.#supervision.count())
        if (this.#closing) break
        // Without an event of this run the folder's log is that of an older one.
        const begun = this.lastSeq > 0
        this.#afterRestart = begun
        try {
          await this.#spawn(begun ? 'auto' : this.#options.resume)
          return
        } catch (failure) {
          error = failure
        }
      }
      await this._catchUp()
      this._fail(error instanceof WorkerDied ? this.#final(error) : error)
    } finally {
      this.#ready = undefined
      ready()
      release()
    }
  }

  #final(error) {
    if (this.restarts === error.restarts) return error
    return new WorkerDied({ ...error, restarts: this.restarts, doing: this._doing() })
  }

  async _request(cmd, parameters, call) {
    while (this.#ready) {
      await this.#ready
      this._refuseIfOver(cmd)
    }
    // A run that was told to stop is not started again.
    if (cmd === 'stop') this.#stopping = true
    return this.#worker.channel.request(cmd, parameters, call)
  }

  _setHeld(held) {
    this.#worker?.hold(held)
  }

  /** Ends the run gracefully, with a checkpoint, and insists on it rung by rung. Resolves with the result, if any. */
  close() {
    this.#closing ??= this.#close()
    return this.#closing
  }

  async #close() {
    const release = this._hold()
    try {
      // A worker that is just being started again is met when it has said hello.
      while (this.#ready) await this.#ready
      const worker = this.#worker
      if (!this.ended && !this.#detached) {
        await worker.shutdown({
          times: { ...SHUTDOWN, ...this.#options.shutdown },
          saving: () => this.#saves(worker),
          stop: () => worker.channel.request('stop', {}).catch(() => {}),
          onRung: (name) => {
            this.#rungs.push({ name, began: performance.now() })
            this.emit('shutdown', { name })
          },
        })
        await this.wait().catch(() => {})
      }
      return this.result
    } finally {
      release()
    }
  }

  /** Says whether the worker is writing a checkpoint: by its own word, or, if it is silent, as last heard. */
  async #saves(worker) {
    if (worker.takesCommands) {
      const answer = await worker.channel.request('status', {}, { timeout: STATUS_PATIENCE }).catch(() => undefined)
      if (answer) this.activity = answer.result.activity
    }
    return this.activity === 'checkpoint'
  }

  /** Sends SIGKILL to the worker and its engine at once: nothing is saved. */
  async kill() {
    this.#closing ??= Promise.resolve(null)
    this.#worker.signal('SIGKILL')
    await this.wait().catch(() => {})
  }

  /** Leaves the run to itself: it trains on, and `attach` finds it again. */
  async detach(call) {
    if (this.ended || this.#detached) return
    await this.request('detach', {}, call)
    this.#detached = true
    this.#worker.leave()
    const gone = new NoWorker('This client has detached from the run; attach(runDir) follows it.')
    this.#worker.channel.failAll(() => gone)
    this._leave(gone)
  }
}

module.exports = { LaunchedRun }
