"""Words on the wire that a reader may meet and need not know: features of a worker, codes of `log` events."""

FEATURES: dict[str, str] = {
    "control_socket": "listens on a Unix socket, whose path is in `run.lock`",
    "counted_resume": "takes `steps` with `resume`",
    "eval": "takes `eval`",
    "generate": "takes `generate`",
    "linger": "takes `linger` with `start`",
    "ranks": "trains with several processes, with `--ranks` and `--hostfile`",
    "replay": "takes `replay`",
    "restarts": "starts a dead engine again, with `--restarts`",
    "validate": "takes `validate`",
}
"""What `hello.features` names."""

LOG_CODES: dict[str, str] = {
    "non_finite": "an update was skipped; `details` has its step, its rows, and how many there were in a row",
    "loss_spike": "the loss of an update is far above those before it; `details` names its rows",
    "no_validation": "there is no validation data: evaluation is off",
    "no_cache": "tokenized rows cannot be kept on disk",
    "no_end_mark": "the tokenizer has no end mark: the model does not learn where a text ends",
    "no_end_of_turn": "the chat template trains no end of a turn",
    "no_end_of_tool_call": "the chat template trains no end of a tool call",
    "reasoning_not_in_template": "the chat template leaves the reasoning of turns out",
    "tools_not_in_template": "the chat template leaves the tools of rows out",
    "save_failed": "a checkpoint could not be written; `details` has its path and the error's code",
    "save_blocks": "there is no memory for a snapshot: training waits for saves",
    "low_disk": "few more checkpoints fit on the disk",
    "memory_pressure": "the machine is short of memory",
    "system_slept": "the machine slept",
    "resume_changed": "keys of the config have other values than when the checkpoint was written",
    "environment_changed": "versions, BLAS or ranks are others: the last bits of numbers may be, too",
    "checkpoint_broken": "a checkpoint is not whole and was passed over",
    "log_repaired": "a torn last line of the log was cut off",
    "log_degraded": "the log cannot be written; lines wait in memory, or did not fit there and are lost",
    "log_recovered": "the log is written again",
    "engine_died": "the engine died and is started again; `details` as in the error of this code",
    "uncontrolled": "the front end is gone and the run goes on",
    "tracker_failed": "a tracker has left",
    "not_recorded": "passes on a CUDA card are handed over anew each time, which is slower",
    "memory_given_back": "memory ran out beside recorded passes: theirs was given back for a second attempt",
    "profile": "where the time of updates goes (`--profile`)",
}
"""The codes of `log` events. A reader shows a code that it does not know like a `log` without one."""
