"""`offbeat bench` under torchrun: each process has one worker of every row, on one machine or on several."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import PYTHON
from processes import ENVIRONMENT, START, free_ports

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from network_relay import CannotMakeHostsError, Hosts, Profile  # noqa: E402

SMALL = ("--model", "mlp", "--shape", "1,8,8", "--batch-size", "16", "--partition", "flops", "--json")
TIMED = ("bench", *SMALL, "--repetitions", "1", "--batches", "2")


def group(rank: int, port: int, *, world: int = 2, local: int = 2, **more: str) -> dict[str, str]:
    """What torchrun would set, with `local` processes on each machine."""
    return {
        **ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": str(world // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }


@contextlib.contextmanager
def started(commands: list[list[str]], surroundings: list[dict[str, str]]):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=variables, **pipes)
        for command, variables in zip(commands, surroundings, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check_record(printed: str, machines: int, *rows: str) -> dict:
    record = json.loads(printed)
    assert [row["name"] for row in record["rows"]] == ["bp", *rows, "adl"]
    assert record["left_out"] == {}
    assert record["provenance"]["machine"].endswith(f"; 2 processes, {machines} machines")
    for row in record["rows"]:
        assert len(row["seconds_per_batch"]) == 1
        assert len(row["memory"]) == row["workers"]
    return record


@pytest.mark.slow
def test_rows_are_timed_by_the_processes_of_torchrun(tmp_path):
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "offbeat"]
    done = subprocess.run(
        [*torchrun, *TIMED, "-K", "2", "--against", "ddp", "--out", str(tmp_path / "found")],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * START,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = check_record(done.stdout, 1, "ddp")
    assert json.loads((tmp_path / "found" / "bench.json").read_text())["rows"] == record["rows"]


def test_a_group_of_another_size_is_refused(tmp_path):
    command = [PYTHON, "-m", "offbeat", *TIMED, "-K", "4", "--out", str(tmp_path / "found")]
    done = subprocess.run(
        command, env=group(0, free_ports(1)[0]), capture_output=True, text=True, timeout=START, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "offbeat: -K 4 in 2 processes of torchrun: every worker needs one, use -K 2 or start 4 processes\n"
    )


def test_all_processes_end_where_no_worker_is_started(tmp_path):
    """The others waited for 30 minutes for the first one, which had no run left to do."""
    data = ("--data", "digits", "--until-loss", "1", "--budget-minutes", "1e-9")
    command = [PYTHON, "-m", "offbeat", "bench", *SMALL, *data, "-K", "2", "-M", "2", "--out", str(tmp_path / "found")]
    (port,) = free_ports(1)
    with started([command] * 2, [group(rank, port) for rank in range(2)]) as processes:
        ended = [process.communicate(timeout=START) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert json.loads(ended[0][0])["rows"] == []


@pytest.mark.slow
def test_rows_are_timed_over_the_line_between_two_hosts(tmp_path):
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2))
        except CannotMakeHostsError as reason:
            pytest.skip(str(reason))
        hosts.set(Profile("slow", 100e6, 20e-3))
        rows = ("--against", "torch-1f1b,ddp", "--micro-batches", "2")
        words = [sys.executable, "-m", "offbeat", *TIMED, *rows, "-K", "2", "--out", str(tmp_path / "found")]
        commands = [hosts.command(rank, *words) for rank in range(2)]
        variables = [group(rank, port, local=1, MASTER_ADDR=hosts.addresses[0]) for rank in range(2)]
        for each in variables:
            del each["GLOO_SOCKET_IFNAME"]  # found by the route to the first host
        before = hosts.counters()["bytes"]
        processes = stack.enter_context(started(commands, variables))
        (printed, errors), (nothing, other) = [process.communicate(timeout=2 * START) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors + other
        assert nothing == ""
        record = check_record(printed, 2, "torch-1f1b", "ddp")
        assert hosts.counters()["bytes"] - before > 10 * record["rows"][1]["bytes_moved"]
    times = {row["name"]: row["seconds_per_batch"][0] for row in record["rows"]}
    assert times["bp"] < 0.04 < times["torch-1f1b"]  # a way there and back
