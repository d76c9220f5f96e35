'use strict'

const fs = require('node:fs/promises')
const path = require('node:path')

const { ClientError } = require('./errors.js')
const { LineSplitter } = require('./lines.js')

const LOG_NAME = 'events.jsonl'
const BLOCK = 128 << 10
/** Below this many bytes a scan costs less than another jump. */
const SCAN = 1 << 20

const logPath = (runDir) => path.join(runDir, LOG_NAME)

/** Throws ClientError if a folder holds no run. */
async function checkLog(runDir) {
  await fs.access(logPath(runDir)).catch(() => {
    throw new ClientError(`${path.resolve(runDir)} is no run: there is no ${LOG_NAME} in it.`)
  })
}

function parse(line) {
  try {
    const event = JSON.parse(line)
    return typeof event?.type === 'string' ? event : undefined
  } catch {
    return undefined
  }
}

/** Gives the `seq` of the first whole line at or after a byte of the log; undefined where there is none. */
async function seqAfter(file, position) {
  const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(BLOCK), 0, BLOCK, position)
  const text = buffer.latin1Slice(0, bytesRead)
  let start = position === 0 ? 0 : text.indexOf('\n') + 1
  if (position !== 0 && start === 0) return undefined
  for (;;) {
    const end = text.indexOf('\n', start)
    if (end === -1) return undefined
    const seq = parse(text.slice(start, end))?.seq
    if (Number.isInteger(seq)) return seq
    start = end + 1
  }
}

/** Finds a byte of the log before which no line has a `seq` of `fromSeq` or more: `seq` rises from line to line. */
async function seek(file, fromSeq) {
  let low = 0
  let high = (await file.stat()).size
  while (high - low > SCAN) {
    const middle = Math.floor((low + high) / 2)
    const seq = await seqAfter(file, middle)
    if (seq === undefined || seq >= fromSeq) high = middle
    else low = middle
  }
  return low
}

/**
 * Reads the events of a run's log whose `seq` lies from `fromSeq` to `toSeq`, in memory that does not grow with the
 * log. A torn last line is left out. `accept(line)` may refuse a line before it is parsed.
 */
async function* readLog(runDir, { fromSeq = 1, toSeq = Infinity, accept } = {}) {
  const file = await fs.open(logPath(runDir), 'r')
  try {
    let events = []
    let over = false
    let first = true
    let position = fromSeq > 1 ? await seek(file, fromSeq) : 0
    const skipFirst = position > 0
    const lines = new LineSplitter((line) => {
      const torn = first && skipFirst
      first = false
      if (torn || over || (accept && !accept(line))) return
      const event = parse(line)
      if (event === undefined || event.seq < fromSeq) return
      if (event.seq > toSeq) over = true
      else events.push(event)
    })
    while (!over) {
      const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(BLOCK), 0, BLOCK, position)
      if (bytesRead === 0) break
      position += bytesRead
      lines.push(buffer.subarray(0, bytesRead))
      yield* events
      events = []
    }
  } finally {
    await file.close()
  }
}

/** Reads events from `fromSeq` to `toSeq`, but no more than a batch of them. */
async function readBatch(runDir, fromSeq, toSeq) {
  const events = []
  let size = 0
  const accept = (line) => {
    size += line.length
    return true
  }
  for await (const event of readLog(runDir, { fromSeq, toSeq, accept })) {
    events.push(event)
    if (events.length >= 256 || size >= 1 << 20) break
  }
  return events
}

const VOIDABLE = new Set(['step', 'eval_end', 'generation'])

/**
 * Says which reports are void: those of updates that a crash took and a resume did again. Made from the `attempt`
 * events of a log: each makes the reports before it void whose step lies above the one it goes on from.
 */
class Timelines {
  #cuts = []

  /** Notes an `attempt` event. */
  add(attempt) {
    if (attempt.attempt > 1) this.#cuts.push({ seq: attempt.seq, step: attempt.resumed_from_step ?? 0 })
  }

  isVoid(event) {
    if (!VOIDABLE.has(event.type)) return false
    return this.#cuts.some((cut) => event.seq < cut.seq && event.step > cut.step)
  }
}

/** Reads which timelines of a run were abandoned. */
async function readTimelines(runDir) {
  const timelines = new Timelines()
  const accept = (line) => line.includes('"type":"attempt"')
  for await (const event of readLog(runDir, { accept })) timelines.add(event)
  return timelines
}

module.exports = { checkLog, logPath, parse, readBatch, readLog, readTimelines }
