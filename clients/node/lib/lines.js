'use strict'

/** Longest line that is still read; a worker's own lines stay far below it. */
const MAX_LINE = 4 << 20

/**
 * Cuts a byte stream into lines at byte 0x0A and nowhere else.
 *
 * Bytes are joined before they are decoded, so that a character cut at a chunk border stays whole. U+2028, U+0085
 * and a lone CR are ordinary characters. A line above `maxLine` bytes is thrown away up to its end, and `onOverlong`
 * is told.
 */
class LineSplitter {
  #onLine
  #maxLine
  #parts = []
  #size = 0
  #discarding = false
  #onOverlong

  constructor(onLine, onOverlong = () => {}, maxLine = MAX_LINE) {
    this.#onLine = onLine
    this.#onOverlong = onOverlong
    this.#maxLine = maxLine
  }

  push(chunk) {
    const last = chunk.lastIndexOf(0x0a)
    if (last === -1) {
      this.#keep(chunk)
      return
    }
    let whole = chunk.subarray(0, last)
    if (this.#discarding) {
      this.#discarding = false
      const first = chunk.indexOf(0x0a)
      whole = first === last ? undefined : chunk.subarray(first + 1, last)
    } else if (this.#size > 0) {
      this.#parts.push(whole)
      whole = Buffer.concat(this.#parts)
      this.#parts = []
      this.#size = 0
    }
    if (last + 1 < chunk.length) this.#keep(chunk.subarray(last + 1))
    // In UTF-8 the byte 0x0A is never part of another character, so the text may be split after decoding.
    if (whole !== undefined) for (const line of whole.toString('utf8').split('\n')) this.#onLine(line)
  }

  #keep(part) {
    if (this.#discarding) return
    this.#parts.push(part)
    this.#size += part.length
    if (this.#size > this.#maxLine) {
      this.#parts = []
      this.#size = 0
      this.#discarding = true
      this.#onOverlong()
    }
  }
}

module.exports = { LineSplitter }
