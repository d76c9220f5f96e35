'use strict'

const { mergeSteps } = require('./coalesce.js')
const { ClientError } = require('./errors.js')
const { checkLog, readLog, readTimelines } = require('./log.js')

const STEP_METRICS = (
  'loss total_tokens training_time_ms updates total_steps epoch epoch_progress learning_rate grad_norm ' +
  'token_accuracy perplexity trained_tokens tokens_per_second padding_fraction micro_batches data_time_ms ' +
  'active_bytes cache_bytes peak_bytes eta_ms skipped ts'
).split(' ')
/** Metrics of evaluations, by the field of `eval_end` that holds each. */
const EVAL_METRICS = {
  valid_loss: 'valid_loss',
  valid_perplexity: 'perplexity',
  valid_token_accuracy: 'token_accuracy',
  tokens: 'tokens',
  ms: 'ms',
}
/** The names that `history` takes. */
const METRICS = Object.freeze([...STEP_METRICS, ...Object.keys(EVAL_METRICS)])

async function* validEvents(runDir, type, timelines, toSeq) {
  const mark = `"type":"${type}"`
  for await (const event of readLog(runDir, { toSeq, accept: (line) => line.includes(mark) })) {
    if (event.type === type && !timelines.isVoid(event)) yield event
  }
}

/**
 * Reads metrics of a run, living or over, from its log: `{loss: {steps, values}, …}` along the valid timeline.
 *
 * With `maxPoints`, neighbouring `step` events are put together as the worker does for a slow reader, and of
 * neighbouring evaluations the last is kept.
 */
async function history(runDir, { metrics = ['loss'], maxPoints } = {}) {
  await checkLog(runDir)
  const unknown = metrics.find((name) => !METRICS.includes(name))
  if (unknown !== undefined) {
    throw new ClientError(`There is no metric ${JSON.stringify(unknown)}. These are: ${METRICS.join(', ')}.`)
  }
  const timelines = await readTimelines(runDir)
  const found = {}
  for (const [type, isOfType, field, join] of [
    ['step', (name) => !Object.hasOwn(EVAL_METRICS, name), (name) => name, mergeSteps],
    ['eval_end', (name) => Object.hasOwn(EVAL_METRICS, name), (name) => EVAL_METRICS[name], (_, later) => later],
  ]) {
    const names = metrics.filter(isOfType)
    if (names.length === 0) continue
    let count = 0
    let last = maxPoints ? 0 : Infinity
    if (maxPoints) {
      // A living run's log grows meanwhile: what comes after the count is left for the next call.
      for await (const event of validEvents(runDir, type, timelines)) {
        count += 1
        last = event.seq
      }
    }
    const size = maxPoints ? Math.max(1, Math.ceil(count / maxPoints)) : 1
    const steps = []
    const columns = names.map(() => [])
    const put = (event) => {
      steps.push(event.step)
      names.forEach((name, i) => columns[i].push(event[field(name)] ?? null))
    }
    let group
    let number = 0
    for await (const event of validEvents(runDir, type, timelines, last)) {
      group = number++ % size ? join(group, event) : event
      if (number % size === 0) {
        put(group)
        group = undefined
      }
    }
    if (group) put(group)
    names.forEach((name, i) => (found[name] = { steps: [...steps], values: columns[i] }))
  }
  return Object.fromEntries(metrics.map((name) => [name, found[name]]))
}

module.exports = { history, METRICS }
