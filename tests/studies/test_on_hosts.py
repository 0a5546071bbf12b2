"""benchmarks/on_hosts.py: a command on several hosts, with the variables of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from network_relay import why_not  # noqa: E402

hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
MEET = """
import os, socket, sys
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        others = [server.accept()[0] for _ in range(count - 1)]
        print("met", sorted(other.recv(1).decode() for other in others), os.environ["LOCAL_WORLD_SIZE"])
        print(os.environ["OFFBEAT_NETWORK"])
else:
    while True:
        try:
            with socket.create_connection(place) as first:
                first.sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            pass
"""


# the command with less patience with processes that still run when one has failed
IMPATIENT = f"""
import sys

sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import on_hosts

on_hosts.GRACE = 0.3
sys.exit(on_hosts.main(sys.argv[1:]))
"""


def on_hosts(*given: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", IMPATIENT, *given],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@hosts
def test_processes_on_hosts_of_their_own_find_the_first_one():
    done = on_hosts("--hosts", "3", "--profile", "1gbit-1ms", "--", "python", "-c", MEET)
    assert done.returncode == 0, done.stderr
    line, met, network = done.stdout.splitlines()
    assert line == f"3 hosts, 1gbit-1ms: {network}"
    assert network.startswith("1,000 Mbit/s with a round trip of 2 ms (measured: ")
    assert met == "met ['1', '2'] 1"


@hosts
def test_a_process_that_fails_ends_the_others_and_gives_the_exit_code():
    waits = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    done = on_hosts("--profile", "1gbit-1ms", "--", "python", "-c", waits)
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--hosts", "1", "--", "true"), "--hosts 1: use at least 2"),
        (("--profile", "slow", "--", "true"), "invalid choice: 'slow'"),
        ((), "the following arguments are required: command"),
    ],
)
def test_wrong_options_are_refused_in_one_line(given, message):
    done = on_hosts(*given)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
