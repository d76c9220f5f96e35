import trainwire from './lib/index.js'

export const {
  launch,
  attach,
  validate,
  history,
  METRICS,
  latestCheckpoint,
  ClientError,
  WorkerNotFound,
  ProtocolMismatch,
  WorkerDied,
  CommandFailed,
  CommandTimeout,
  RunEnded,
  RunFailed,
  NoWorker,
} = trainwire
