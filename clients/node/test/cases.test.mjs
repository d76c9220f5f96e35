// Plays the scripted cases that both clients pass.

import assert from 'node:assert/strict'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

import * as trainwire from 'trainwire'
import { fakeWorker } from 'trainwire/testing'

import { exists } from './helpers.mjs'

const folder = fileURLToPath(new URL('../../cases/', import.meta.url))
const samples = JSON.parse(fs.readFileSync(path.join(folder, 'lines.json'), 'utf8'))
/** What a case may take; those that must be quick say so. */
const LIMIT = 120_000

const camel = (name) => name.replaceAll(/_([a-z])/g, (_, letter) => letter.toUpperCase())
const seconds = (value) => (typeof value === 'number' ? value * 1000 : value)

function fill(value, dir) {
  if (typeof value === 'string') return value.replaceAll('$dir', dir)
  if (Array.isArray(value)) return value.map((item) => fill(item, dir))
  if (typeof value !== 'object' || value === null) return value
  if (value.$repeat) return value.$repeat[0].repeat(value.$repeat[1])
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, fill(item, dir)]))
}

/** Turns a case's options, spelled as in Python with times in seconds, into this client's. */
function options(given, { spell = true } = {}) {
  const result = {}
  for (const [key, value] of Object.entries(given)) {
    const name = spell ? camel(key) : key
    if (key === 'shutdown') result[name] = Object.fromEntries(Object.entries(value).map(([k, v]) => [k, seconds(v)]))
    else result[name] = key === 'hello_timeout' || key === 'timeout' ? seconds(value) : value
  }
  return result
}

function partially(expected, actual, where) {
  if (expected === null) assert.ok(actual === null || actual === undefined, `${where}: ${JSON.stringify(actual)} is not null`)
  else if (Array.isArray(expected)) {
    assert.equal(actual?.length, expected.length, `${where}: ${JSON.stringify(actual)}`)
    expected.forEach((item, i) => partially(item, actual[i], `${where}[${i}]`))
  } else if (typeof expected === 'object') {
    assert.equal(typeof actual, 'object', where)
    for (const [key, value] of Object.entries(expected)) partially(value, actual?.[key], `${where}.${key}`)
  } else assert.deepEqual(actual, expected, where)
}

const fits = (expected, actual) => {
  try {
    partially(expected, actual, '')
    return true
  } catch {
    return false
  }
}

class Player {
  events = []
  unknown = []
  heard = new Set()
  begun = new Map()
  finished = false

  constructor(scenario, dir) {
    this.dir = dir
    this.command = scenario.worker || scenario.attempts ? fakeWorker(fill(scenario, dir)) : undefined
  }

  async play(action) {
    const name = Object.keys(action).find((key) => typeof this[`do_${key}`] === 'function' && !(key === 'call' && action.begin))
    assert.ok(name, `no action: ${JSON.stringify(action)}`)
    const began = Date.now()
    const value = await this.judged(action, () => this[`do_${name}`](action[name], action))
    if (action.within) assert.ok(Date.now() - began < action.within * 1000, `took ${Date.now() - began} ms`)
    return value
  }

  async judged({ raises, returns }, act) {
    if (raises) {
      const error = await act().then(
        (value) => assert.fail(`nothing was thrown, but ${JSON.stringify(value)} came`),
        (thrown) => thrown,
      )
      const { error: name, says = [], ...attributes } = raises
      assert.ok(error instanceof trainwire[name], `${name} expected: ${error.stack}`)
      for (const text of says) assert.ok(error.message.includes(text), `${JSON.stringify(text)} is not in: ${error.message}`)
      for (const [key, value] of Object.entries(attributes)) partially(value, error[camel(key)], key)
      return
    }
    const value = await act()
    if (returns) partially(returns, value, 'returns')
  }

  async do_launch(given) {
    const config = { model: 'model', data: 'data.jsonl', run_dir: this.dir }
    const onUnknown = (event) => this.unknown.push(event)
    this.adopt(await trainwire.launch(config, { command: this.command, onUnknown, ...options(given) }))
  }

  async do_attach() {
    this.adopt(await trainwire.attach(this.dir, { onUnknown: (event) => this.unknown.push(event) }))
  }

  adopt(run) {
    this.run = run
    this.rungs = []
    run.on('event', (event) => this.heard.add(event.type))
    run.on('shutdown', ({ name }) => this.rungs.push(name))
    this.iterator = run[Symbol.asyncIterator]()
  }

  async next() {
    const { value, done } = await this.iterator.next()
    if (!done) this.events.push(value)
    return done ? undefined : value
  }

  async do_read(count) {
    for (let i = 0; i < (count === 'all' ? Infinity : count); i++) if (!(await this.next())) break
  }

  async do_read_until(type) {
    for (;;) {
      const event = await this.next()
      assert.ok(event, `the events ended before ${type}`)
      if (event.type === type) return
    }
  }

  async do_until({ heard }) {
    while (!this.heard.has(heard)) await sleep(5)
  }

  call(method, args = {}) {
    if (method === 'set') return this.run.set(args)
    return this.run[method](options(args))
  }

  do_call(method, { args }) {
    return this.call(method, args)
  }

  async do_begin(label, { call, args }) {
    const promise = this.call(call, args)
    promise.catch(() => {})
    this.begun.set(label, promise)
  }

  do_finish(label) {
    return this.begun.get(label)
  }

  async do_wait(expected) {
    const result = await this.run.wait()
    for (const [key, value] of Object.entries(expected)) partially(value, result[camel(key)], key)
  }

  async do_close() {
    await this.run.close()
  }

  async do_history(given) {
    return trainwire.history(this.dir, options(given))
  }

  async do_expect(expected) {
    const { events } = this
    const steps = events.filter((event) => event.type === 'step')
    const sum = (field) => steps.reduce((total, step) => total + step[field], 0)
    const checks = {
      types: (list) => assert.deepEqual(events.map((event) => event.type), list),
      events: (list) => partially(list, events, 'events'),
      has: (list) => list.forEach((item) => assert.ok(events.some((event) => fits(item, event)), JSON.stringify(item))),
      not: (list) => list.forEach((type) => assert.ok(!events.some((event) => event.type === type), type)),
      seqs: (list) => assert.deepEqual(events.map((event) => event.seq), list),
      updates: (count) => assert.equal(sum('updates'), count),
      tokens: (count) => assert.equal(sum('total_tokens'), count),
      steps: (list) => assert.deepEqual(steps.map((step) => step.step), list),
      at_most: (count) => assert.ok(events.length <= count, `${events.length} events`),
      unknown: (list) => partially(list, this.unknown, 'unknown'),
      junk: (count) => assert.equal(this.run.junk, count),
      stderr: (text) => assert.ok(this.run.stderr.includes(text), this.run.stderr),
      shutdown: (list) => assert.deepEqual(this.rungs, list),
      alive: (alive) => assert.equal(exists(this.run.pid), alive),
    }
    for (const [key, value] of Object.entries(expected)) checks[key](value)
  }
}

/** Completes the lines of a log that is there before the case begins. */
function writeFiles(files, dir) {
  for (const [name, lines] of Object.entries(files)) {
    let seq = 0
    const texts = lines.map((line) => {
      if (typeof line === 'string') return line
      seq = line.seq ?? seq + 1
      return `${JSON.stringify(fill({ ...samples[line.type], ...line, seq, ts: 1_700_000_000_000 + seq }, dir))}\n`
    })
    fs.writeFileSync(path.join(dir, name), texts.join(''))
  }
}

const names = fs.readdirSync(folder).filter((name) => name.endsWith('.json') && name !== 'lines.json')

describe('the scripted cases', { concurrency: 3 }, () => {
  for (const name of names) {
    const scenario = JSON.parse(fs.readFileSync(path.join(folder, name), 'utf8'))
    test(`${name}: ${scenario.about}`, { timeout: LIMIT }, async (t) => {
      const dir = fs.realpathSync(fs.mkdtempSync(path.join(os.tmpdir(), 'trainwire-case-')))
      const player = new Player(scenario, dir)
      t.after(async () => {
        await player.run?.kill?.()
        fs.rmSync(dir, { recursive: true, force: true })
      })
      writeFiles(scenario.files ?? {}, dir)
      for (const [number, action] of fill(scenario.client, dir).entries()) {
        try {
          await player.play(action)
        } catch (error) {
          error.message = `client action ${number} ${JSON.stringify(action).slice(0, 200)}: ${error.message}`
          throw error
        }
      }
    })
  }
})

test('the sample lines that the test kit ships are those of the cases', () => {
  const shipped = JSON.parse(fs.readFileSync(new URL('../testing/lines.json', import.meta.url), 'utf8'))
  assert.deepEqual(shipped, samples)
})
