'use strict'

const { EventEmitter } = require('node:events')

const { KNOWN_TYPES } = require('./channel.js')
const { RunFailed } = require('./errors.js')
const { RunIterator } = require('./iterate.js')
const { readLog } = require('./log.js')
const { EventQueue } = require('./queue.js')

const MAX_QUEUE = 4096

/**
 * The events of a run, as they come: each once and in order, to listeners at once and to loops through queues.
 *
 * A subclass brings them (`_receive`) and says in `_iterationEnd` when there will be no more.
 */
class EventStream extends EventEmitter {
  #main
  #mainTaken = false
  #queues = new Set()
  #maxQueue
  #holds = 0
  #listeners = 0
  #filling
  #backlog
  #onUnknown
  /** Events before this one are noted, but not delivered. */
  #fromSeq
  #heardAt = 0
  #heardType

  runId = null
  runDir = null
  phase = 'idle'
  activity = 'none'
  step = 0
  lastSeq = 0
  lastCheckpoint = null
  _lastStep
  _lastEval
  _failure = null
  constructor({ maxQueue = MAX_QUEUE, onUnknown, fromSeq = 1 } = {}) {
    super()
    this.#fromSeq = fromSeq
    if (!Number.isInteger(maxQueue) || maxQueue < 1) throw new RangeError('maxQueue is a whole number from 1 on.')
    this.#maxQueue = maxQueue
    this.#onUnknown = onUnknown
    this.#main = new EventQueue(maxQueue)
    this.#backlog = new EventQueue(MAX_QUEUE)
    this.#queues.add(this.#main)
    const own = ['newListener', 'removeListener']
    this.on('newListener', (name) => own.includes(name) || this.#count(1))
    this.on('removeListener', (name) => own.includes(name) || this.#count(-1))
  }

  #count(change) {
    this.#listeners += change
    this._updateHold()
  }

  _updateHold() {
    this._setHeld(this.#holds + this.#listeners > 0)
  }

  /** Keeps Node's process alive until the returned function is called. */
  _hold() {
    this.#holds += 1
    this._updateHold()
    return () => {
      this.#holds -= 1
      this._updateHold()
    }
  }

  /** What a listener throws reaches the process, as from any emitter, but takes no event with it. */
  emit(name, ...values) {
    try {
      if (name === 'unknown') this.#onUnknown?.(...values)
      return super.emit(name, ...values)
    } catch (error) {
      process.nextTick(() => {
        throw error
      })
      return true
    }
  }

  /** Takes an event that arrived, in the order of arrival, and fills from the log what is missing before it. */
  _receive(event, { continuous = false } = {}) {
    if (this.#filling) {
      this.#backlog.push(event)
      return
    }
    if (event.type === 'gap') {
      this.#fill(event.from_seq, event.to_seq, event)
      return
    }
    if (event.seq !== undefined) {
      if (event.seq <= this.lastSeq) return
      if (continuous && event.seq > this.lastSeq + 1) {
        this.#backlog.push(event)
        this.#fill(this.lastSeq + 1, event.seq - 1)
        return
      }
    }
    this.#deliver(event)
  }

  #fill(from, to, gap) {
    this.#filling = this.#readMissing(Math.max(from, this.lastSeq + 1), to, gap).then(() => {
      this.#filling = undefined
      while (!this.#filling && this.#backlog.length > 0) this._receive(this.#backlog.take())
    })
  }

  async #readMissing(from, to, gap) {
    let found = 0
    try {
      for await (const event of readLog(this.runDir, { fromSeq: from, toSeq: to })) {
        this.#deliver(event)
        found += 1
      }
    } catch {
      // Without a readable log the gap itself is the news.
    }
    if (found === 0 && gap && from <= to) this.#deliver(gap)
  }

  /** Fills what the log has beyond the last event that arrived, and waits for all filling to end. */
  async _catchUp() {
    while (this.#filling) await this.#filling
    if (this.runDir === null || this.lastSeq === 0) return
    this.#fill(this.lastSeq + 1, Infinity)
    while (this.#filling) await this.#filling
  }

  /** Waits for the log reads that are under way. */
  async _filled() {
    while (this.#filling) await this.#filling
  }

  /** Says whether an event that was left in the log for a slow consumer is still news to it. */
  _wanted(event) {
    return KNOWN_TYPES.has(event.type)
  }

  #deliver(event) {
    if (event.seq !== undefined) this.lastSeq = event.seq
    const isKnown = KNOWN_TYPES.has(event.type)
    if (isKnown) this.#note(event)
    if (event.seq < this.#fromSeq) return
    if (!isKnown) {
      this.emit('unknown', event)
      return
    }
    this.emit('event', event)
    if (event.type === 'error') {
      if (this.listenerCount('error') > 0) this.emit('error', new RunFailed(event))
    } else this.emit(event.type, event)
    for (const queue of this.#queues) queue.push(event)
  }

  #note(event) {
    switch (event.type) {
      case 'step':
        this.step = event.step
        this._lastStep = event
        break
      case 'status':
        this.phase = event.phase
        this.activity = event.activity
        this.step = event.step
        break
      case 'attempt':
        this.runId = event.run_id
        if (event.attempt > 1) this.step = event.resumed_from_step ?? 0
        break
      case 'init':
        this.runDir = event.run_dir
        this.step = event.start_step
        break
      case 'checkpoint':
        this.lastCheckpoint = event.path
        break
      case 'eval_end':
        this._lastEval = event
        break
      case 'error':
        this._failure = event
        break
    }
  }

  /** Says in words what the worker was last heard to do. */
  _doing() {
    const activity = this.activity === 'none' ? '' : ` (${this.activity})`
    return `${this.phase}${activity} at step ${this.step}`
  }

  /** The same as a sentence, with the last sign of life. */
  _whatItDid() {
    const seconds = ((performance.now() - this.#heardAt) / 1000).toFixed(1)
    const heard = this.#heardType ? `, last heard of ${seconds} s ago (${this.#heardType})` : ''
    return `The worker was ${this._doing()}${heard}.`
  }

  /** Notes a sign of life. */
  _heard(type) {
    this.#heardAt = performance.now()
    this.#heardType = type
  }

  [Symbol.asyncIterator]() {
    const main = !this.#mainTaken
    const queue = main ? this.#main : new EventQueue(this.#maxQueue)
    if (main) this.#mainTaken = true
    else this.#queues.add(queue)
    const release = () => {
      if (main) {
        this.#mainTaken = false
        this.#main.makeRoom()
      } else this.#queues.delete(queue)
    }
    return new RunIterator(this, queue, release)
  }

  /** Waits until a consumer that iterates has taken enough; a run without one is not held up. */
  async _room() {
    while (this.#mainTaken && !this.ended && this.#main.length >= this.#maxQueue) await this.#main.room()
  }

  /** Ends iteration with an error, while the run goes on to its end. */
  _abort(error) {
    this._abortError = error
    this._wake()
  }

  /** Lets loops that wait look whether it is over. */
  _wake() {
    for (const queue of this.#queues) queue.wake()
  }

  _heartbeat(message) {
    this.phase = message.phase
    this.activity = message.activity
    this.step = message.step
    this.emit('heartbeat', message)
  }
}

module.exports = { EventStream }
