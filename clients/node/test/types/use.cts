// Compiled, never run: the same declarations for CommonJS.

import trainwire = require('trainwire')
import testing = require('trainwire/testing')

export const started = trainwire.launch({ model: 'm', data: 'd' }, { command: testing.fakeWorker({ worker: [] }) })
export const isError = (error: unknown): boolean => error instanceof trainwire.CommandFailed && error.code === 'wrong_state'
