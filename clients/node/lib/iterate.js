'use strict'

const { readBatch } = require('./log.js')

/**
 * Walks over the events that wait in a queue, then over those that come.
 *
 * A `gap` in the queue is a backlog that was given up to bound memory: its events are read from the log when the
 * consumer gets there. Leaving a loop early loses nothing: the next loop goes on behind it.
 */
class RunIterator {
  #run
  #queue
  #release
  #done = false
  #calls = Promise.resolve()
  #slow = 0

  constructor(run, queue, release) {
    this.#run = run
    this.#queue = queue
    this.#release = release
  }

  next() {
    if (this.#slow === 0 && !this.#done && !this.#run._abortError) {
      const event = this.#queue.peek()
      if (event !== undefined && event.type !== 'gap') {
        return Promise.resolve({ value: this.#queue.take(), done: false })
      }
    }
    this.#slow += 1
    const call = this.#calls.then(() => this.#wait())
    this.#calls = call.then(
      () => void (this.#slow -= 1),
      () => void (this.#slow -= 1),
    )
    return call
  }

  async #wait() {
    const release = this.#run._hold()
    try {
      while (!this.#done) {
        if (this.#run._abortError) return this.#end(this.#run._abortError)
        const event = this.#queue.take()
        if (event === undefined) {
          const end = this.#run._iterationEnd()
          if (end) return this.#end(end.error)
          await this.#queue.changed()
        } else if (event.type !== 'gap' || !(await this.#readBack(event))) {
          return { value: event, done: false }
        }
      }
      return { value: undefined, done: true }
    } finally {
      release()
    }
  }

  /** Replaces a gap by a batch of its events and the rest of it; false where the log does not help. */
  async #readBack(gap) {
    if (gap.from_seq === 0 || this.#run.runDir === null) return false
    let events
    try {
      events = await readBatch(this.#run.runDir, gap.from_seq, gap.to_seq)
    } catch {
      return false
    }
    if (events.length === 0) return gap.begun === true
    const last = events.at(-1).seq
    const wanted = events.filter((event) => this.#run._wanted(event))
    if (last < gap.to_seq) wanted.push({ ...gap, from_seq: last + 1, begun: true })
    this.#queue.prepend(wanted)
    return true
  }

  #end(error) {
    this.#finish()
    if (error) throw error
    return { value: undefined, done: true }
  }

  #finish() {
    if (this.#done) return
    this.#done = true
    this.#release()
  }

  async return(value) {
    this.#finish()
    this.#queue.wake()
    return { value, done: true }
  }

  [Symbol.asyncIterator]() {
    return this
  }
}

module.exports = { RunIterator }
