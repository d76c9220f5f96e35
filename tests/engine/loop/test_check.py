"""`validate`: the config and the data are looked at, nothing is trained and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted import Result, ScriptedChannel

from trainwire_engine import run
from trainwire_protocol import channel as ch
from trainwire_protocol import events as ev
from trainwire_protocol.config_load import build_config


def check(config: dict[str, Any], base: Path, **more: Any) -> Result:
    order = ch.Check(order=1, config=msgspec.to_builtins(build_config(config, base)), **more)
    channel: Any = ScriptedChannel(order)
    return Result(channel.reports, run.serve(channel))


def test_a_config_that_can_be_run_gives_its_resolved_values_and_its_data(config: dict[str, Any], base: Path) -> None:
    result = check(config, base)
    found = result.answer(1).result
    assert found is not None
    assert (found["valid"], found["total_steps"], result.status) == (True, 6, 0)
    assert found["config"]["micro_batch_tokens"] > 0
    assert found["config"]["train_on"] == "assistant"
    assert [split["split"] for split in found["data"]] == ["train"]
    assert [issue["code"] for issue in found["issues"]] == ["no_validation"]
    assert not result.of(ev.Init)
    assert not Path(config["run_dir"]).exists()


@pytest.mark.parametrize(
    ("change", "code"), [({"data": "missing.jsonl"}, "dataset_invalid"), ({"prompts": "missing.txt"}, "config_invalid")]
)
def test_a_config_that_cannot_be_run_is_answered_with_the_error_of_a_run(
    config: dict[str, Any], base: Path, change: dict[str, Any], code: str
) -> None:
    result = check({**config, **change}, base)
    assert (result.answer(1).code, result.status) == (code, 0)
    assert not result.of(ch.Failed)


def test_a_blas_that_is_none_is_told(config: dict[str, Any], base: Path) -> None:
    assert check(config, base, blas="/nowhere/libblas.so").answer(1).code == "unsupported"


def test_a_packed_run_is_estimated(config: dict[str, Any], base: Path) -> None:
    apart, packed = (check({**config, "packing": packing}, base).answer(1).result for packing in (False, True))
    assert apart is not None
    assert packed is not None
    assert packed["data"][0]["padding_fraction"] != apart["data"][0]["padding_fraction"]
    assert packed["estimate"]["peak_bytes"] == pytest.approx(apart["estimate"]["peak_bytes"], rel=0.5)
