"""What two ranks agree on, without processes and without a backend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import RandomRows

from trainwire_engine.batches import share
from trainwire_engine.hub import Hub
from trainwire_engine.meeting import backend
from trainwire_engine.ranks import Alone
from trainwire_engine.team import Team
from trainwire_protocol.errors import DatasetInvalid


def team(rank: int, size: int, hub: Any = None) -> Team:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return Team(group, hub)


@pytest.fixture
def pair() -> tuple[Team, Team]:
    near, far = socket.socketpair()
    return team(0, 2, Hub(0, {1: near}, 90)), team(1, 2, Hub(1, {0: far}, 90))


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Let both ranks do their part at once."""
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(second()), daemon=True)
    other.start()
    mine = first()
    other.join(90)
    return mine, results[0]


CONFIG = SimpleNamespace(micro_batch_tokens=2048, packing=False)


def test_a_rank_takes_its_share_of_an_update_and_a_process_alone_takes_all() -> None:
    rows, dataset = list(range(20)), RandomRows(20)
    shares = [team(rank, 3).share(dataset, rows, CONFIG) for rank in range(3)]
    assert sorted(row for taken in shares for row in taken) == rows
    assert shares == share(dataset, rows, 3, CONFIG.micro_batch_tokens)
    assert Alone().share(dataset, rows, CONFIG) == rows


def test_an_update_with_fewer_rows_than_ranks_leaves_ranks_without_one() -> None:
    shares = [team(rank, 4).share(RandomRows(5), [2, 0], CONFIG) for rank in range(4)]
    assert sorted(map(len, shares)) == [0, 0, 1, 1]
    assert {row for taken in shares for row in taken} == {0, 2}


def test_the_sums_of_an_evaluation_come_together_in_the_order_of_its_batches(pair: tuple[Team, Team]) -> None:
    first, second = pair
    own, others = [(0, 1.5, 2.0, 3), (3, 0.1, 0.0, 1)], [(1, 0.7, 1.0, 2), (2, 0.25, 0.0, 4)]
    merged = both(lambda: first.merge(own), lambda: second.merge(others))
    assert merged[0] == merged[1] == sorted([*own, *others])


def test_an_evaluation_that_is_given_up_has_no_result_on_any_rank(pair: tuple[Team, Team]) -> None:
    first, second = pair
    first.tell("abandon")
    assert second.merge([(0, 1.0, 1.0, 1)]) is None


def test_what_rank_0_tells_is_done_in_its_order_until_it_goes_on(pair: tuple[Team, Team]) -> None:
    first, second = pair
    told: list[Any] = []
    second.handle = told.append
    first.tell("set", {"eval_every": 5})
    first.tell("evaluate", 2)
    first.tell("go")
    assert second.follow("go") == ["go"]
    assert told == [["set", {"eval_every": 5}], ["evaluate", 2]]


def test_ranks_that_differ_do_not_begin(pair: tuple[Team, Team]) -> None:
    first, second = pair
    threading.Thread(target=lambda: second.agree("b", DatasetInvalid("")), daemon=True).start()
    with pytest.raises(DatasetInvalid) as caught:
        first.agree("a", DatasetInvalid("its data are others."))
    assert caught.value.message == "Rank 1: its data are others."


def test_ranks_that_are_alike_go_on_together_and_take_the_least(pair: tuple[Team, Team]) -> None:
    first, second = pair
    assert both(lambda: first.agree("a", DatasetInvalid("")), lambda: second.agree("a", DatasetInvalid(""))) == (
        None,
        None,
    )
    assert both(lambda: first.least(4096), lambda: second.least(2048)) == (2048, 2048)


def test_one_machine_fills_its_cache_once(pair: tuple[Team, Team]) -> None:
    first, second = pair
    order: list[int] = []

    def turn(one: Team) -> None:
        with one.in_turn():
            order.append(one.rank)

    both(lambda: turn(first), lambda: turn(second))
    assert order == [0, 1]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "ring.json"}, "ring"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": ""}, None),
        ({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1"}, "nccl"),
        ({"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:1"}, "jaccl"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_the_backend_is_the_one_that_the_launcher_speaks_of(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str | None
) -> None:
    for key in ("MLX_RANK", "MLX_HOSTFILE", "NCCL_HOST_IP", "MLX_JACCL_COORDINATOR", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert backend() == name
