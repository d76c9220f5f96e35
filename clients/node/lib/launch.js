'use strict'

const { existsSync } = require('node:fs')
const path = require('node:path')

const { aborted } = require('./channel.js')
const { prepareConfig } = require('./config.js')
const { ClientError, WorkerDied, WorkerNotFound } = require('./errors.js')
const { LaunchedRun } = require('./launched.js')
const { HELLO_TIMEOUT, SHUTDOWN, WorkerProcess } = require('./worker.js')

const WORKER_OPTIONS = ['command', 'workerArgs', 'cwd', 'env', 'helloTimeout']
const LAUNCH_OPTIONS = [
  ...WORKER_OPTIONS,
  ...['rows', 'validRows', 'resume', 'overwrite', 'linger', 'supervise', 'shutdown', 'maxQueue', 'onUnknown', 'signal'],
]
const VALIDATE_OPTIONS = [...WORKER_OPTIONS, 'timeout', 'signal']

function checkOptions(name, options, known) {
  const unknown = Object.keys(options).find((key) => !known.includes(key))
  if (unknown !== undefined) throw new TypeError(`${name} has no option ${unknown}; it takes ${known.join(', ')}.`)
}

/** Checks the `command` option: how the worker is found is never guessed. */
function checkCommand(command) {
  if (command === undefined) {
    throw new WorkerNotFound(
      "A worker needs `command`, the list of words that starts it, for instance ['/path/to/trainwire'] or " +
        "['/path/to/python3', '-m', 'trainwire_worker'].",
    )
  }
  const good = Array.isArray(command) && command.length > 0 && command.every((word) => typeof word === 'string' && word)
  if (!good) throw new TypeError("`command` is a list of words, for instance ['/path/to/trainwire'].")
}

/**
 * Starts a worker and a run in it. Resolves when the worker has said `hello`; the run is then under way.
 */
async function launch(config, options = {}) {
  checkOptions('launch', options, LAUNCH_OPTIONS)
  checkCommand(options.command)
  if (options.signal?.aborted) throw aborted(options.signal)
  const prepared = await prepareConfig(config, options)
  if (options.signal?.aborted) throw aborted(options.signal)
  const run = new LaunchedRun(prepared.config, { ...options, ...resolveProgram(options.command, prepared.cwd) })
  await run._begin()
  return run
}

/** Says where and by what name the program is started: a relative path means this process's folder, not `cwd`. */
function resolveProgram([program, ...rest], cwd) {
  if (cwd !== undefined && !existsSync(cwd)) throw new ClientError(`The working folder ${cwd} does not exist.`)
  const isPath = program.includes('/') && !path.isAbsolute(program)
  return { command: [isPath ? path.resolve(program) : program, ...rest], cwd }
}

/** Has a worker check a config and its data without training. Resolves with what `validate` answers. */
async function validate(config, options = {}) {
  const { timeout, signal } = options
  checkOptions('validate', options, VALIDATE_OPTIONS)
  checkCommand(options.command)
  const prepared = await prepareConfig(config, options)
  if (signal?.aborted) throw aborted(signal)
  const { command, cwd } = resolveProgram(options.command, prepared.cwd)
  const ignore = () => {}
  const worker = new WorkerProcess(
    command,
    { cwd, env: options.env, args: options.workerArgs ?? [], times: SHUTDOWN },
    { onMessage: ignore, onJunk: ignore, onStderr: ignore, onClose: ignore },
  )
  worker.gone.then(({ exitCode, signal: by }) => {
    const died = new WorkerDied({ exitCode, signal: by, stderr: worker.stderr, doing: 'validating' })
    worker.channel.failAll(() => died)
  })
  await worker.greeting(options.helloTimeout ?? HELLO_TIMEOUT, signal)
  try {
    const response = await worker.channel.request('validate', { config: prepared.config }, { timeout, signal })
    return response.result
  } finally {
    await worker.shutdown({ times: { ...SHUTDOWN, stop: 0 }, saving: async () => false, onRung: ignore, stop: ignore })
  }
}

module.exports = { launch, validate }
