'use strict'

const { mergeSteps } = require('./coalesce.js')

/** Bytes that may wait, as they were on the wire. */
const MAX_BYTES = 8 << 20
const STEP_BYTES = 600

const weigh = (event) => (event.type === 'step' ? STEP_BYTES : JSON.stringify(event).length)

/**
 * Holds events for a consumer that is slower than the run, in bounded memory.
 *
 * From `limit` events on, a `step` is merged into a `step` that waits at the end, and a `progress` replaces the one
 * before it. At twice the limit, or at 8 MiB, the whole backlog becomes one `gap`, which the log can fill.
 */
class EventQueue {
  #items = []
  #head = 0
  #limit
  #bytes = 0
  /** The last `seq` that is no longer here. */
  #taken
  #waiting = []
  #roomWaiting

  constructor(limit) {
    this.#limit = limit
  }

  get length() {
    return this.#items.length - this.#head
  }

  push(event) {
    if (event.seq !== undefined) this.#taken ??= event.seq - 1
    if (this.length >= this.#limit && this.#coalesce(event)) return
    this.#items.push(event)
    this.#bytes += weigh(event)
    if (this.length > 2 * this.#limit || this.#bytes > MAX_BYTES) this.#collapse()
    if (this.#waiting.length > 0) this.wake()
  }

  #coalesce(event) {
    const last = this.#items.length - 1
    const tail = this.#items[last]
    if (event.type === 'step' && tail.type === 'step') this.#items[last] = mergeSteps(tail, event)
    else if (event.type === 'progress' && tail.type === 'progress' && tail.id === event.id) this.#items[last] = event
    else return false
    return true
  }

  #collapse() {
    const counts = {}
    let to
    for (let i = this.#head; i < this.#items.length; i++) {
      const item = this.#items[i]
      if (item.type === 'gap') {
        for (const [type, count] of Object.entries(item.counts)) counts[type] = (counts[type] ?? 0) + count
        to = item.to_seq
      } else {
        counts[item.type] = (counts[item.type] ?? 0) + 1
        to = item.seq ?? to
      }
    }
    const from = this.#taken === undefined ? 0 : this.#taken + 1
    this.#items = [{ type: 'gap', from_seq: from, to_seq: to ?? 0, counts, reason: 'slow_reader' }]
    this.#head = 0
    this.#bytes = 0
  }

  /** Gives the oldest event, or undefined, and leaves it there. */
  peek() {
    return this.#items[this.#head]
  }

  /** Takes the oldest event, or undefined. */
  take() {
    if (this.#head === this.#items.length) return undefined
    const item = this.#items[this.#head]
    this.#items[this.#head++] = undefined
    this.#bytes -= weigh(item)
    if (item.seq !== undefined) this.#taken = item.seq
    if (this.#roomWaiting && this.length < this.#limit / 2) this.makeRoom()
    if (this.#head === this.#items.length) {
      this.#items.length = 0
      this.#head = 0
      this.#bytes = 0
    } else if (this.#head >= 4096) {
      this.#items = this.#items.slice(this.#head)
      this.#head = 0
    }
    return item
  }

  /** Puts events, read back from the log, before all others. */
  prepend(events) {
    this.#items = [...events, ...this.#items.slice(this.#head)]
    this.#head = 0
    for (const event of events) this.#bytes += weigh(event)
  }

  /** Resolves when something was pushed, or when `wake` says that waiting is pointless. */
  changed() {
    return new Promise((resolve) => this.#waiting.push(resolve))
  }

  /** Resolves when half of the limit is free again, or when `makeRoom` says that nobody takes any more. */
  room() {
    return new Promise((resolve) => (this.#roomWaiting = resolve))
  }

  makeRoom() {
    this.#roomWaiting?.()
    this.#roomWaiting = undefined
  }

  wake() {
    const waiting = this.#waiting
    this.#waiting = []
    for (const resolve of waiting) resolve()
  }
}

module.exports = { EventQueue }
