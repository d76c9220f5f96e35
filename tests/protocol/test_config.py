"""The config: every key checked, every fault named with its key, its value, and what is allowed."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwire_protocol.config import FIELDS, SETTABLE, Config
from trainwire_protocol.config_load import build_config, check, check_settings, parse_assignment, read_config_file
from trainwire_protocol.errors import BY_CODE, BadParams, ConfigInvalid, UnknownParam, from_code
from trainwire_protocol.foreign_keys import FOREIGN_KEYS

KEYS = st.sampled_from([*FIELDS, *FOREIGN_KEYS, "x"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=3)
LEAST = {"model": "m", "data": "d.jsonl"}


def issues_of(**values: Any) -> list[Any]:
    return check({**LEAST, **values})[1]


def issue_of(**values: Any) -> Any:
    issues = issues_of(**values)
    assert len(issues) == 1
    return issues[0]


def test_a_model_and_data_are_enough() -> None:
    assert issues_of() == []
    config = build_config(LEAST, Path("/base"))
    assert (config.batch_size, config.seed, config.learning_rate) == (8, 42, 1e-4)


@pytest.mark.parametrize("missing", ["model", "data"])
def test_a_missing_key_is_named_with_what_it_must_be(missing: str) -> None:
    issues = check({key: value for key, value in LEAST.items() if key != missing})[1]
    assert [(i.path, i.code) for i in issues] == [(missing, "missing_key")]
    assert "it must be" in issues[0].message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("batchsize", "batch_size"),
        ("learning_rat", "learning_rate"),
        ("lora_rnk", "lora_rank"),
        ("max_step", "max_steps"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_key(typo: str, meant: str) -> None:
    issue = issue_of(**{typo: 4})
    assert (issue.path, issue.code) == (typo, "unknown_key")
    assert f"Did you mean {meant}?" in issue.message


def test_a_key_that_resembles_none_is_answered_with_where_the_keys_are_listed() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        build_config({**LEAST, "zzzzzz": 1}, Path("/"), run_name="run")
    assert f"{refused.value.message} {refused.value.hint}".count("trainwire config") == 1


@pytest.mark.parametrize("key", sorted(FOREIGN_KEYS))
def test_a_key_of_another_trainer_is_answered_with_what_to_write_here(key: str) -> None:
    issue = issue_of(**{key: 1})
    assert (issue.path, issue.code) == (key, "foreign_key")
    assert issue.message.endswith(FOREIGN_KEYS[key])
    assert issue.message.endswith(".")


def test_no_key_of_another_trainer_is_a_key_of_trainwire() -> None:
    assert not set(FOREIGN_KEYS) & set(FIELDS)


def test_what_the_sentences_name_exists() -> None:
    known = set(FIELDS) | {"trainwire"}
    for key, sentence in FOREIGN_KEYS.items():
        if sentence.startswith("write "):
            assert sentence.removeprefix("write ").split()[0].rstrip(",.;)") in known, key


RANGES = [
    ("batch_size", 0),
    ("batch_size", 1.5),
    ("batch_size", "8"),
    ("batch_size", True),
    ("seed", -1),
    ("seed", 2**53),
    ("max_seq_length", 1),
    ("lora_rank", 0),
    ("lora_dropout", 1.0),
    ("lora_dropout", -0.1),
    ("learning_rate", 0),
    ("learning_rate", -1e-4),
    ("learning_rate", math.inf),
    ("learning_rate", math.nan),
    ("max_grad_norm", math.inf),
    ("max_grad_value", 0),
    ("label_smoothing", 1),
    ("method", "qlora"),
    ("optimizer", "adam"),
    ("schedule", "step"),
    ("train_on", "user"),
    ("on_overlong", "cut"),
    ("shuffle", 1),
    ("shuffle", "yes"),
    ("model", ""),
    ("model", 3),
    ("data", {}),
    ("prompts", 3),
    ("log_every", 0),
    ("max_consecutive_non_finite", 0),
    ("optimizer_args", {"eps": math.nan}),
    ("chat_template_args", []),
    ("micro_batch_tokens", 15),
]


@pytest.mark.parametrize(("key", "value"), RANGES, ids=[f"{k}={v}" for k, v in RANGES])
def test_a_value_outside_its_range_names_key_value_and_what_is_allowed(key: str, value: Any) -> None:
    issue = issue_of(**{key: value})
    assert (issue.path, issue.code) == (key, "invalid_value")
    assert f"{key} = {value!r} is not allowed: " in issue.message
    assert "must be" in issue.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 1e6),
        ("learning_rate", 1),
        ("max_grad_norm", 1e12),
        ("max_grad_norm", 0),
        ("seed", 0),
        ("data", ["a", "b"]),
        ("prompts", ["a"]),
        ("warmup_steps", 0),
        ("lora_keys", ["self_attn.q_proj"]),
    ],
)
def test_a_value_inside_its_range_is_taken(key: str, value: Any) -> None:
    assert issues_of(**{key: value}) == []


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        build_config({"batch_size": 0, "iters": 5, "batchsize": 1}, Path("/"))
    found = {(issue["path"], issue["code"]) for issue in caught.value.details["issues"]}
    assert found == {
        ("batch_size", "invalid_value"),
        ("iters", "foreign_key"),
        ("batchsize", "unknown_key"),
        ("model", "missing_key"),
        ("data", "missing_key"),
    }
    assert caught.value.message.endswith(". And 4 more.")


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"method": "full", "lora_rank": 4}, "lora_rank"),
        ({"learning_rate": 1e-5, "min_learning_rate": 1e-4}, "min_learning_rate"),
        ({"min_learning_rate": 2e-4}, "min_learning_rate"),
        ({"method": "full", "min_learning_rate": 2e-5}, "min_learning_rate"),
        ({"early_stopping_patience": 2, "eval_every": 0}, "early_stopping_patience"),
        ({"resume_override": ["nothing"]}, "nothing"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(values: dict[str, Any], path: str) -> None:
    assert issue_of(**values).path == path


def test_values_that_fit_each_other_are_taken() -> None:
    assert issues_of(min_learning_rate=1e-4) == []
    assert issues_of(early_stopping_patience=2) == []


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**64, 10**40], ids=str)
def test_an_integer_that_no_line_can_tell_is_refused_wherever_it_stands(value: int) -> None:
    for key, where in (("seed", value), ("chat_template_args", {"a": [value]}), ("optimizer_args", {"a": value})):
        assert issue_of(**{key: where}).path == key


def test_a_range_is_told_with_both_its_ends() -> None:
    assert issue_of(batch_size=0).message.endswith("it must be an integer ≥ 1 and ≤ 1048576.")
    assert issue_of(seed=-1).message.endswith("it must be an integer ≥ 0 and ≤ 9007199254740991.")
    assert issue_of(learning_rate=0).message.endswith("it must be a finite number > 0.")


def test_a_revision_without_a_hub_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigInvalid, match="revision = 'abc' has no effect"):
        build_config({**LEAST, "model": "model", "revision": "abc"}, tmp_path)
    assert build_config({**LEAST, "model": "org/name", "revision": "abc"}, tmp_path).revision == "abc"


@pytest.mark.parametrize(
    ("written", "told"),
    [("No room", "No room."), ("No room.", "No room."), ("It ended. said it..", "It ended. said it."), ("a …", "a …")],
)
def test_a_message_ends_with_one_full_stop(written: str, told: str) -> None:
    error = BadParams(written)
    assert (error.message, str(error)) == (told, told)


@pytest.mark.parametrize("code", [code for code, kind in BY_CODE.items() if kind.exit_code is not None])
def test_whatever_ends_a_run_says_what_to_do(code: str) -> None:
    error = from_code(code, "It failed")
    assert error.hint or code in ("busy", "unsupported"), "these two are also answers to commands"
    assert from_code(code, "It failed", hint="Do this.").hint == "Do this."


def test_the_default_learning_rate_depends_on_the_method() -> None:
    assert build_config({**LEAST, "method": "dora"}, Path("/")).learning_rate == 1e-4
    assert build_config({**LEAST, "method": "full"}, Path("/")).learning_rate == 1e-5


def test_relative_paths_start_at_the_base(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    values = {
        "model": "model",
        "data": ["a.jsonl", "/b.jsonl"],
        "valid_data": "v/../w.jsonl",
        "cache_dir": "cache",
        "prompts": "p.txt",
        "resume": "runs/x/checkpoint-000001",
        "start_from": "old",
    }
    config = build_config(values, tmp_path, run_name="mine")
    assert config.model == str(tmp_path / "model")
    assert config.data == [str(tmp_path / "a.jsonl"), "/b.jsonl"]
    assert config.valid_data == str(tmp_path / "w.jsonl")
    assert config.run_dir == str(tmp_path / "runs" / "mine")
    assert config.prompts == str(tmp_path / "p.txt")
    assert config.resume == str(tmp_path / "runs/x/checkpoint-000001")
    assert (config.cache_dir, config.start_from) == (str(tmp_path / "cache"), str(tmp_path / "old"))


def test_a_hub_id_stays_as_it_is(tmp_path: Path) -> None:
    assert build_config({**LEAST, "model": "owner/name-4bit"}, tmp_path).model == "owner/name-4bit"


def test_a_template_in_the_config_is_no_path(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert build_config({**LEAST, "chat_template": template}, tmp_path).chat_template == template
    assert build_config({**LEAST, "chat_template": "t.jinja"}, tmp_path).chat_template == str(tmp_path / "t.jinja")


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("batch_size=4", "batch_size", 4),
        ("learning_rate = 1e-5", "learning_rate", 1e-5),
        ("model=some/folder", "model", "some/folder"),
        ("run_name=007", "run_name", "007"),
        ("shuffle=off", "shuffle", False),
        ("shuffle=Yes", "shuffle", True),
        ('data=["a", "b"]', "data", ["a", "b"]),
        ("chat_template_args={enable_thinking = false}", "chat_template_args", {"enable_thinking": False}),
        ("prompts=", "prompts", ""),
        ("data=a=b.jsonl", "data", "a=b.jsonl"),
    ],
)
def test_an_assignment_is_parsed_as_toml_else_as_text(word: str, key: str, value: Any) -> None:
    assert parse_assignment(word) == (key, value)


@pytest.mark.parametrize("word", ["batch_size", "=4", "--lr=4", "a b=1"])
def test_a_word_that_is_no_assignment_is_refused(word: str) -> None:
    with pytest.raises(ConfigInvalid, match="key=value"):
        parse_assignment(word)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"model = folder", "not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a" * ((1 << 20) + 1), "larger than 1 MiB"),
    ],
)
def test_a_broken_config_file_is_named(raw: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigInvalid, match=match) as caught:
        read_config_file(path)
    assert str(path) in caught.value.message


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read") as caught:
        read_config_file(tmp_path / "none.toml")
    assert caught.value.hint


def test_a_config_file_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbfmodel = "m"\r\nbatch_size = 4\r\n')
    assert read_config_file(path) == {"model": "m", "batch_size": 4}


def test_settings_that_cannot_change_are_told_from_keys_that_do_not_exist() -> None:
    with pytest.raises(UnknownParam, match="cannot be changed while a run trains"):
        check_settings({"batch_size": 4})
    with pytest.raises(UnknownParam, match="is no key of the config"):
        check_settings({"nothing": 4})


def test_one_bad_setting_refuses_all() -> None:
    with pytest.raises(BadParams, match="log_every"):
        check_settings({"learning_rate": 1e-5, "log_every": 0})


@pytest.mark.parametrize("key", SETTABLE)
def test_null_is_no_setting(key: str) -> None:
    with pytest.raises(BadParams):
        check_settings({key: None})


@given(values=st.dictionaries(KEYS, VALUES, max_size=6))
@settings(derandomize=True, deadline=None, max_examples=400)
def test_any_values_make_a_config_or_issues_that_name_their_keys(values: dict[str, Any]) -> None:
    converted, issues = check({**LEAST, **values})
    if not issues:
        assert msgspec.convert(msgspec.to_builtins(Config(**converted)), Config) == Config(**converted)
    assert all(issue.message.endswith((".", "?")) and issue.path for issue in issues)
