'use strict'

/** What each command takes: the name in Node, and the name on the wire. */
const PARAMETERS = {
  pause: {},
  resume: { steps: 'steps' },
  checkpoint: { name: 'name' },
  stop: { save: 'save' },
  eval: { maxBatches: 'max_batches' },
  generate: {
    prompt: 'prompt',
    messages: 'messages',
    maxTokens: 'max_tokens',
    temperature: 'temperature',
    seed: 'seed',
    adapter: 'adapter',
  },
  status: {},
  replay: { fromSeq: 'from_seq', toSeq: 'to_seq', types: 'types' },
  ping: {},
}

/** Splits the options of a method into the command's parameters and those of the call (`timeout`, `signal`). */
function split(cmd, options = {}) {
  const names = PARAMETERS[cmd]
  const parameters = {}
  const call = {}
  for (const [key, value] of Object.entries(options)) {
    if (key === 'timeout' || key === 'signal') call[key] = value
    else if (Object.hasOwn(names, key)) {
      if (value !== undefined) parameters[names[key]] = value
    } else {
      const takes = [...Object.keys(names), 'timeout', 'signal'].join(', ')
      throw new TypeError(`${cmd} has no option ${key}; it takes ${takes}.`)
    }
  }
  return { parameters, call }
}

module.exports = { split }
