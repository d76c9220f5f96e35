'use strict'

/** The root of everything that this client throws on its own account. */
class ClientError extends Error {
  constructor(message, options) {
    super(message, options)
    this.name = new.target.name
  }
}

/** The worker's program cannot be started. */
class WorkerNotFound extends ClientError {
  constructor(message, { command = null, cause } = {}) {
    super(message, cause && { cause })
    this.command = command
  }
}

/** The worker speaks another major version of the protocol. */
class ProtocolMismatch extends ClientError {
  constructor(worker, theirs, ours) {
    super(
      `The worker (${worker}) speaks protocol ${theirs}, this client speaks protocol ${ours}. ` +
        'Update the older of the two.',
    )
    this.theirs = theirs
    this.ours = ours
  }
}

/** The worker ended without its `end` line. */
class WorkerDied extends ClientError {
  constructor({ exitCode = null, signal = null, stderr = '', lastCheckpoint = null, restarts = 0, doing = '' }) {
    const how = signal ? `was ended by ${signal}` : exitCode === null ? 'is gone' : `left with exit code ${exitCode}`
    const tail = stderr.trim().split('\n').slice(-8).join('\n')
    super(
      `The worker ${how} without its \`end\` line${doing && ` while it was ${doing}`}. ` +
        (restarts > 0 ? `It had been started again ${restarts} times. ` : '') +
        (lastCheckpoint ? `The last checkpoint is ${lastCheckpoint}.` : 'No checkpoint is known.') +
        (tail && ` The last lines of stderr:\n${tail}`),
    )
    this.exitCode = exitCode
    this.signal = signal
    this.stderr = stderr
    this.lastCheckpoint = lastCheckpoint
    this.restarts = restarts
  }
}

/** The worker refused a command, or failed at it; the run goes on. */
class CommandFailed extends ClientError {
  constructor(cmd, { code, message, details, hint }) {
    super(`${cmd} failed: ${message}${hint ? ` ${hint}` : ''}`)
    this.cmd = cmd
    this.code = code
    this.details = details ?? null
    this.hint = hint ?? null
  }
}

/** A command, the `hello` of a new worker, or the end of the run did not come in time. */
class CommandTimeout extends ClientError {
  constructor(cmd, timeout, doing = '') {
    super(`${cmd} was not answered within ${timeout / 1000} s.${doing && ` ${doing}`}`)
    this.cmd = cmd
    this.timeout = timeout
  }
}

/** The run is over and takes no more commands. */
class RunEnded extends ClientError {
  constructor(cmd, result) {
    const why = result.error ? `: ${result.error.message}` : ''
    super(`${cmd} came too late: the run is over, ${result.outcome} (${result.reason}) at step ${result.step}${why}`)
    this.cmd = cmd
    this.outcome = result.outcome
  }
}

/** The run ended as failed: thrown by `check()` of a result, and given to listeners of `error`. */
class RunFailed extends ClientError {
  constructor({ code, message, details, hint }) {
    super(`${message}${hint ? ` ${hint}` : ''}`)
    this.code = code
    this.details = details ?? null
    this.hint = hint ?? null
  }
}

/** Nobody can be steered: the run's worker listens on no socket, or another controller holds it. */
class NoWorker extends ClientError {}

module.exports = {
  ClientError,
  WorkerNotFound,
  ProtocolMismatch,
  WorkerDied,
  CommandFailed,
  CommandTimeout,
  RunEnded,
  RunFailed,
  NoWorker,
}
