// Generated from the protocol's types by `make generate`; changes here are lost.

export type ProtocolVersion = 1;

/** What any printed line may carry. */
export interface LineBase {
  /** fields whose text was cut to keep the line short */
  truncated?: string[];
  /** fields whose list was cut, with the number left out */
  more?: { [key: string]: number };
  /** fields that are null for want of a finite number */
  non_finite?: { [key: string]: "-inf" | "inf" | "nan" };
}

/** What any event may carry. */
export interface EventBase extends LineBase {
  /** place in the log */
  seq?: number;
  /** milliseconds since the epoch */
  ts: number;
  /** id of the command that caused it */
  cause?: number | string;
  /** true on a line that `replay` sends again */
  replay?: boolean;
}

/** A worker process took up the run; steps above `resumed_from_step` of earlier attempts are void. */
export interface AttemptEvent extends EventBase {
  type: "attempt";
  run_id: string;
  attempt: number;
  protocol: number;
  /** version of the worker */
  worker: string;
  pid: number;
  /** path of the checkpoint; absent: from the beginning */
  resumed_from?: string;
  resumed_from_step?: number;
}

/** The value of a key before and after. */
export interface Change {
  from: unknown;
  to: unknown;
}

/** One message of a conversation. */
export interface ChatMessage {
  role: string;
  content: string;
}

/** Write a checkpoint now. */
export interface CheckpointCommand {
  cmd: "checkpoint";
  /** of its folder, none that the run itself uses; else that of its step */
  name?: string | null;
  id?: number | string | null;
}

/** A checkpoint is whole on disk, under its final name. */
export interface CheckpointEvent extends EventBase {
  type: "checkpoint";
  /** its folder */
  path: string;
  step: number;
  /** of its files */
  bytes: number;
  /** `emergency`: written before an error ends the run */
  kind: "best" | "emergency" | "final" | "manual" | "periodic";
}

/** The checkpoint of this step; `changed` is false if it was written before. */
export interface CheckpointResult {
  path: string;
  step: number;
  /** of its files */
  bytes: number;
  changed: boolean;
}

/** An order that changes the run was accepted. */
export interface CommandEvent extends EventBase {
  type: "command";
  cmd: string;
  /** as they were taken, without the config */
  parameters: { [key: string]: unknown };
  source: "detach" | "signal" | "socket" | "stdin" | "word";
}

/** The run reached its end by itself. */
export interface CompleteEvent extends EventBase {
  type: "complete";
  /** updates of the run */
  total_steps: number;
  /** over all attempts */
  total_time_secs: number;
  reason: "early_stopping" | "finished";
}

/** Everything a run is told; null stands for a default that is computed. */
export interface Config {
  /** folder of the base model (mlx-lm or transformers layout) or its Hub id */
  model: string;
  /** branch, tag or commit of a Hub model */
  revision?: string | null;
  /** folder of the log, the checkpoints and the lock; default: runs/<run_name> */
  run_dir?: string | null;
  /** name of the run, for people; default: the config file's name */
  run_name?: string | null;
  /** auto: go on where an unfinished run stopped, start otherwise; never: start afresh; latest; or the folder of a checkpoint; default "auto" */
  resume?: string;
  /** keys whose change on a resume is accepted; default [] */
  resume_override?: string[];
  /** adapter or weights that a new run begins from */
  start_from?: string | null;
  /** training data: a file, a list of files, a folder with train and valid files, or a Hub id */
  data: string | string[];
  /** validation data; without it the `valid` file of a data folder, else evaluation is off */
  valid_data?: string | string[] | null;
  /** which turns are trained: every assistant turn, the last one, or all tokens; default: assistant for chat rows, all for text rows */
  train_on?: "all" | "assistant" | "last" | null;
  /** a chat template, or the file that holds one, instead of the tokenizer's */
  chat_template?: string | null;
  /** arguments of the template, for instance {enable_thinking = false}; default {} */
  chat_template_args?: { [key: string]: unknown };
  /** tokens of a whole row at most; from 2 to 16777216; default 2048 */
  max_seq_length?: number;
  /** what is done with a longer row: truncate keeps its start, truncate_left its end; default "drop" */
  on_overlong?: "drop" | "error" | "truncate" | "truncate_left";
  /** use the first that many rows; 0 uses all; from 0; default 0 */
  max_train_samples?: number;
  /** a new order of the rows in each epoch; default true */
  shuffle?: boolean;
  /** seed of the order, the adapters' start and dropout; 0 is a seed; from 0; default 42 */
  seed?: number;
  /** what is trained: adapters (lora, dora) or all weights; default "lora" */
  method?: "dora" | "full" | "lora";
  /** rank of the adapters; from 1 to 4096; default 8 */
  lora_rank?: number;
  /** adapters are scaled by lora_alpha / lora_rank; above 0; default 16.0 */
  lora_alpha?: number;
  /** dropout on the adapters' input; from 0 below 1; default 0.0 */
  lora_dropout?: number;
  /** adapters on the last that many blocks only; from 1; default: all blocks */
  lora_layers?: number | null;
  /** names of the layers that get adapters, as in self_attn.q_proj; default: all linear layers */
  lora_keys?: string[] | null;
  /** examples per update; from 1 to 1048576; default 8 */
  batch_size?: number;
  /** padded tokens of one forward and backward pass; from 16 to 16777216; default: a power of two from the model and the device's total memory */
  micro_batch_tokens?: number | null;
  /** put rows of similar length into one update; default false */
  group_by_length?: boolean;
  /** put several examples into one row, isolated from each other; default false */
  packing?: boolean;
  /** passes over the data; from 1 to 1048576; default 1 */
  num_epochs?: number;
  /** updates of the run; above 0 it replaces num_epochs; from 0; default 0 */
  max_steps?: number;
  /** the optimizer; default "adamw" */
  optimizer?: "adafactor" | "adamw" | "lion" | "muon" | "sgd";
  /** arguments of the optimizer, for instance {betas = [0.9, 0.95]}; default {} */
  optimizer_args?: { [key: string]: unknown };
  /** the schedule's peak; above 0; default: 1e-4 for lora and dora, 1e-5 for full */
  learning_rate?: number | null;
  /** the learning rate's way down after the warm-up; default "cosine" */
  schedule?: "constant" | "cosine" | "linear";
  /** updates from zero to the peak; from 0; default: 3 % of the run */
  warmup_steps?: number | null;
  /** where linear and cosine end; from 0; default 0.0 */
  min_learning_rate?: number;
  /** decoupled; none on norms and biases; from 0; default 0.0 */
  weight_decay?: number;
  /** gradients are scaled down to this norm; 0 does not clip; from 0; default 1.0 */
  max_grad_norm?: number;
  /** each gradient entry is clipped to this size; above 0 */
  max_grad_value?: number | null;
  /** share of the target given to all tokens alike; from 0 below 1; default 0.0 */
  label_smoothing?: number;
  /** trained weights and optimizer state; model saves memory and loses small updates; default "float32" */
  trainable_dtype?: "float32" | "model";
  /** compute activations again in the backward pass: less memory, more time; default false */
  gradient_checkpointing?: boolean;
  /** the run ends after so many skipped updates in a row; from 1; default 5 */
  max_consecutive_non_finite?: number;
  /** the run ends after so many skipped updates in all; from 1; default 100 */
  max_non_finite?: number;
  /** updates in one step event; from 1; default 1 */
  log_every?: number;
  /** updates between checkpoints; 0 turns them off; from 0; default 200 */
  save_every?: number;
  /** updates between evaluations; 0 turns them off; from 0; default 200 */
  eval_every?: number;
  /** updates between generations from `prompts`; 0 turns them off; from 0; default 0 */
  generate_every?: number;
  /** periodic checkpoints kept; 0 keeps all; from 0; default 3 */
  max_checkpoints?: number;
  /** keep the checkpoint of the lowest validation loss; default true */
  keep_best?: boolean;
  /** end after so many evaluations without a better one; 0 never does; from 0; default 0 */
  early_stopping_patience?: number;
  /** batches of batch_size rows in an evaluation; 0 takes all; from 0; default 0 */
  eval_batches?: number;
  /** evaluate before the first update; default false */
  eval_at_start?: boolean;
  /** prompts of the generations: a list, or a file: one a line, or .jsonl whose lines have `prompt` or `messages` and, as the reference, `completion`; default [] */
  prompts?: string | string[];
  /** tokens of a generation at most; from 1 to 1048576; default 128 */
  generate_max_tokens?: number;
  /** generations shown: all, or the two whose reference has the lowest and the highest loss; default "all" */
  sample_display?: "all" | "best_worst";
  /** folder of tokenized data; default: the user's cache folder */
  cache_dir?: string | null;
}

/** Keys have new values from an update on. */
export interface ConfigChangedEvent extends EventBase {
  type: "config_changed";
  changes: { [key: string]: Change };
  /** first update that uses them */
  effective_step: number;
}

/** What was read, used and left out of a split. */
export interface DataEvent extends EventBase {
  type: "data";
  split: "train" | "valid";
  rows_read: number;
  rows_used: number;
  rows_dropped: { [key: string]: Dropped };
  tokens: number;
  trained_tokens: number;
  /** rows by length in tokens; a key is the upper bound of its bin */
  length_histogram: { [key: string]: number };
  /** expected share of computed positions without a token */
  padding_fraction: number;
}

/** What was read, used and left out of a split, as the `data` event tells it. */
export interface DataReport {
  split: "train" | "valid";
  rows_read: number;
  rows_used: number;
  rows_dropped: { [key: string]: Dropped };
  tokens: number;
  trained_tokens: number;
  length_histogram: { [key: string]: number };
  padding_fraction: number;
}

/** Let the run go on when this front end leaves, whatever `--on-eof` and `--on-detach` say. */
export interface DetachCommand {
  cmd: "detach";
  id?: number | string | null;
}

/** The run outlives its front end; `changed` is false if it would have done so already. */
export interface DetachResult {
  changed: boolean;
}

/** Rows left out for one reason, with the places of the first of them. */
export interface Dropped {
  count: number;
  /** file and line of the first rows */
  lines: string[];
}

/** The worker's last line, also without a run. */
export interface EndEvent extends EventBase {
  type: "end";
  outcome: "completed" | "failed" | "interrupted" | "stopped";
  /** for people; after an error its code */
  reason: string;
  step: number;
  /** path of the newest whole checkpoint that a resume can use */
  checkpoint: string | null;
  /** the run is not complete, and its folder can be resumed */
  resumable: boolean;
  /** arguments of `trainwire` that go on with the run */
  resume_args: string[];
  exit_code: number;
}

/** A pass over the data, or the part of it before the run's end, is over. */
export interface EpochEndEvent extends EventBase {
  type: "epoch_end";
  epoch: number;
  /** weighted by tokens, over the whole epoch */
  avg_loss: number | null;
  epoch_time_secs: number;
  updates: number;
}

/** A pass over the data begins. */
export interface EpochStartEvent extends EventBase {
  type: "epoch_start";
  epoch: number;
  total_epochs: number;
  /** updates in the epoch */
  num_batches: number;
}

/** Why a command was refused or failed. */
export interface ErrorBody {
  code: ErrorCode;
  message: string;
  /** by code */
  details?: { [key: string]: unknown };
  /** what to do about it */
  hint?: string;
}

/** Why the run cannot go on; comes before `end`. */
export interface ErrorEvent extends EventBase {
  type: "error";
  code: ErrorCode;
  message: string;
  /** by code */
  details?: { [key: string]: unknown };
  /** what to do about it */
  hint?: string;
}

/** What a run would take, from trials of its largest micro-batches, and of its largest update where harmless. */
export interface Estimate {
  /** highest memory in use, as `step` events report it */
  peak_bytes: number;
  /** memory that the run can have now */
  available_bytes: number;
  /** a mean update after the first one */
  update_seconds: number;
  /** all updates and evaluations */
  total_seconds: number;
  /** the largest whose own grouping of the rows fits; null if not even the longest row does */
  largest_micro_batch_tokens: number | null;
}

/** Evaluate now. */
export interface EvalCommand {
  cmd: "eval";
  /** batches of `batch_size` rows; else the config's `eval_batches` */
  max_batches?: number | null;
  id?: number | string | null;
}

/** The validation loss after an update. */
export interface EvalEndEvent extends EventBase {
  type: "eval_end";
  /** updates done */
  step: number;
  valid_loss: number | null;
  perplexity: number | null;
  token_accuracy: number | null;
  /** trained tokens that were evaluated */
  tokens: number;
  ms: number;
  /** the lowest so far, of the evaluations that the run makes by itself */
  best: boolean;
}

/** The validation loss now. */
export interface EvalResult {
  valid_loss: number | null;
  /** trained tokens that were evaluated */
  tokens: number;
  ms: number;
}

/** Lines that a slow reader did not get; the log has them. */
export interface Gap extends LineBase {
  type: "gap";
  /** first event that is missing */
  from_seq: number;
  /** last event that is missing */
  to_seq: number;
  /** lines left out, by type */
  counts: { [key: string]: number };
  reason: "slow_reader";
}

/** Let the model answer; `adapter` false asks the base model. */
export interface GenerateCommand {
  cmd: "generate";
  /** a conversation; this or `prompt` is needed, not both */
  messages?: ChatMessage[] | null;
  /** a user's turn where the model has a chat template, else the text to go on with */
  prompt?: string | null;
  /** default 128 */
  max_tokens?: number;
  /** 0: always the likeliest token; default 0.0 */
  temperature?: number;
  /** the same seed draws the same tokens; default 0 */
  seed?: number;
  /** false: the base model, without what was trained; default true */
  adapter?: boolean;
  id?: number | string | null;
}

/** What the model answered. */
export interface GenerateResult {
  text: string;
  tokens: number;
  ms: number;
}

/** What the model answers to a prompt of the config. */
export interface GenerationEvent extends EventBase {
  type: "generation";
  /** number of the prompt, from 0 */
  index: number;
  prompt: string;
  completion: string;
  /** of the completion */
  tokens: number;
  step: number;
  /** of the given reference, in nats a token */
  loss?: number | null;
}

/** A sign of life while nothing else is printed. */
export interface Heartbeat extends LineBase {
  type: "heartbeat";
  ts: number;
  phase: "ended" | "idle" | "lingering" | "loading" | "paused" | "pausing" | "preparing" | "running" | "stopping";
  activity: "checkpoint" | "compile" | "download" | "eval" | "generate" | "load" | "none" | "tokenize" | "train";
  step: number;
  /** of the newest event; 0 without one */
  last_seq: number;
  /** since the worker began */
  up_ms: number;
  /** since the engine's last sign of life */
  loop_age_ms: number;
  queue: Queue;
}

/** The first line of every worker. */
export interface Hello extends LineBase {
  type: "hello";
  /** major version */
  protocol: number;
  /** minor version */
  minor: number;
  worker: WorkerInfo;
  pid: number;
  /** `native` */
  dialect: string;
  features: string[];
  limits: Limits;
}

/** The run is ready to train: what is trained, on what, and for how long. */
export interface InitEvent extends EventBase {
  type: "init";
  /** the folder, or the Hub id */
  model: string;
  /** the resolved config, never cut */
  config: ResolvedConfig;
  training_type: "sft";
  /** the same for every attempt */
  run_id: string;
  run_name: string;
  run_dir: string;
  /** updates of the whole run */
  total_steps: number;
  trainable_parameters: number;
  total_parameters: number;
  /** rows of training data in use */
  examples: number;
  /** updates done before this attempt */
  start_step: number;
  /** what computes, for people */
  device: string;
  /** whether the output layer is computed in chunks or whole */
  head: "chunked" | "full";
  /** library that computes matrix products on the CPU */
  blas?: string;
}

/** One thing that is wrong with a config: `path` names the key, `code` the kind, `message` is a sentence. */
export interface Issue {
  path: string;
  code: string;
  message: string;
}

/** What the worker takes and gives: bytes of a line, open commands, bytes of unread responses and of backlog. */
export interface Limits {
  max_line_in: number;
  max_line_out: number;
  max_open_commands: number;
  max_response_backlog: number;
  max_backlog: number;
}

/** Something that a person should know; the run goes on. */
export interface LogEvent extends EventBase {
  type: "log";
  level: "debug" | "error" | "info" | "warn";
  message: string;
  /** for programs: a code of the table of log codes */
  code?: string;
  /** by code */
  details?: { [key: string]: unknown };
}

/** Memory of the device as the newest update reported it. */
export interface Memory {
  active_bytes: number;
  cache_bytes: number;
  peak_bytes: number;
  as_of_step: number;
}

/** Stand still at the next update boundary. */
export interface PauseCommand {
  cmd: "pause";
  id?: number | string | null;
}

/** Where the run stands still; `changed` is false if it already did. */
export interface PauseResult {
  step: number;
  changed: boolean;
}

/** Training stands still; written when it is true, not when it was asked for. */
export interface PausedEvent extends EventBase {
  type: "paused";
  step: number;
}

/** Ask for a sign of life. */
export interface PingCommand {
  cmd: "ping";
  id?: number | string | null;
}

/** The worker's time. */
export interface PingResult {
  /** milliseconds since the epoch */
  ts: number;
}

/** How far a longer piece of work is; always closed by a line with done = total. */
export interface ProgressEvent extends EventBase {
  type: "progress";
  /** the same on all lines of one piece of work */
  id: string;
  title: string;
  done: number;
  total: number;
  /** what is counted, in the plural */
  unit: string;
}

/** What waits to be read on stdout: lines and bytes. */
export interface Queue {
  lines: number;
  bytes: number;
}

/** Send lines of the log again. */
export interface ReplayCommand {
  cmd: "replay";
  /** default 1 */
  from_seq?: number;
  /** the last one; else the newest when the command came */
  to_seq?: number | null;
  /** only events of these types; an unknown one is refused, `not_found` */
  types?: string[] | null;
  id?: number | string | null;
}

/** How many lines were sent again. */
export interface ReplayResult {
  count: number;
}

/** The config of a run with every default filled in, paths absolute. */
export interface ResolvedConfig {
  /** folder of the base model (mlx-lm or transformers layout) or its Hub id */
  model: string;
  /** branch, tag or commit of a Hub model */
  revision: string | null;
  /** folder of the log, the checkpoints and the lock; default: runs/<run_name> */
  run_dir: string | null;
  /** name of the run, for people; default: the config file's name */
  run_name: string | null;
  /** auto: go on where an unfinished run stopped, start otherwise; never: start afresh; latest; or the folder of a checkpoint; default "auto" */
  resume: string;
  /** keys whose change on a resume is accepted; default [] */
  resume_override: string[];
  /** adapter or weights that a new run begins from */
  start_from: string | null;
  /** training data: a file, a list of files, a folder with train and valid files, or a Hub id */
  data: string | string[];
  /** validation data; without it the `valid` file of a data folder, else evaluation is off */
  valid_data: string | string[] | null;
  /** which turns are trained: every assistant turn, the last one, or all tokens; default: assistant for chat rows, all for text rows */
  train_on: "all" | "assistant" | "last" | null;
  /** a chat template, or the file that holds one, instead of the tokenizer's */
  chat_template: string | null;
  /** arguments of the template, for instance {enable_thinking = false}; default {} */
  chat_template_args: { [key: string]: unknown };
  /** tokens of a whole row at most; from 2 to 16777216; default 2048 */
  max_seq_length: number;
  /** what is done with a longer row: truncate keeps its start, truncate_left its end; default "drop" */
  on_overlong: "drop" | "error" | "truncate" | "truncate_left";
  /** use the first that many rows; 0 uses all; from 0; default 0 */
  max_train_samples: number;
  /** a new order of the rows in each epoch; default true */
  shuffle: boolean;
  /** seed of the order, the adapters' start and dropout; 0 is a seed; from 0; default 42 */
  seed: number;
  /** what is trained: adapters (lora, dora) or all weights; default "lora" */
  method: "dora" | "full" | "lora";
  /** rank of the adapters; from 1 to 4096; default 8 */
  lora_rank: number;
  /** adapters are scaled by lora_alpha / lora_rank; above 0; default 16.0 */
  lora_alpha: number;
  /** dropout on the adapters' input; from 0 below 1; default 0.0 */
  lora_dropout: number;
  /** adapters on the last that many blocks only; from 1; default: all blocks */
  lora_layers: number | null;
  /** names of the layers that get adapters, as in self_attn.q_proj; default: all linear layers */
  lora_keys: string[] | null;
  /** examples per update; from 1 to 1048576; default 8 */
  batch_size: number;
  /** padded tokens of one forward and backward pass; from 16 to 16777216; default: a power of two from the model and the device's total memory */
  micro_batch_tokens: number | null;
  /** put rows of similar length into one update; default false */
  group_by_length: boolean;
  /** put several examples into one row, isolated from each other; default false */
  packing: boolean;
  /** passes over the data; from 1 to 1048576; default 1 */
  num_epochs: number;
  /** updates of the run; above 0 it replaces num_epochs; from 0; default 0 */
  max_steps: number;
  /** the optimizer; default "adamw" */
  optimizer: "adafactor" | "adamw" | "lion" | "muon" | "sgd";
  /** arguments of the optimizer, for instance {betas = [0.9, 0.95]}; default {} */
  optimizer_args: { [key: string]: unknown };
  /** the schedule's peak; above 0; default: 1e-4 for lora and dora, 1e-5 for full */
  learning_rate: number | null;
  /** the learning rate's way down after the warm-up; default "cosine" */
  schedule: "constant" | "cosine" | "linear";
  /** updates from zero to the peak; from 0; default: 3 % of the run */
  warmup_steps: number | null;
  /** where linear and cosine end; from 0; default 0.0 */
  min_learning_rate: number;
  /** decoupled; none on norms and biases; from 0; default 0.0 */
  weight_decay: number;
  /** gradients are scaled down to this norm; 0 does not clip; from 0; default 1.0 */
  max_grad_norm: number;
  /** each gradient entry is clipped to this size; above 0 */
  max_grad_value: number | null;
  /** share of the target given to all tokens alike; from 0 below 1; default 0.0 */
  label_smoothing: number;
  /** trained weights and optimizer state; model saves memory and loses small updates; default "float32" */
  trainable_dtype: "float32" | "model";
  /** compute activations again in the backward pass: less memory, more time; default false */
  gradient_checkpointing: boolean;
  /** the run ends after so many skipped updates in a row; from 1; default 5 */
  max_consecutive_non_finite: number;
  /** the run ends after so many skipped updates in all; from 1; default 100 */
  max_non_finite: number;
  /** updates in one step event; from 1; default 1 */
  log_every: number;
  /** updates between checkpoints; 0 turns them off; from 0; default 200 */
  save_every: number;
  /** updates between evaluations; 0 turns them off; from 0; default 200 */
  eval_every: number;
  /** updates between generations from `prompts`; 0 turns them off; from 0; default 0 */
  generate_every: number;
  /** periodic checkpoints kept; 0 keeps all; from 0; default 3 */
  max_checkpoints: number;
  /** keep the checkpoint of the lowest validation loss; default true */
  keep_best: boolean;
  /** end after so many evaluations without a better one; 0 never does; from 0; default 0 */
  early_stopping_patience: number;
  /** batches of batch_size rows in an evaluation; 0 takes all; from 0; default 0 */
  eval_batches: number;
  /** evaluate before the first update; default false */
  eval_at_start: boolean;
  /** prompts of the generations: a list, or a file: one a line, or .jsonl whose lines have `prompt` or `messages` and, as the reference, `completion`; default [] */
  prompts: string | string[];
  /** tokens of a generation at most; from 1 to 1048576; default 128 */
  generate_max_tokens: number;
  /** generations shown: all, or the two whose reference has the lowest and the highest loss; default "all" */
  sample_display: "all" | "best_worst";
  /** folder of tokenized data; default: the user's cache folder */
  cache_dir: string | null;
}

/** Go on; with `steps`, for that many updates. */
export interface ResumeCommand {
  cmd: "resume";
  /** updates to run before the next pause */
  steps?: number | null;
  id?: number | string | null;
}

/** Where the run goes on; `changed` is false if it already ran. */
export interface ResumeResult {
  step: number;
  changed: boolean;
}

/** Training goes on. */
export interface ResumedEvent extends EventBase {
  type: "resumed";
  step: number;
}

/** A row as it is trained; of a long one the middle of its pieces is left out. */
export interface Sample {
  /** file and line */
  row: string;
  tokens: number;
  trained_tokens: number;
  segments: Segment[];
}

/** A piece of a row as the model reads it, all of it trained or none. */
export interface Segment {
  text: string;
  trained: boolean;
}

/** Change keys while the run trains: all or nothing. */
export interface SetCommand {
  cmd: "set";
  /** at least one key that can be changed, with its new value */
  values: SettableValues;
  id?: number | string | null;
}

/** The keys that have new values, those before, and the first update that uses the new ones. */
export interface SetResult {
  applied: { [key: string]: unknown };
  previous: { [key: string]: unknown };
  effective_step: number;
}

/** Keys that `set` changes while a run trains. */
export interface SettableValues {
  /** updates of the run; above 0 it replaces num_epochs; from 0 */
  max_steps?: number;
  /** the schedule's peak; above 0 */
  learning_rate?: number;
  /** gradients are scaled down to this norm; 0 does not clip; from 0 */
  max_grad_norm?: number;
  /** updates in one step event; from 1 */
  log_every?: number;
  /** updates between checkpoints; 0 turns them off; from 0 */
  save_every?: number;
  /** updates between evaluations; 0 turns them off; from 0 */
  eval_every?: number;
  /** updates between generations from `prompts`; 0 turns them off; from 0 */
  generate_every?: number;
  /** generations shown: all, or the two whose reference has the lowest and the highest loss */
  sample_display?: "all" | "best_worst";
}

/** Begin the run; answered when `init` is out. */
export interface StartCommand {
  cmd: "start";
  /** keys of the config; relative paths start at the worker's working folder */
  config: Config;
  /** `auto`, `never`, `latest` or a checkpoint's folder; wins over the config's `resume` */
  resume?: string | null;
  /** with `never`: remove the run that the folder holds, instead of refusing; default false */
  overwrite?: boolean;
  /** keep the model after completion, for `eval` and `generate`; default false */
  linger?: boolean;
  id?: number | string | null;
}

/** The run has begun. */
export interface StartResult {
  run_id: string;
  run_dir: string;
  total_steps: number;
  /** path of the checkpoint; null: from the beginning */
  resumed_from: string | null;
}

/** Give one snapshot of the run. */
export interface StatusCommand {
  cmd: "status";
  id?: number | string | null;
}

/** The run entered a phase. */
export interface StatusEvent extends EventBase {
  type: "status";
  phase: "ended" | "idle" | "lingering" | "loading" | "paused" | "pausing" | "preparing" | "running" | "stopping";
  /** for people; in `loading` the model's name */
  message: string;
  /** `compile` while an update takes long for a new shape */
  activity: "checkpoint" | "compile" | "download" | "eval" | "generate" | "load" | "none" | "tokenize" | "train";
  step: number;
}

/** One snapshot of the worker. */
export interface StatusResult {
  phase: "ended" | "idle" | "lingering" | "loading" | "paused" | "pausing" | "preparing" | "running" | "stopping";
  /** what the engine does */
  activity: "checkpoint" | "compile" | "download" | "eval" | "generate" | "load" | "none" | "tokenize" | "train";
  /** updates done, also those that no `step` event has told yet */
  step: number;
  total_steps: number;
  epoch: number;
  run_id: string | null;
  run_dir: string | null;
  /** 0 without a run */
  attempt: number;
  metrics: StepEvent | null;
  /** of the newest evaluation */
  valid_loss: number | null;
  /** path of the newest checkpoint that a resume can use */
  checkpoint: string | null;
  memory: Memory | null;
  /** of the newest event; 0 without one */
  last_seq: number;
  queue: Queue;
  /** commands that are not answered yet */
  open_ids: (number | string | null)[];
  /** since the engine's last sign of life */
  loop_age_ms: number;
  engine_pid: number | null;
}

/** One update, or several that `log_every` or a slow reader put together. */
export interface StepEvent extends EventBase {
  type: "step";
  /** updates done since the run began */
  step: number;
  /** mean over the trained tokens of these updates, in nats */
  loss: number | null;
  /** trained tokens of these updates */
  total_tokens: number;
  /** duration of these updates, data included */
  training_time_ms: number;
  updates: number;
  /** of the whole run, as it is set now */
  total_steps: number;
  epoch: number;
  epoch_progress: number;
  learning_rate: number;
  /** of the newest update, before clipping */
  grad_norm: number | null;
  /** share of trained tokens predicted first */
  token_accuracy: number | null;
  perplexity: number | null;
  /** since the run began */
  trained_tokens: number;
  /** trained tokens */
  tokens_per_second: number;
  /** computed positions that held no token */
  padding_fraction: number;
  /** forward and backward passes of these updates */
  micro_batches: number;
  /** of the duration, for reading and batching */
  data_time_ms: number;
  /** device memory in use */
  active_bytes: number;
  /** device memory kept for reuse */
  cache_bytes: number;
  /** highest device memory in use since the engine began */
  peak_bytes: number;
  eta_ms: number | null;
  /** updates left out since they were not finite */
  skipped: number;
}

/** End the run gracefully. */
export interface StopCommand {
  cmd: "stop";
  /** write a checkpoint first; default true */
  save?: boolean;
  id?: number | string | null;
}

/** How the run ended, and the checkpoint from which it can go on. */
export interface StopResult {
  outcome: "completed" | "failed" | "interrupted" | "stopped";
  step: number;
  checkpoint: string | null;
}

/** Check a config and its data, and estimate memory and time, without training. */
export interface ValidateCommand {
  cmd: "validate";
  /** keys of the config; relative paths start at the worker's working folder */
  config: Config;
  id?: number | string | null;
}

/** Whether the config, the model and the data can be trained; all but the issues only if they can. */
export interface ValidateResult {
  valid: boolean;
  /** what is wrong, and, of a valid config, what is noticed */
  issues: Issue[];
  /** the resolved config */
  config?: { [key: string]: unknown };
  data?: DataReport[];
  total_steps?: number;
  trainable_parameters?: number;
  total_parameters?: number;
  estimate?: Estimate;
  /** a few rows of the training data */
  samples?: Sample[];
}

/** Name and version of the worker. */
export interface WorkerInfo {
  name: string;
  version: string;
}

/** Known error codes; readers treat another one as `internal`. */
export type ErrorCode =
  | "bad_encoding"
  | "bad_line"
  | "bad_params"
  | "busy"
  | "config_invalid"
  | "dataset_invalid"
  | "disk_full"
  | "engine_died"
  | "engine_unavailable"
  | "forbidden_path"
  | "internal"
  | "io_error"
  | "line_too_long"
  | "log_unavailable"
  | "model_load_failed"
  | "non_finite"
  | "not_found"
  | "out_of_memory"
  | "resume_refused"
  | "shutting_down"
  | "unknown_command"
  | "unknown_param"
  | "unsupported"
  | "wrong_state"
  | (string & {});

/** Exit code of the worker by the error that ended the run. */
export interface ExitCodes {
  busy: 3;
  config_invalid: 3;
  dataset_invalid: 3;
  disk_full: 7;
  engine_died: 9;
  engine_unavailable: 4;
  forbidden_path: 3;
  internal: 1;
  io_error: 7;
  log_unavailable: 7;
  model_load_failed: 4;
  non_finite: 6;
  out_of_memory: 5;
  resume_refused: 3;
  unsupported: 3;
}

/** An event: a line with `ts`, and with `seq` if it is in the log. */
export type Event =
  | AttemptEvent
  | CheckpointEvent
  | CommandEvent
  | CompleteEvent
  | ConfigChangedEvent
  | DataEvent
  | EndEvent
  | EpochEndEvent
  | EpochStartEvent
  | ErrorEvent
  | EvalEndEvent
  | GenerationEvent
  | InitEvent
  | LogEvent
  | PausedEvent
  | ProgressEvent
  | ResumedEvent
  | StatusEvent
  | StepEvent;

/** Any line that a worker prints. */
export type Message =
  | AttemptEvent
  | CheckpointEvent
  | CommandEvent
  | CompleteEvent
  | ConfigChangedEvent
  | DataEvent
  | EndEvent
  | EpochEndEvent
  | EpochStartEvent
  | ErrorEvent
  | EvalEndEvent
  | GenerationEvent
  | InitEvent
  | LogEvent
  | PausedEvent
  | ProgressEvent
  | ResumedEvent
  | StatusEvent
  | StepEvent
  | Hello
  | Response
  | Heartbeat
  | Gap;

/** Any JSON line that a worker takes. */
export type Command =
  | ValidateCommand
  | StartCommand
  | PauseCommand
  | ResumeCommand
  | CheckpointCommand
  | StopCommand
  | SetCommand
  | EvalCommand
  | GenerateCommand
  | StatusCommand
  | ReplayCommand
  | DetachCommand
  | PingCommand;

/** Commands by name. */
export interface Commands {
  validate: ValidateCommand;
  start: StartCommand;
  pause: PauseCommand;
  resume: ResumeCommand;
  checkpoint: CheckpointCommand;
  stop: StopCommand;
  set: SetCommand;
  eval: EvalCommand;
  generate: GenerateCommand;
  status: StatusCommand;
  replay: ReplayCommand;
  detach: DetachCommand;
  ping: PingCommand;
}

/** Results by the command's name. */
export interface Results {
  validate: ValidateResult;
  start: StartResult;
  pause: PauseResult;
  resume: ResumeResult;
  checkpoint: CheckpointResult;
  stop: StopResult;
  set: SetResult;
  eval: EvalResult;
  generate: GenerateResult;
  status: StatusResult;
  replay: ReplayResult;
  detach: DetachResult;
  ping: PingResult;
}

export interface ResponseBase extends LineBase {
  type: "response";
  /** of the command; null if it had none, or none that could be read */
  id: number | string | null;
  /** the event that carried the effect */
  at_seq?: number;
}

export interface OkResponse<C extends keyof Results> extends ResponseBase {
  cmd: C;
  ok: true;
  result: Results[C];
}

export interface ErrorResponse extends ResponseBase {
  cmd: string | null;
  ok: false;
  error: ErrorBody;
}

/** The one answer to a command, when it has taken effect. */
export type Response =
  | { [C in keyof Results]: OkResponse<C> }[keyof Results]
  | ErrorResponse;
