'use strict'

/** Weighs two means by their tokens; a side without tokens (a skipped update) has no say. */
function mean(a, b, tokensA, tokensB) {
  if (tokensA && tokensB && a !== null && b !== null) return (a * tokensA + b * tokensB) / (tokensA + tokensB)
  return tokensB || !tokensA ? b : a
}

/** Puts two `step` events into one: sums are conserved, means weighted by tokens, the rest is the newer's. */
function mergeSteps(older, newer) {
  const tokens = older.total_tokens + newer.total_tokens
  const milliseconds = older.training_time_ms + newer.training_time_ms
  const loss = mean(older.loss, newer.loss, older.total_tokens, newer.total_tokens)
  const microBatches = older.micro_batches + newer.micro_batches
  const padding = older.padding_fraction * older.micro_batches + newer.padding_fraction * newer.micro_batches
  const perplexity = loss === null ? null : Math.exp(loss)
  const merged = {
    ...newer,
    loss,
    total_tokens: tokens,
    training_time_ms: milliseconds,
    updates: older.updates + newer.updates,
    token_accuracy: mean(older.token_accuracy, newer.token_accuracy, older.total_tokens, newer.total_tokens),
    perplexity: perplexity === Infinity ? null : perplexity,
    tokens_per_second: milliseconds ? (1000 * tokens) / milliseconds : 0,
    padding_fraction: microBatches ? padding / microBatches : 0,
    micro_batches: microBatches,
    data_time_ms: older.data_time_ms + newer.data_time_ms,
    peak_bytes: Math.max(older.peak_bytes, newer.peak_bytes),
    skipped: older.skipped + newer.skipped,
  }
  const marks = {}
  for (const [field, kind] of Object.entries({ ...older.non_finite, ...newer.non_finite })) {
    if (merged[field] === null) marks[field] = kind
  }
  if (perplexity === Infinity) marks.perplexity = 'inf'
  if (Object.keys(marks).length > 0) merged.non_finite = marks
  else delete merged.non_finite
  return merged
}

module.exports = { mergeSteps }
