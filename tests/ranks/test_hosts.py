"""What a host file becomes: commands, and the variables of MLX's backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwire_protocol.errors import ConfigInvalid
from trainwire_worker.hosts import from_file, on_this_machine

TWO = [{"ssh": "mac1.local", "ips": ["10.0.0.1"]}, {"ssh": "mac2.local", "ips": ["10.0.0.2"]}]


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_ranks_here_meet_on_loopback_and_share_the_cores() -> None:
    places = on_this_machine(2, "ring")
    ring = json.loads(places[0].files["MLX_HOSTFILE"])
    assert [entry[0].split(":")[0] for entry in ring] == ["127.0.0.1", "127.0.0.1"]
    assert ring[0] != ring[1]
    assert [place.environment["MLX_RANK"] for place in places] == ["0", "1"]
    assert all(place.command[1:] == ["-m", "trainwire_engine", "--rank"] for place in places)
    if places[0].cores is not None and places[1].cores is not None:
        assert not places[0].cores & places[1].cores


def test_gpus_are_given_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    places = on_this_machine(2, None)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["2", "5"]
    assert {place.environment["NCCL_HOST_IP"] for place in places} == {"127.0.0.1"}
    assert {place.environment["MLX_WORLD_SIZE"] for place in places} == {"2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert "MLX_HOSTFILE" in on_this_machine(2, None)[0].files


def test_hosts_elsewhere_are_reached_over_ssh_and_find_each_other_by_address(tmp_path: Path) -> None:
    places = from_file(write(tmp_path / "hosts.json", TWO), None)
    assert [place.command[0] for place in places] == ["ssh", "ssh"]
    assert places[1].command[-2] == "mac2.local"
    assert "trainwire_engine --rank" in places[1].command[-1]
    ring = json.loads(places[1].files["MLX_HOSTFILE"])
    assert [entry[0].split(":")[0] for entry in ring] == ["10.0.0.1", "10.0.0.2"]


def test_several_addresses_of_a_host_are_as_many_connections(tmp_path: Path) -> None:
    listed = [{"ssh": "mac1.local", "ips": ["10.0.0.1", "10.1.0.1"]}, {"ssh": "mac2.local", "ips": ["10.0.0.2"]}]
    ring = json.loads(from_file(write(tmp_path / "hosts.json", listed), None)[0].files["MLX_HOSTFILE"])
    assert ring == [["10.0.0.1:32323", "10.1.0.1:32324"], ["10.0.0.2:32325"]]


def test_a_name_of_a_host_is_never_an_option_of_ssh(tmp_path: Path) -> None:
    listed = [TWO[0], {"ssh": "-oProxyCommand=id", "ips": ["10.0.0.2"]}]
    words = from_file(write(tmp_path / "hosts.json", listed), None)[1].command
    assert words.index("--") < words.index("-oProxyCommand=id")


def test_the_newer_form_names_backend_and_variables(tmp_path: Path) -> None:
    hosts = [{**host, "rdma": rdma} for host, rdma in zip(TWO, ([None, "rdma_en2"], ["rdma_en2", None]))]
    content = {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": hosts}
    place = from_file(write(tmp_path / "hosts.json", content), None)[1]
    assert place.environment["MLX_JACCL_COORDINATOR"].startswith("10.0.0.1:")
    assert place.environment["MLX_METAL_FAST_SYNCH"] == "1"
    assert json.loads(place.files["MLX_IBV_DEVICES"]) == [[None, "rdma_en2"], ["rdma_en2", None]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"hosts": 3}, "cannot be used"),
        ([{"name": "mac1"}], "cannot be used"),
        ([{"ssh": "mac1"}, {"ssh": "mac2"}], "mac1, mac2 has no ips"),
        ([], "has no ips"),
        ({"backend": "carrier pigeon", "hosts": TWO}, "carrier pigeon"),
        ({"backend": "jaccl", "hosts": TWO}, "rdma"),
    ],
)
def test_a_host_file_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        from_file(write(tmp_path / "hosts.json", content), None)
