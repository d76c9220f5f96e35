// The parts that need no process: framing, coalescing, the queue, config files.

import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import fs from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { test } from 'node:test'

import { sample } from 'trainwire/testing'

import { folder, packageFolder, python, withoutWorker } from './helpers.mjs'

const require = createRequire(path.join(packageFolder, 'lib', 'index.js'))
const { LineSplitter } = require('./lines.js')
const { EventQueue } = require('./queue.js')
const { mergeSteps } = require('./coalesce.js')
const { parseToml } = require('./toml.js')
const { readLog, readBatch } = require('./log.js')

/** A generator of numbers from 0 to 1, the same in each run. */
function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed)
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32
  }
}

test('lines come out whole however their bytes are cut', () => {
  const next = random(7)
  const alphabet = ['a', 'é', '世', '😀', '\u2028', '\u2029', '\u0085', '\r', '\t', '{', '"']
  for (let round = 0; round < 200; round++) {
    const lines = Array.from({ length: 1 + Math.floor(next() * 8) }, () =>
      Array.from({ length: Math.floor(next() * 40) }, () => alphabet[Math.floor(next() * alphabet.length)]).join(''),
    )
    const bytes = Buffer.from(lines.map((line) => `${line}\n`).join(''))
    const found = []
    const splitter = new LineSplitter((line) => found.push(line))
    for (let start = 0; start < bytes.length; ) {
      const size = 1 + Math.floor(next() * 17)
      splitter.push(bytes.subarray(start, start + size))
      start += size
    }
    assert.deepEqual(found, lines)
  }
})

test('a line beyond the limit is thrown away up to its end, and told once', () => {
  const found = []
  let overlong = 0
  const splitter = new LineSplitter((line) => found.push(line), () => (overlong += 1), 100)
  const text = `before\n${'x'.repeat(1000)}\nafter\n${'y'.repeat(500)}`
  for (let start = 0; start < text.length; start += 30) splitter.push(Buffer.from(text.slice(start, start + 30)))
  splitter.push(Buffer.from('\nlast\n'))
  assert.deepEqual(found, ['before', 'after', 'last'])
  assert.equal(overlong, 2)
})

function steps(count, next) {
  return Array.from({ length: count }, (_, i) =>
    sample('step', {
      seq: i + 1,
      step: i + 1,
      loss: next() < 0.1 ? null : next() * 4,
      total_tokens: next() < 0.1 ? 0 : Math.floor(next() * 1000),
      training_time_ms: next() * 50,
      token_accuracy: next(),
      padding_fraction: next(),
      micro_batches: Math.floor(next() * 4),
      data_time_ms: next(),
      peak_bytes: Math.floor(next() * 1e9),
      skipped: next() < 0.1 ? 1 : 0,
    }),
  )
}

test('steps are put together as the worker does it', { skip: withoutWorker }, () => {
  const pairs = steps(200, random(11))
  const program = `
import sys, msgspec
from trainwire_protocol.coalesce import merge_steps
from trainwire_protocol.events import Step
steps = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Step])
print(msgspec.json.encode([merge_steps(a, b) for a, b in zip(steps, steps[1:])]).decode())
`
  const run = spawnSync(python, ['-c', program], { input: JSON.stringify(pairs), encoding: 'utf8' })
  assert.equal(run.status, 0, run.stderr)
  const theirs = JSON.parse(run.stdout)
  theirs.forEach((expected, i) => {
    const { replay, cause, ...ours } = mergeSteps(pairs[i], pairs[i + 1])
    assert.deepEqual(Object.keys(ours).sort(), Object.keys(expected).sort())
    for (const [key, value] of Object.entries(expected)) {
      if (typeof value === 'number' && !Number.isInteger(value)) {
        assert.ok(Math.abs(ours[key] - value) <= 1e-12 * Math.abs(value), `${key}: ${ours[key]} instead of ${value}`)
      } else assert.deepEqual(ours[key], value, key)
    }
  })
})

test('a perplexity that overflows is null and named', () => {
  const huge = sample('step', { loss: 800, perplexity: null })
  const merged = mergeSteps(huge, huge)
  assert.equal(merged.perplexity, null)
  assert.deepEqual(merged.non_finite, { perplexity: 'inf' })
})

test('a full queue conserves the sums of the steps and keeps everything else', () => {
  const queue = new EventQueue(4)
  const all = steps(1000, random(3))
  for (const [i, step] of all.entries()) {
    queue.push(step)
    if (i === 500) queue.push(sample('checkpoint', { seq: 2000 }))
  }
  const found = []
  for (let item = queue.take(); item; item = queue.take()) found.push(item)
  const sum = (list, field) => list.reduce((total, step) => total + step[field], 0)
  const merged = found.filter((item) => item.type === 'step')
  assert.equal(sum(merged, 'updates'), 1000)
  assert.equal(sum(merged, 'total_tokens'), sum(all, 'total_tokens'))
  assert.equal(found.filter((item) => item.type === 'checkpoint').length, 1)
  assert.ok(found.length <= 8)
})

test('a backlog that cannot be put together becomes one gap over all that was not taken', () => {
  const queue = new EventQueue(4)
  queue.push(sample('log', { seq: 7 }))
  queue.take()
  queue.push(sample('step', { seq: 8 }))
  for (let seq = 9; seq < 60; seq++) queue.push(sample('log', { seq }))
  const gap = queue.take()
  assert.equal(gap.type, 'gap')
  assert.equal(gap.from_seq, 8)
  let last = gap.to_seq
  for (let item = queue.take(); item; item = queue.take()) {
    assert.equal(item.seq, last + 1)
    last = item.seq
  }
  assert.equal(last, 59)
})

test('an event of the log is found without reading what stands before it', async (t) => {
  const dir = folder()
  const lines = []
  for (let seq = 1; seq <= 20_000; seq++) lines.push(JSON.stringify(sample('step', { seq, step: seq })))
  fs.writeFileSync(path.join(dir, 'events.jsonl'), `${lines.join('\n')}\n{"type":"step","seq":20001`)
  for (const from of [1, 2, 777, 10_000, 19_999, 20_000]) {
    const seqs = []
    for await (const event of readLog(dir, { fromSeq: from, toSeq: from + 2 })) seqs.push(event.seq)
    assert.deepEqual(seqs, [from, from + 1, from + 2].filter((seq) => seq <= 20_000))
  }
  assert.deepEqual(await readBatch(dir, 20_001, 30_000), [])
  assert.equal((await readBatch(dir, 5, 30_000)).length, 256)
})

const TOML = String.raw`
# A config
model = "mödel \u00e9 \U0001F600 \" \\ \t"   # behind
data = ['a\b.jsonl', "b.jsonl",
  "c.jsonl", # last
]
"quoted key" = 1
batch_size = 1_000
hex = 0xff_ff
octal = 0o17
bits = 0b101
negative = -17
plus = +3
zero = 0
learning_rate = 1e-4
half = 0.5
big = 6.02e+23
exp = 1E3
infinite = inf
minus = -inf
yes = true
no = false
empty = []
nested = [[1, 2], ["a"], [{ x = 1 }]]
chat_template_args = { enable_thinking = false, depth.x = 2, "k" = 'v' }
empty_table = {}
template = """
first
  second \
     joined "quoted" ""two""
"""
ends = """a"b"""""
raw = '''
no \escapes
'''
dotted.a.b = 1
dotted.a.c = 2
long = "line one\nline two"

[table]
key = 1
[table.sub]
key = 2
["other table"]
`

test('TOML is read as Python reads it', { skip: withoutWorker }, () => {
  const program = 'import sys, tomllib, json; print(json.dumps(tomllib.loads(sys.stdin.buffer.read().decode())))'
  const run = spawnSync(python, ['-c', program], { input: TOML, encoding: 'utf8' })
  assert.equal(run.status, 0, run.stderr)
  const plain = (text) => text.replaceAll(/-?\bInfinity\b/g, (word) => `"${word}"`)
  const ours = JSON.parse(JSON.stringify(parseToml(TOML), (_, v) => (v === Infinity ? 'Infinity' : v === -Infinity ? '-Infinity' : v)))
  assert.deepEqual(ours, JSON.parse(plain(run.stdout)))
})

test('TOML that Python refuses is refused with its line', { skip: withoutWorker }, () => {
  const broken = [
    'a = ', 'a = b', 'a 1', 'a = "x', "a = 'x\ny'", 'a = [1, 2', 'a = {x = 1', 'a = 1\na = 2', '= 1', 'a = 01', 'a = 1__0',
    'a = 1.', 'a = .5', 'a = "\\q"', 'a = "\\ud800"', '[a\nb = 1', 'a = 1 b = 2', 'a.b = 1\na = 2', 'a = tru', 'a = [1 2]',
    'a = {x = 1 y = 2}', 'a = "x" "y"', 'a = +-1', 'a = _1', 'a = 1_',
  ]
  const program = `
import sys, json, tomllib
def ok(text):
    try: tomllib.loads(text)
    except tomllib.TOMLDecodeError: return False
    return True
print(json.dumps([ok(text) for text in json.load(sys.stdin)]))
`
  const run = spawnSync(python, ['-c', program], { input: JSON.stringify(broken), encoding: 'utf8' })
  assert.equal(run.status, 0, run.stderr)
  assert.ok(JSON.parse(run.stdout).every((ok) => !ok), run.stdout)
  for (const text of broken) assert.throws(() => parseToml(text), /is not TOML: .*\(line \d+\)/, JSON.stringify(text))
  assert.throws(() => parseToml('a = 1\nb = oops'), /line 2/)
})
