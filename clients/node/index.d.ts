import { EventEmitter } from 'node:events'

import type {
  ChatMessage,
  CheckpointResult,
  Commands,
  Config,
  EndEvent,
  ErrorCode,
  ErrorEvent,
  EvalResult,
  Event,
  Gap,
  GenerateResult,
  Heartbeat,
  Hello,
  PauseResult,
  PingResult,
  ResumeResult,
  SetResult,
  SettableValues,
  StartResult,
  StatusResult,
  StepEvent,
  StopResult,
  ValidateResult,
} from './protocol'

export type * from './protocol'

/**
 * What a run iterates over: every event of the run, told apart by `type`; and a `gap` where events could neither be
 * received nor read from the log.
 */
export type RunEvent = Event | Gap

/** A message of a type that this client does not know. */
export interface UnknownEvent {
  type: string
  seq?: number
  [field: string]: unknown
}

/** A row of training data: `messages`, `prompt` and `completion`, or `text`. */
export type Row = Record<string, unknown>

/** A config whose data may also be given as `rows`. */
export type LaunchConfig = Omit<Config, 'data'> & Partial<Pick<Config, 'data'>>

/** The rungs by which a worker is ended, in their order. */
export type Rung = 'stop' | 'stdin' | 'terminate' | 'kill'

/** How long the worker is given, in ms. */
export interface ShutdownTimes {
  /** after the `stop` command, before its stdin is closed; default 60,000 */
  stop?: number
  /** after its stdin was closed, before SIGTERM; default 20,000 */
  stdin?: number
  /** after SIGTERM, before SIGKILL; default 10,000 */
  terminate?: number
  /** how long a checkpoint that is being written holds up the next rung; default 600,000 */
  save?: number
  /** to leave after its `end` line; default 10,000 */
  exit?: number
}

/** How often a worker that died is started again. */
export interface Supervision {
  /** default 5 */
  restarts?: number
  /** ms in which they are counted; default 180,000 */
  within?: number
}

export interface WorkerOptions {
  /** the words that start the worker, to which `serve` is added; for instance ['/path/to/trainwire'] */
  command: readonly string[]
  /** arguments behind `serve` */
  workerArgs?: readonly string[]
  /** the worker's working folder, where relative paths of a config object start; default: this process's */
  cwd?: string
  /** environment variables on top of this process's */
  env?: Record<string, string>
  /** ms in which the worker must say hello; default 30,000 */
  helloTimeout?: number
}

export interface LaunchOptions extends WorkerOptions {
  /** training rows in memory; they are written to `rows/` in the run folder and take the place of `data` */
  rows?: Iterable<Row>
  /** the same for validation */
  validRows?: Iterable<Row>
  /** `auto`, `never`, `latest` or the folder of a checkpoint; wins over the config's key */
  resume?: string
  /** with resume `never`: remove the run that the folder holds */
  overwrite?: boolean
  /** keep the model after the end of training, for `eval` and `generate`, until `stop` */
  linger?: boolean
  /** start a worker that died again, and go on from its last checkpoint */
  supervise?: boolean | Supervision
  shutdown?: ShutdownTimes
  /** events that wait for a slow consumer before step events are put together; default 4096 */
  maxQueue?: number
  /** gets messages of types that this client does not know */
  onUnknown?: (event: UnknownEvent) => void
  /** ends iteration with an AbortError and the run gracefully, with a checkpoint */
  signal?: AbortSignal
}

export interface AttachOptions {
  /** `seq` of the first event that is delivered; default 1 */
  fromSeq?: number
  /** events that wait for a slow consumer before step events are put together; default 4096 */
  maxQueue?: number
  /** gets events of types that this client does not know */
  onUnknown?: (event: UnknownEvent) => void
}

/** Options of a call that waits. */
export interface CallOptions {
  /** ms to wait; 0, the default: as long as it takes. Then CommandTimeout is thrown; the command itself stands */
  timeout?: number
  /** gives up waiting with an AbortError; the command itself stands */
  signal?: AbortSignal
}

/** What a command came to. `at_seq` is the event that carried the effect. */
export type Answer<Result> = Result & { at_seq?: number }

/** Numbers of the last step event, and the last validation loss. */
export type FinalMetrics = Partial<Omit<StepEvent, 'type' | 'seq' | 'ts'>> & { valid_loss?: number | null }

/** How a run ended. */
export interface Result {
  outcome: EndEvent['outcome']
  reason: string
  step: number
  /** the folder that a resume or an export takes */
  checkpoint: string | null
  exitCode: number
  /** why a run failed */
  error: ErrorEvent | null
  metrics: FinalMetrics
  resumable: boolean
  /** arguments of `trainwire` that go on with the run */
  resumeArgs: string[]
  runDir: string | null
  /** how often supervision started the worker again */
  restarts: number
  /** the rungs that were needed to end the worker, and how long each took */
  shutdown: { name: Rung; ms: number }[]
  /** throws RunFailed if the run failed, and gives the result back otherwise */
  check(): this
}

/** The events of a run as an EventEmitter. `error` needs no listener: without one nothing is thrown. */
export type RunEvents = {
  [E in RunEvent as E['type'] extends 'error' ? never : E['type']]: [event: E]
} & {
  /** every event, in order */
  event: [event: RunEvent]
  /** RunFailed for the run's own `error` event; WorkerDied */
  error: [error: ClientError]
  unknown: [event: UnknownEvent]
  heartbeat: [heartbeat: Heartbeat]
  /** a line of the worker that is no message */
  junk: [line: string]
  /** what the worker wrote on stderr */
  stderr: [text: string]
  /** supervision starts the worker again */
  restart: [restart: { restarts: number; error: ClientError }]
  /** a rung of the shutdown ladder is taken */
  shutdown: [rung: { name: Rung }]
  /** all is over; null after a death */
  close: [result: Result | null]
}

/**
 * A run that is watched and steered: an async iterable of its events, an EventEmitter, and a promise per command.
 *
 * Node's process is kept alive by what waits for the run: a loop, a call, a listener; an idle run lets it end.
 */
export interface Run extends EventEmitter<RunEvents>, AsyncIterable<RunEvent>, AsyncDisposable {
  /** the worker's process number; null where it is not known */
  readonly pid: number | null
  readonly runId: string | null
  /** known from `init` on */
  readonly runDir: string | null
  readonly phase: StatusResult['phase']
  readonly activity: StatusResult['activity']
  readonly step: number
  readonly lastSeq: number
  /** the folder of the checkpoint that was reported last */
  readonly lastCheckpoint: string | null
  /** how the run ended; null before, and after a death */
  readonly result: Result | null
  /** true once the run is over, for this client */
  readonly ended: boolean

  [Symbol.asyncIterator](): AsyncIterableIterator<RunEvent>
  pause(options?: CallOptions): Promise<Answer<PauseResult>>
  /** With `steps`: go on for that many updates, then pause again. */
  resume(options?: CallOptions & { steps?: number }): Promise<Answer<ResumeResult>>
  checkpoint(options?: CallOptions & { name?: string }): Promise<Answer<CheckpointResult>>
  stop(options?: CallOptions & { save?: boolean }): Promise<Answer<StopResult>>
  /** Changes keys of the config while the run trains: all or nothing. */
  set(values: SettableValues, options?: CallOptions): Promise<Answer<SetResult>>
  eval(options?: CallOptions & { maxBatches?: number }): Promise<Answer<EvalResult>>
  /** Lets the model answer a `prompt` or `messages`; `adapter: false` asks the base model. */
  generate(
    options: CallOptions & {
      prompt?: string
      messages?: ChatMessage[]
      maxTokens?: number
      temperature?: number
      seed?: number
      adapter?: boolean
    },
  ): Promise<Answer<GenerateResult>>
  status(options?: CallOptions): Promise<Answer<StatusResult>>
  /** Resolves with stored events. They do not come a second time among the run's events. */
  replay(options?: CallOptions & { fromSeq?: number; toSeq?: number; types?: Event['type'][] }): Promise<Event[]>
  ping(options?: CallOptions): Promise<Answer<PingResult>>
  /** Sends a command by its names on the wire and resolves with the whole response. */
  request<C extends Exclude<keyof Commands, 'start' | 'validate'>>(
    cmd: C,
    parameters?: Omit<Commands[C], 'cmd' | 'id'>,
    options?: CallOptions,
  ): Promise<{ id: number; cmd: string; ok: true; result?: object; at_seq?: number }>
  /** Resolves when the run has ended by its own word, whatever the outcome; throws WorkerDied otherwise. */
  wait(options?: CallOptions): Promise<Result>
  /** A launched run: ends it gracefully and insists on it, rung by rung. An attached run: stops following it. */
  close(): Promise<Result | null>
  /** Leaves the run: it trains on, and `attach` finds it again. */
  detach(options?: CallOptions): Promise<void>
}

/** A run whose worker this process has started. */
export interface LaunchedRun extends Run {
  readonly pid: number
  readonly hello: Hello
  /** the end of what the worker wrote on stderr */
  readonly stderr: string
  /** how many lines of the worker were no messages */
  readonly junk: number
  /** how often supervision started the worker again */
  readonly restarts: number
  /** Resolves when the run is ready to train; throws CommandFailed if the start was refused. */
  started(options?: CallOptions): Promise<Answer<StartResult>>
  /** Sends SIGKILL to the worker and its engine: nothing is saved. */
  kill(): Promise<void>
}

/**
 * Starts a worker and a run in it. Resolves when the worker has said `hello`. A config that the worker refuses shows
 * as the events `error` and `end`.
 *
 * @param config an object with snake_case keys, or the path of a TOML or JSON file
 */
export function launch(config: LaunchConfig | string, options: LaunchOptions): Promise<LaunchedRun>

/** Follows the run in a folder from its first event on, whoever started it, and whether or not it is over. */
export function attach(runDir: string, options?: AttachOptions): Promise<Run>

/** Has a worker check a config and its data, and estimate memory and time, without training. */
export function validate(config: Config | string, options: WorkerOptions & CallOptions): Promise<ValidateResult>

/** A metric over a run: `values[i]` belongs to update `steps[i]`; null where it was not finite. */
export interface Series {
  steps: number[]
  values: (number | null)[]
}

/** The names that `history` takes: the numbers of `step` events, and those of evaluations. */
export const METRICS: readonly MetricName[]

export type MetricName =
  | 'loss'
  | 'total_tokens'
  | 'training_time_ms'
  | 'updates'
  | 'total_steps'
  | 'epoch'
  | 'epoch_progress'
  | 'learning_rate'
  | 'grad_norm'
  | 'token_accuracy'
  | 'perplexity'
  | 'trained_tokens'
  | 'tokens_per_second'
  | 'padding_fraction'
  | 'micro_batches'
  | 'data_time_ms'
  | 'active_bytes'
  | 'cache_bytes'
  | 'peak_bytes'
  | 'eta_ms'
  | 'skipped'
  | 'ts'
  | 'valid_loss'
  | 'valid_perplexity'
  | 'valid_token_accuracy'
  | 'tokens'
  | 'ms'

/**
 * Reads metrics of a run, living or over, from its log, without the steps of abandoned timelines.
 *
 * @param options.metrics default ['loss']
 * @param options.maxPoints puts neighbouring steps together: sums are summed, means weighted by their tokens
 */
export function history<M extends MetricName = 'loss'>(
  runDir: string,
  options?: { metrics?: readonly M[]; maxPoints?: number },
): Promise<Record<M, Series>>

export interface CheckpointInfo {
  path: string
  step: number
  kind: 'periodic' | 'manual' | 'final' | 'emergency' | 'best'
  /** size of its files */
  bytes: number
}

/**
 * Finds a run's newest whole checkpoint, or null.
 *
 * @param options.verify also compare the hashes of its files; default true
 */
export function latestCheckpoint(runDir: string, options?: { verify?: boolean }): Promise<CheckpointInfo | null>

/** The root of everything that this client throws on its own account. */
export class ClientError extends Error {}

/** The worker's program cannot be started; the message says which, and why. */
export class WorkerNotFound extends ClientError {
  readonly command: string[] | null
}

/** The worker speaks another major version of the protocol. */
export class ProtocolMismatch extends ClientError {
  readonly theirs: number
  readonly ours: number
}

/** The worker ended without its `end` line. */
export class WorkerDied extends ClientError {
  /** null if a signal ended it, or if the process was not ours */
  readonly exitCode: number | null
  readonly signal: NodeJS.Signals | null
  /** the end of what it wrote on stderr */
  readonly stderr: string
  readonly lastCheckpoint: string | null
  /** how often supervision had started it again */
  readonly restarts: number
}

/** The worker refused a command, or failed at it; the run goes on. */
export class CommandFailed extends ClientError {
  readonly cmd: string
  readonly code: ErrorCode
  readonly details: Record<string, unknown> | null
  readonly hint: string | null
}

/** Nothing came in time; the message says what the worker was doing. */
export class CommandTimeout extends ClientError {
  /** the command; `hello` for a new worker's first line, `wait` for the run's end */
  readonly cmd: string
  /** in ms */
  readonly timeout: number
}

/** A command came after the run's end. */
export class RunEnded extends ClientError {
  readonly cmd: string
  readonly outcome: Result['outcome']
}

/** The run failed: thrown by `Result.check()`, and given to listeners of `error`. */
export class RunFailed extends ClientError {
  readonly code: ErrorCode
  readonly details: Record<string, unknown> | null
  readonly hint: string | null
}

/** Nobody can be steered: the run's worker listens on no socket, or another controller holds it. */
export class NoWorker extends ClientError {}
