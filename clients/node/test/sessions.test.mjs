// Recorded sessions of the worker are read whole, and play again.

import assert from 'node:assert/strict'
import fs from 'node:fs'
import path from 'node:path'
import { describe, test } from 'node:test'

import { launch } from 'trainwire'
import { fakeWorker, session } from 'trainwire/testing'

import { collect, folder, repository, types } from './helpers.mjs'

const examples = path.join(repository, 'protocol', 'examples')
const names = fs.readdirSync(examples).filter((name) => name.endsWith('.jsonl'))

test('there are sessions', () => assert.ok(names.length >= 5, String(names)))

describe('recorded sessions', { concurrency: 3 }, () => {
  for (const name of names) {
    test(`${name} gives its events, in order, and its answers`, { timeout: 120_000 }, async (t) => {
      const file = path.join(examples, name)
      const lines = fs.readFileSync(file, 'utf8').trim().split('\n').map((line) => JSON.parse(line))
      const run = await launch({ model: 'm', data: 'd', run_dir: folder() }, { command: fakeWorker(session(file)) })
      t.after(() => run.kill())
      const answers = lines.filter((line) => line.type === 'response' && line.id !== null && line.cmd !== 'start')
      const asked = answers.map(({ cmd }) => run.request(cmd).then((response) => response, (error) => error))
      const events = await collect(run)
      const expected = lines.filter((line) => !line.replay && !['hello', 'response', 'heartbeat'].includes(line.type))
      assert.deepEqual(types(events), types(expected))
      assert.deepEqual(events.map((event) => event.seq), expected.map((event) => event.seq))
      for (const [i, answer] of (await Promise.all(asked)).entries()) {
        if (answers[i].ok) assert.deepEqual(answer.result, answers[i].result)
        else assert.equal(answer.code, answers[i].error.code)
      }
      const end = lines.at(-1)
      const result = await run.wait()
      assert.deepEqual([result.outcome, result.exitCode, result.step], [end.outcome, end.exit_code, end.step])
      assert.deepEqual(result.error?.code ?? null, lines.findLast((line) => line.type === 'error')?.code ?? null)
    })
  }
})
