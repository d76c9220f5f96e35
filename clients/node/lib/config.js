'use strict'

const fs = require('node:fs/promises')
const path = require('node:path')

const { ClientError } = require('./errors.js')
const { parseToml } = require('./toml.js')

/** Files in the run folder that hold rows given in memory. */
const ROW_FILES = { train: ['data', 'rows.jsonl'], valid: ['valid_data', 'rows-valid.jsonl'] }

/**
 * Turns what the caller gave into the `config` of a `start` command and the worker's working folder.
 *
 * A path names a TOML or JSON file; relative paths in it start at its folder, and its name names the run. `rows` are
 * written into the run folder and take the place of `data` and `valid_data`.
 */
async function prepareConfig(given, { cwd, rows } = {}) {
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
  if (rows !== undefined) await writeRows(config, Array.isArray(rows) ? { train: rows } : rows, folder)
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

async function writeRows(config, rows, folder = process.cwd()) {
  for (const name of Object.keys(rows)) {
    if (!Object.hasOwn(ROW_FILES, name)) throw new TypeError(`rows are a list, or {train, valid}; there is no ${name}.`)
    const [key, fileName] = ROW_FILES[name]
    if (config[key] !== undefined) throw new TypeError(`The config's ${key} and rows.${name} exclude each other.`)
    const runDir = path.resolve(folder, config.run_dir ?? path.join('runs', config.run_name ?? 'run'))
    const file = path.join(runDir, fileName)
    await fs.mkdir(runDir, { recursive: true })
    await fs.writeFile(`${file}.tmp`, rows[name].map((row) => `${JSON.stringify(row)}\n`).join(''))
    await fs.rename(`${file}.tmp`, file)
    config[key] = file
  }
}

module.exports = { prepareConfig }
