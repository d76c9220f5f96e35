'use strict'

const fs = require('node:fs/promises')
const { watch } = require('node:fs')
const path = require('node:path')

const { Control, readLock, workerLives } = require('./control.js')
const { latestCheckpoint } = require('./checkpoints.js')
const { NoWorker, WorkerDied } = require('./errors.js')
const { checkLog, logPath, parse, readTimelines } = require('./log.js')
const { Run } = require('./run.js')

const OPTIONS = ['fromSeq', 'maxQueue', 'onUnknown']
const BLOCK = 256 << 10
/** How often the log is looked at where the file system does not tell of changes, in ms. */
const POLL = 250
/** How often a silent worker is asked for a sign of life, in ms. */
const PROBE = 1000
/** How long nobody may hold a run before that is its death, in ms: a supervised worker is being started again. */
const HANDOVER = 1500
/** The same where nobody has held it since this client looks. */
const LOOK = 300

/** A run that another process started, followed through its log and steered through its control socket. */
class AttachedRun extends Run {
  #file
  #offset = 0
  #timelines
  #control
  #watcher
  #timer
  #wake = () => {}
  #held = false
  #leaving = false
  #end
  #lock

  constructor(runDir, options) {
    super(options)
    this.runDir = path.resolve(runDir)
    this.#control = new Control(this.runDir)
  }

  get pid() {
    return this.#lock?.pid ?? null
  }

  async _begin() {
    this.#timelines = await readTimelines(this.runDir)
    this.#lock = await readLock(this.runDir)
    this.#file = await fs.open(logPath(this.runDir), 'r')
    try {
      this.#watcher = watch(logPath(this.runDir), { persistent: false }, () => this.#wake())
      this.#watcher.on('error', () => {})
    } catch {
      // Polling alone will do.
    }
    setImmediate(() => this.#follow())
  }

  async #follow() {
    try {
      let probe = 0
      let patience = LOOK
      let gone
      while (!this.#leaving) {
        if (await this.#readOn()) {
          gone = undefined
          // One that has said `end` is about to leave.
          if (this.#end) probe = 0
          continue
        }
        const now = performance.now()
        if (now >= probe) {
          if (await workerLives(this.runDir)) {
            gone = undefined
            patience = HANDOVER
          } else if (await this.#readOn()) continue
          else if (this.#end || now - (gone ??= now) >= patience) break
          probe = now + (this.#end || gone !== undefined ? POLL : PROBE)
        }
        await this.#changed()
      }
      await this.#over()
    } finally {
      clearTimeout(this.#timer)
      this.#watcher?.close()
      this.#control.close()
      await this.#file.close()
    }
  }

  /** Reads what was appended; false if nothing whole was. */
  async #readOn() {
    const { size } = await this.#file.stat()
    if (size <= this.#offset) return false
    let buffer = Buffer.allocUnsafe(BLOCK)
    let { bytesRead } = await this.#file.read(buffer, 0, buffer.length, this.#offset)
    let end = buffer.subarray(0, bytesRead).lastIndexOf(0x0a)
    while (end === -1 && bytesRead === buffer.length) {
      buffer = Buffer.allocUnsafe(2 * buffer.length)
      ;({ bytesRead } = await this.#file.read(buffer, 0, buffer.length, this.#offset))
      end = buffer.subarray(0, bytesRead).lastIndexOf(0x0a)
    }
    // Half a last line waits for its rest; a worker that repairs the log may cut it.
    if (end === -1) return false
    this.#offset += end + 1
    for (const line of buffer.toString('utf8', 0, end).split('\n')) {
      const event = parse(line)
      if (event) this.#take(event)
    }
    await this._room()
    return true
  }

  #take(event) {
    this._heard(event.type)
    if (event.type === 'attempt') {
      this.#timelines.add(event)
      this.#end = undefined
    } else if (event.type === 'end') this.#end = event
    if (this.#timelines.isVoid(event)) this.lastSeq = event.seq
    else this._receive(event)
  }

  _wanted(event) {
    return super._wanted(event) && !this.#timelines.isVoid(event)
  }

  #changed() {
    return new Promise((resolve) => {
      this.#wake = resolve
      this.#timer = setTimeout(resolve, POLL)
      this._setHeld(this.#held)
    }).finally(() => clearTimeout(this.#timer))
  }

  async #over() {
    if (this.#leaving) {
      this._leave(new NoWorker('This client has left the run; attach(runDir) follows it again.'))
    } else if (this.#end) this._finish(this._resultOf(this.#end))
    else this._fail(await this.#death())
  }

  async #death() {
    const found = await latestCheckpoint(this.runDir, { verify: false })
    return new WorkerDied({ lastCheckpoint: found?.path ?? this.lastCheckpoint, doing: this._doing() })
  }

  async _request(cmd, parameters, call) {
    try {
      return await this.#control.request(cmd, parameters, call)
    } catch (error) {
      if (!(error instanceof NoWorker) || (await workerLives(this.runDir))) throw error
      // The log says how it ended.
      await this.wait().catch(() => {})
      this._refuseIfOver(cmd)
      throw error
    }
  }

  _setHeld(held) {
    this.#held = held
    this.#timer?.[held ? 'ref' : 'unref']()
  }

  /** Stops following. The run goes on. */
  async close() {
    if (this.ended) return this.result
    const release = this._hold()
    this.#leaving = true
    this.#wake()
    await this.wait().catch(() => {})
    release()
    return null
  }

  /** The same as `close`: an attached run is not ours to end. */
  async detach() {
    await this.close()
  }
}

/** Follows the run in a folder from an event on, by default the first, whoever started it, and whether or not it is over. */
async function attach(runDir, options = {}) {
  for (const key of Object.keys(options)) {
    if (!OPTIONS.includes(key)) throw new TypeError(`attach has no option ${key}; it takes ${OPTIONS.join(', ')}.`)
  }
  await checkLog(runDir)
  const run = new AttachedRun(runDir, options)
  await run._begin()
  return run
}

module.exports = { attach }
