'use strict'

const DEFAULTS = { restarts: 5, within: 180_000 }
const FIRST_DELAY = 100
const LONGEST_DELAY = 5000

/** Counts how often a worker that died is started again: so many times within a span, then no more. */
class Supervision {
  #restarts
  #within
  #times = []

  constructor(supervise) {
    const { restarts, within } = { ...DEFAULTS, ...(supervise instanceof Object ? supervise : {}) }
    this.#restarts = supervise ? restarts : 0
    this.#within = within
  }

  get allows() {
    this.#times = this.#times.filter((time) => performance.now() - time < this.#within)
    return this.#times.length < this.#restarts
  }

  /** Counts a restart; gives the ms to wait before it. The first is at once; a worker that keeps dying gets time. */
  count() {
    const before = this.#times.length
    this.#times.push(performance.now())
    return before === 0 ? 0 : Math.min(FIRST_DELAY * 2 ** (before - 1), LONGEST_DELAY)
  }
}

module.exports = { Supervision }
