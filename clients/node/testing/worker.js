'use strict'

// A fake worker: plays the script of the file that its first argument names. Reads and writes block, as the actions
// follow each other. See the package's documentation for the script.

const { spawn } = require('node:child_process')
const fs = require('node:fs')
const path = require('node:path')

const samples = require('./lines.json')

const TRANSPORT = new Set(['hello', 'response', 'heartbeat', 'gap'])
const BAD_COMMAND = 97
const PARENT = process.ppid

function sleep(ms) {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms)
}

/** Says whether an actual value has everything that a partial one has. */
function matches(partial, actual) {
  if (partial === null) return actual === null || actual === undefined
  if (typeof partial !== 'object') return Object.is(partial, actual)
  if (typeof actual !== 'object' || actual === null) return false
  if (Array.isArray(partial) && partial.length !== actual.length) return false
  return Object.keys(partial).every((key) => matches(partial[key], actual[key]))
}

/** Writes a value as JSON in printable ASCII. */
function ascii(value) {
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`)
}

class FakeWorker {
  #attempt
  #dir = ''
  #input = Buffer.alloc(0)
  #inputOpen = true
  #commands = []
  #last = {}
  #id = null
  /** The ids of a recorded session, each with the client's for the same command. */
  #ids = new Map()
  #log
  #seq = 0
  #step = 0
  #chunks = 0

  constructor(attempt) {
    this.#attempt = attempt
  }

  play(actions) {
    for (const action of actions) {
      const name = Object.keys(action).find((key) => key in this.#acts)
      if (!name) throw new Error(`The script has an action that is none: ${JSON.stringify(action)}`)
      this.#acts[name](action[name], action)
    }
  }

  #acts = {
    hello: (fields) => this.#send({ type: 'hello', pid: process.pid, ...fields }),
    send: (line, { to = 'both' }) => this.#send(line, to),
    steps: (count, { fields = {}, from }) => {
      if (from !== undefined) this.#step = from - 1
      for (let i = 0; i < count; i++) {
        const step = this.#step + 1
        this.#send({ type: 'step', step, trained_tokens: 100 * step, ...fields })
      }
    },
    raw: (text) => this.#write(Buffer.from(this.#fill(text), 'utf8')),
    hex: (digits) => this.#write(Buffer.from(digits, 'hex')),
    chunks: (size) => (this.#chunks = size),
    log_raw: (text) => fs.appendFileSync(this.#log, text),
    stderr: (text) => fs.writeSync(2, text),
    verbatim: (line) => this.#write(Buffer.from(`${ascii(this.#renamed(line))}\n`)),
    await: (cmd, { with: expected, as }) => {
      const { id } = this.#await(cmd, expected) ?? {}
      if (as !== undefined) this.#ids.set(as, id)
    },
    answer: (cmd, action) => this.#answer(cmd, action),
    start: (fields) => {
      const { config } = this.#await('start')
      this.#send({ type: 'attempt', attempt: this.#attempt, pid: process.pid, ...fields })
      this.#send({ type: 'init' })
      const result = { run_id: 'r1', run_dir: config.run_dir, total_steps: 10, resumed_from: null }
      this.#answer('start', { result, at_seq: true })
    },
    finish: (fields) => {
      const end = { ...samples.end, ...fields }
      if (end.outcome === 'completed') this.#send({ type: 'complete' })
      this.#send({ type: 'end', ...fields })
      process.exit(end.exit_code)
    },
    repeat: (count, { do: actions }) => {
      for (let i = 0; i < count; i++) this.play(actions)
    },
    ignore: (signal) => process.on(signal, () => {}),
    close: (stream) => fs.closeSync(stream === 'stdin' ? 0 : 1),
    grandchild: (seconds) => spawn('sleep', [String(seconds)], { stdio: ['ignore', 'inherit', 'ignore'] }).unref(),
    sleep_ms: sleep,
    hang: () => {
      while (process.ppid === PARENT) sleep(250)
      process.exit(1)
    },
    die: (signal) => {
      process.kill(process.pid, signal)
      sleep(Infinity)
    },
    exit: (code) => process.exit(code),
  }

  /** Completes a text or an object: `$dir`, `$id`, `{"$repeat": [text, times]}`. */
  #fill(value) {
    if (value === '$id') return this.#id
    if (typeof value === 'string') return value.replaceAll('$dir', this.#dir)
    if (Array.isArray(value)) return value.map((item) => this.#fill(item))
    if (typeof value !== 'object' || value === null) return value
    if (value.$repeat) return value.$repeat[0].repeat(value.$repeat[1])
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, this.#fill(item)]))
  }

  #renamed(line) {
    const renamed = { ...line }
    for (const key of ['id', 'cause']) if (this.#ids.has(line[key])) renamed[key] = this.#ids.get(line[key])
    return renamed
  }

  #send(line, to = 'both') {
    const message = this.#fill({ ...samples[line.type], ...line })
    const isEvent = !TRANSPORT.has(message.type)
    if (isEvent && message.seq === undefined) message.seq = this.#seq + 1
    if (isEvent && typeof message.seq === 'number') message.ts ??= 1_700_000_000_000 + message.seq
    for (const key of Object.keys(message)) if (message[key] === '$drop') delete message[key]
    if (typeof message.seq === 'number' && !message.replay) this.#seq = Math.max(this.#seq, message.seq)
    if (message.type === 'step' && !message.replay) this.#step = message.step
    const bytes = Buffer.from(`${ascii(message)}\n`)
    if (to !== 'wire' && this.#log && typeof message.seq === 'number') fs.appendFileSync(this.#log, bytes)
    if (to !== 'log') this.#write(bytes)
  }

  #write(bytes) {
    const size = this.#chunks || bytes.length
    for (let start = 0; start < bytes.length; start += size) {
      let part = bytes.subarray(start, start + size)
      while (part.length > 0) part = part.subarray(fs.writeSync(1, part))
    }
  }

  #await(cmd, expected) {
    for (;;) {
      const found = this.#commands.findIndex((command) => command.cmd === cmd)
      if (found !== -1) {
        const [command] = this.#commands.splice(found, 1)
        if (expected && !matches(expected, command)) {
          fs.writeSync(2, `The fake worker expected ${ascii(expected)} and got ${ascii(command)}\n`)
          process.exit(BAD_COMMAND)
        }
        this.#last[cmd] = command
        this.#id = command.id
        if (cmd === 'start') this.#openLog(command.config?.run_dir)
        return command
      }
      if (!this.#inputOpen) {
        if (cmd === 'eof') return undefined
        fs.writeSync(2, `The fake worker waited for ${cmd}, but its stdin has ended.\n`)
        process.exit(BAD_COMMAND)
      }
      this.#read()
    }
  }

  #read() {
    const block = Buffer.alloc(1 << 16)
    const size = fs.readSync(0, block)
    if (size === 0) {
      this.#inputOpen = false
      return
    }
    this.#input = Buffer.concat([this.#input, block.subarray(0, size)])
    let end
    while ((end = this.#input.indexOf(0x0a)) !== -1) {
      this.#commands.push(JSON.parse(this.#input.toString('utf8', 0, end)))
      this.#input = this.#input.subarray(end + 1)
    }
  }

  #answer(cmd, { result, error, at_seq: atSeq }) {
    const response = { type: 'response', id: this.#last[cmd]?.id ?? null, cmd, ok: error === undefined }
    if (error === undefined) response.result = result ?? {}
    else response.error = error
    if (atSeq !== undefined) response.at_seq = atSeq === true ? this.#seq : atSeq
    this.#send(response)
  }

  #openLog(runDir) {
    if (!runDir || this.#log) return
    this.#dir = runDir
    fs.mkdirSync(runDir, { recursive: true })
    this.#log = path.join(runDir, 'events.jsonl')
    const text = fs.existsSync(this.#log) ? fs.readFileSync(this.#log, 'utf8') : ''
    const whole = text.slice(0, text.lastIndexOf('\n') + 1)
    fs.writeFileSync(this.#log, whole)
    for (const line of whole.split('\n')) if (line) this.#seq = Math.max(this.#seq, JSON.parse(line).seq ?? 0)
  }
}

/** Counts the processes that play a script, so that a restarted worker plays the next part. */
function nextAttempt(file) {
  fs.appendFileSync(`${file}.attempts`, '.')
  return fs.statSync(`${file}.attempts`).size
}

const file = process.argv[2]
const script = JSON.parse(fs.readFileSync(file, 'utf8'))
const attempt = nextAttempt(file)
const attempts = script.attempts ?? [script.worker]
new FakeWorker(attempt).play(attempts[Math.min(attempt, attempts.length) - 1])
process.exit(0)
