"""Ranks on other hosts: over ssh, behind a network that is cut, and started by somebody else's launcher."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_driver import AT_ONCE, PATIENCE, SHORT, Start, children, wait_gone
from whole import ENVIRONMENT, parse

SSH = """#!/bin/sh
# Stands for ssh: the last word is the command, and there is one machine only.
for word; do :; done
exec {enter} sh -c "$word"
"""
NETWORKS = """
set -e
ip link set lo up
unshare -n sleep 600 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add near type veth peer name far netns $other
ip address add 10.77.0.1/24 dev near
ip link set near up
nsenter -t $other -n ip address add 10.77.0.2/24 dev far
nsenter -t $other -n ip link set far up
nsenter -t $other -n ip link set lo up
echo $other
read word
ip link set near down
read word
"""


def shim(folder: Path, enter: str = "") -> dict[str, str]:
    """An environment in which `ssh` stays on this machine."""
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(enter=enter))
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def hosts(path: Path, first: str, second: str) -> tuple[str, ...]:
    """Options for two hosts, the first of them this machine."""
    listed = [{"ssh": "127.0.0.1", "ips": [first]}, {"ssh": "elsewhere", "ips": [second]}]
    path.write_text(json.dumps(listed))
    return "--hostfile", str(path)


def test_a_host_file_is_followed_over_ssh_and_nothing_is_left_there(start: Start, tmp_path: Path) -> None:
    words = hosts(tmp_path / "hosts.json", "127.0.0.1", "127.0.0.1")
    run = start(ranks=1, words=words, env=shim(tmp_path / "bin"))
    run.wait("step", step=3)
    pids = run.processes()
    everything = [*pids, *(child for pid in pids[1:] for child in children(pid))]
    os.kill(pids[1], 9)
    end = run.finish()
    assert run.of("error")[0]["message"].startswith("Rank 0 died"), run.printed()
    assert Path(end["checkpoint"]).is_dir()
    assert "[rank 1] " in run.printed()
    assert wait_gone(everything) == []


def test_a_cut_network_ends_the_run_and_names_the_rank(start: Start, tmp_path: Path) -> None:
    command = ["unshare", "-rn", "sh", "-c", NETWORKS]
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    networks = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert networks.stdin is not None
    assert networks.stdout is not None
    other = networks.stdout.readline().strip()
    if not other:
        networks.wait()
        pytest.skip("network namespaces are not allowed here")
    near = f"nsenter --preserve-credentials -U -n -t {networks.pid}"
    try:
        env = shim(tmp_path / "bin", f"nsenter -n -t {other}")
        words = hosts(tmp_path / "hosts.json", "10.77.0.1", "10.77.0.2")
        run = start(ranks=1, words=(*words, *AT_ONCE), env=env, prefix=tuple(near.split()))
        run.wait("step", step=3)
        pids = run.processes()
        networks.stdin.write("cut\n")
        networks.stdin.flush()
        end = run.finish()
        (error,) = run.of("error")
        assert error["message"] == f"Rank 1 has given no sign of life for {SHORT:g} s."
        assert Path(end["checkpoint"]).is_dir()
        assert wait_gone(pids) == []
    finally:
        networks.stdin.close()
        networks.stdout.close()
        networks.wait(PATIENCE)


def test_a_schedulers_launcher_starts_the_same_command_on_every_rank(start: Start, tmp_path: Path) -> None:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ring = [[f"127.0.0.1:{sock.getsockname()[1]}"] for sock in listening]
    for sock in listening:
        sock.close()
    (tmp_path / "ring.json").write_text(json.dumps(ring))
    place = {"MLX_HOSTFILE": str(tmp_path / "ring.json"), "MLX_RANK": "0"}
    run = start(ranks=1, env=place, max_steps=4)
    other = subprocess.Popen(
        [sys.executable, "-m", "trainwire_cli", "run", str(tmp_path / "run.toml")],
        env={**ENVIRONMENT, **place, "MLX_RANK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert run.finish()["outcome"] == "completed", run.printed()
    out, _ = other.communicate(timeout=PATIENCE)
    assert (other.returncode, parse(out) if out else []) == (0, [])
    assert len(run.steps()) == 4


def test_a_host_that_cannot_be_reached_ends_the_run_at_once(start: Start, tmp_path: Path) -> None:
    words = hosts(tmp_path / "hosts.json", "127.0.0.1", "127.0.0.1")
    env = shim(tmp_path / "bin")
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho elsewhere: no route to host >&2\nexit 255\n")
    run = start(ranks=1, words=words, env=env)
    end = run.finish()
    (error,) = run.of("error")
    assert error["message"] == "Rank 1 left before the ranks had found each other: exit status 255."
    assert "[rank 1] elsewhere: no route to host" in run.printed()
    assert end["exit_code"] == 9
