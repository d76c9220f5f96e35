"""Ranks on other hosts: over ssh, behind a network that is cut, and started by somebody else's launcher."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks_driver import AT_ONCE, PATIENCE, SHORT, Start, children, wait_gone

from trainwire_engine.hub import NOTICED

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
        assert error["message"] == f"Rank 1 has given no sign of life for {SHORT * NOTICED:g} s."
        assert Path(end["checkpoint"]).is_dir()
        assert wait_gone(pids) == []
    finally:
        networks.stdin.close()
        networks.stdout.close()
        networks.wait(PATIENCE)


def beside(name: str) -> str:
    """A program of the same installation as this Python, or of the system; skips the test if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def mlx_launch() -> tuple[str, ...]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return (beside("mlx.launch"), "-n", "2", "--backend", "ring", "--starting-port", str(port), "--")


def test_mlx_launch_starts_the_same_command_on_every_rank_and_passes_orders_on(start: Start) -> None:
    run = start(ranks=1, prefix=mlx_launch())
    run.wait("step", step=3)
    run.result("pause")
    run.result("resume", steps=2)
    run.result("stop")
    assert run.finish()["outcome"] == "stopped", run.printed()
    assert [line["type"] for line in run.lines].count("init") == 1


def test_a_rank_of_mlx_launch_that_dies_ends_the_run_with_a_checkpoint(start: Start) -> None:
    run = start(ranks=1, words=("--rank-timeout", "60"), prefix=mlx_launch())
    run.wait("step", step=3)
    engine = run.result("status")["engine_pid"]
    started = children(run.process.pid)
    (other,) = (pid for pid in started if engine not in children(pid))
    os.kill(other, signal.SIGKILL)
    end = run.finish()
    assert [error["message"] for error in run.of("error")] == ["Rank 1 died."], run.printed()
    assert Path(end["checkpoint"]).is_dir()
    assert wait_gone([*started, engine]) == []


def test_mpirun_starts_the_same_command_on_every_rank_and_ends_without_a_complaint(start: Start) -> None:
    words = (beside("mpirun"), "-n", "2", "--oversubscribe", "-x", "MLX_MPI_LIBNAME=libmpi.so.40")
    if "Open MPI" not in subprocess.run([words[0], "--version"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("needs Open MPI")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run = start(ranks=1, prefix=words, env=root, max_steps=4)
    assert run.finish()["outcome"] == "completed", run.printed()
    assert len(run.steps()) == 4
    assert run.process.returncode == 0, run.printed()


SSHD = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
SetEnv {environment}
"""
SSH_CONFIG = """Host elsewhere
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A real sshd on loopback, under which `ssh elsewhere` is this machine: its process id, and an environment."""
    programs = beside("sshd"), beside("ssh"), beside("ssh-keygen")
    if os.geteuid() or not Path("/run/sshd").is_dir():
        pytest.skip("a real sshd needs root and /run/sshd")
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("host", "id"):
        subprocess.run([programs[2], "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    about = {"port": port, "folder": folder, "user": getpass.getuser()}
    path = os.environ.get("PYTHONPATH", "")
    (folder / "sshd_config").write_text(SSHD.format(environment=f"PYTHONPATH={path}", **about))
    (folder / "config").write_text(SSH_CONFIG.format(**about))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {programs[1]} -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    server = subprocess.Popen([programs[0], "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE)
    assert server.stderr is not None
    try:
        if b"listening" not in (line := server.stderr.readline()):
            pytest.skip(f"sshd does not start here: {line!r}")
        yield server.pid, {"PATH": f"{folder}:{os.environ['PATH']}"}
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def test_a_lost_ssh_connection_ends_the_run_and_leaves_nothing_on_the_other_host(
    start: Start, tmp_path: Path, sshd: tuple[int, dict[str, str]]
) -> None:
    server, env = sshd
    run = start(ranks=1, words=hosts(tmp_path / "hosts.json", "127.0.0.1", "127.0.0.1"), env=env)
    run.wait("step", step=3)
    launcher, first, client = run.processes()
    there = descendants(server)
    os.kill(client, signal.SIGKILL)
    end = run.finish()
    assert [error["message"] for error in run.of("error")] == ["Rank 1 died."], run.printed()
    assert Path(end["checkpoint"]).is_dir()
    assert wait_gone([launcher, first, client, *there]) == []


def test_a_rank_that_is_stopped_on_another_host_does_not_stay_there(start: Start, tmp_path: Path) -> None:
    words = hosts(tmp_path / "hosts.json", "127.0.0.1", "127.0.0.1")
    run = start(ranks=1, words=(*words, *AT_ONCE), env=shim(tmp_path / "bin"))
    run.wait("step", step=3)
    _, _, keeper = pids = run.processes()
    (rank,) = children(keeper)
    os.kill(rank, signal.SIGSTOP)
    end = run.finish()
    assert run.of("error")[0]["message"].startswith("Rank 1 has given no sign of life"), run.printed()
    assert Path(end["checkpoint"]).is_dir()
    assert wait_gone([*pids, rank]) == []


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
