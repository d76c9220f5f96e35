'use strict'

const fs = require('node:fs/promises')
const path = require('node:path')

const { ClientError } = require('./errors.js')
const { parseToml } = require('./toml.js')

/** What rows given in memory take the place of, and their file below the run folder. */
const ROWS = { rows: ['data', 'rows/train.jsonl'], validRows: ['valid_data', 'rows/valid.jsonl'] }

/**
 * Turns what the caller gave into the `config` of a `start` command and the worker's working folder.
 *
 * A path names a TOML or JSON file; relative paths in it start at its folder, and its name names the run. `rows` and
 * `validRows` are written into the run folder and take the place of `data` and `valid_data`.
 */
async function prepareConfig(given, { cwd, rows, validRows } = {}) {
  let config
  let folder = cwd
  if (typeof given === 'string') {
    if (cwd !== undefined) throw new TypeError('`cwd` has no use beside a config file: its paths start at its folder.')
    const file = path.resolve(given)
    config = await readConfigFile(file)
    config.run_name ??= path.basename(file, path.extname(file))
    folder = path.dirname(file)
  } else if (typeof given === 'object' && given !== null && !Array.isArray(given)) {
    config = { ...given }
  } else {
    throw new TypeError('The config is an object with snake_case keys, or the path of a TOML or JSON file.')
  }
  for (const [name, list] of Object.entries({ rows, validRows })) {
    if (list !== undefined) await writeRows(config, name, list, folder)
  }
  return { config, cwd: folder }
}

async function readConfigFile(file) {
  const text = await fs.readFile(file, 'utf8').catch((error) => {
    throw new ClientError(`The config file ${file} cannot be read: ${error.message}`, { cause: error })
  })
  try {
    const config = path.extname(file) === '.json' ? JSON.parse(text) : parseToml(text)
    if (typeof config !== 'object' || config === null || Array.isArray(config)) throw new Error('holds no table')
    return config
  } catch (error) {
    const what = error instanceof ClientError ? error.message : `is not JSON: ${error.message}`
    throw new ClientError(`The config file ${file} ${what}`)
  }
}

async function writeRows(config, name, rows, folder = process.cwd()) {
  const [key, place] = ROWS[name]
  if (config[key] !== undefined) throw new TypeError(`The config's ${key} and ${name} exclude each other.`)
  const lines = Array.from(rows, (row) => `${JSON.stringify(row)}\n`)
  if (lines.length === 0) throw new TypeError(`${name} is empty: there is nothing to read.`)
  const runDir = path.resolve(folder, config.run_dir ?? path.join('runs', config.run_name ?? 'run'))
  const file = path.join(runDir, place)
  await fs.mkdir(path.dirname(file), { recursive: true })
  await fs.writeFile(`${file}.tmp`, lines.join(''))
  await fs.rename(`${file}.tmp`, file)
  Object.assign(config, { [key]: file, run_dir: runDir })
}

module.exports = { prepareConfig }
