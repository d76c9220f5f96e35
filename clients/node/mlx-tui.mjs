#!/usr/bin/env node
// Starts a worker for the TUI of @mlx-node/trl, which runs `node SCRIPT` and talks over its stdin and stdout:
//
//   node mlx-tui.mjs CONFIG.toml [key=value …] [--resume]
//
// Without a config among the arguments TRAINWIRE_CONFIG names it. TRAINWIRE_COMMAND is the worker's command: a path,
// or a JSON list of words; without it `trainwire` is looked for on the PATH.

import { spawn } from 'node:child_process'
import { constants } from 'node:os'

function leave(message) {
  process.stderr.write(`mlx-tui: ${message}\n`)
  process.exit(2)
}

function command() {
  const text = process.env.TRAINWIRE_COMMAND
  if (!text) return ['trainwire']
  if (!text.startsWith('[')) return [text]
  try {
    return JSON.parse(text)
  } catch (error) {
    return leave(`TRAINWIRE_COMMAND is no JSON list: ${error.message}`)
  }
}

const words = process.argv.slice(2)
if (words.length === 0 || words[0].startsWith('-')) {
  if (!process.env.TRAINWIRE_CONFIG) leave('no config: give a TOML file as first argument, or in TRAINWIRE_CONFIG.')
  words.unshift(process.env.TRAINWIRE_CONFIG)
}
const [program, ...rest] = command()
const child = spawn(program, [...rest, 'run', ...words, '--dialect=mlx-tui', '--on-eof=stop'], {
  stdio: 'inherit',
  env: { ...process.env, PYTHONSAFEPATH: '1' },
})
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.on(signal, () => child.kill(signal))
child.on('error', ({ message }) => {
  leave(`the worker \`${program}\` cannot be started: ${message}. Set TRAINWIRE_COMMAND.`)
})
child.on('exit', (code, signal) => process.exit(code ?? 128 + constants.signals[signal]))
