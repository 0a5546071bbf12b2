"""A stage that says no more: stopped processes are told of in time, slow ones are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import check_refused
from preloaded import PYTHON
from processes import (
    ENDLESS,
    ENVIRONMENT,
    Run,
    check_stopped,
    free_ports,
    last_line,
    processes_of,
    stopped,
    two_processes,
    wait_for,
)

from offbeat.engines.processes import SILENCE, silence_allowed
from offbeat.errors import UserError

SECONDS = 4.0  # short, but longer than a busy machine keeps a thread waiting


def test_silence_is_30_seconds_by_default(monkeypatch):
    monkeypatch.delenv("OFFBEAT_SILENCE", raising=False)
    assert silence_allowed(None) == SILENCE == 30.0
    monkeypatch.setenv("OFFBEAT_SILENCE", "7.5")
    assert silence_allowed(None) == 7.5
    assert silence_allowed(2) == 2.0
    assert silence_allowed(float("inf")) == float("inf")


@pytest.mark.parametrize("given", ["soon", "", "0", "-3", "nan"])
def test_an_invalid_silence_is_refused(monkeypatch, given):
    monkeypatch.setenv("OFFBEAT_SILENCE", given)
    with pytest.raises(UserError, match="use a number of seconds above 0"):
        silence_allowed(None)


def test_an_invalid_silence_on_the_command_line_is_reported_in_one_line(offbeat):
    check_refused(offbeat, ("train", "--data", "digits", "-K", 2, "--silence", 0), "--silence 0", "seconds above 0")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_stopped_worker_is_reported_in_time_and_no_process_is_left(tmp_path, monkeypatch, stage):
    monkeypatch.setitem(ENVIRONMENT, "OFFBEAT_SILENCE", str(SECONDS))
    run = Run(tmp_path / "run", *ENDLESS, "-K", 3, "--json")
    run.begin()
    os.kill(run.worker(stage - 1), signal.SIGSTOP)
    ended = run.end()
    check_stopped(ended, f"stage {stage} has not answered for 4 s", "last message was of batch")
    assert SECONDS * 0.7 < ended.seconds < SECONDS + 8  # with the time that it takes to stop


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_whose_processes_are_all_stopped_and_continued_trains_on(tmp_path, monkeypatch):
    """As by Ctrl-Z and fg."""
    monkeypatch.setitem(ENVIRONMENT, "OFFBEAT_SILENCE", "2")
    run = Run(tmp_path / "run", *ENDLESS, "-K", 2, "--json")
    run.begin()
    pids = list(processes_of(run.out))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    metrics = run.out / "metrics.jsonl"
    lines = metrics.read_text().count("\n")
    went_on = wait_for(lambda: metrics.read_text().count("\n") > lines + 3 or run.process.poll() is not None, 60)
    alive = run.process.poll() is None
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end().left == {}
    assert went_on
    assert alive, run.stderr


STOPPED = """
import os, signal

from offbeat.engines.processes import Processes

engine = Processes(2, silence=1.0)
if engine.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
engine.share(None, 2 - engine.rank)  # each waits for the other
"""
ACCUSED = """
from offbeat.engines.processes import Processes
from offbeat.errors import StageSilent

engine = Processes(2)
link = engine.link("activations", 1, 2, capacity=1)
if engine.rank == 1:
    link.receive()
with engine.guard():
    raise StageSilent("stage 2 has not answered for 30 s")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names the loopback interface")
def test_a_stopped_process_is_reported_by_the_other_and_never_by_itself():
    """It finds the report of the other in the store when it goes on."""
    with two_processes(STOPPED) as (first, second):
        assert "StageSilent: stage 2 has not answered for 1 s" in last_line(first)
        os.kill(second.pid, signal.SIGCONT)
        last = last_line(second)
        assert "another stage is gone: " in last or "stage 1 has not answered for 1 s" in last


@pytest.mark.skipif(sys.platform != "linux", reason="names the loopback interface")
def test_a_stage_whose_neighbour_left_because_of_its_silence_reports_the_neighbour():
    with two_processes(ACCUSED) as (first, second):
        assert "stage 1 is gone: it no longer heard this stage" in last_line(second)
        assert "stage 2 has not answered" in last_line(first)


SCRIPT = """
import os, signal, sys, time

import torch
from torch import nn

import offbeat
from offbeat.engines.processes import Processes

case, rank, K, SILENCE = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[2])
torch.set_num_threads(1)


class Spring(nn.Module):
    def __init__(self):
        super().__init__()
        self.batches = 0

    def forward(self, x):
        self.batches += 1
        if self.batches == 4 and rank == 1:
            if case == "slow":
                time.sleep(2.5 * SILENCE)
            if case == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if case == "failing":
                raise ValueError("a fault of this stage")
        return x


engine = Processes(K, silence=SILENCE)
engine.failures.store_answers = case != "failing"  # as if its process had ended first
model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Spring()) for _ in range(K)))
pipe = offbeat.Pipeline(model, K, method="adl", M=2, cuts=list(range(1, K)), loss=nn.functional.mse_loss, engine=engine,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
batches = [(torch.ones(3, 6), torch.zeros(3, 6))] * 8
pipe.fit(batches if rank == 0 else None, drain=False)
if case == "collective" and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
pipe.drain()
pipe.close()
print("done", flush=True)
"""


def members(folder: Path, case: str, K: int) -> list[tuple[int | None, str, str, float]]:
    """Code, stdout, stderr and seconds of each process of a script, as torchrun would start them."""
    file = folder / "script.py"
    file.write_text(SCRIPT)
    group = {"WORLD_SIZE": str(K), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    started = [
        subprocess.Popen(
            [PYTHON, str(file), case, str(SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(K)
    ]
    ended: list[tuple[int | None, str, str, float]] = []
    try:
        frozen = case in ("stopped", "collective")
        if frozen:
            assert wait_for(lambda: stopped(started[1].pid), 90)
        began = time.monotonic()
        for rank, process in enumerate(started):
            if frozen and rank == 1:
                ended.append((None, "", "", 0.0))
                continue
            out, err = process.communicate(timeout=90)
            ended.append((process.returncode, out, err, time.monotonic() - began))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return ended


@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a process in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("case", ["stopped", "collective"])
def test_all_processes_that_wait_for_a_stopped_one_name_its_stage(tmp_path, case):
    """While batches flow, and in a collective operation, where a far process waits for the stopped one directly."""
    ended = members(tmp_path, case, 4)
    for rank in (0, 2, 3):
        code, out, err, seconds = ended[rank]
        assert code == 1
        assert out == ""
        last = err.strip().splitlines()[-1]
        assert "stage 2 has not answered for 4 s" in last, err
        assert "StageSilent" in last or "StageLost" in last
        assert seconds < SECONDS + 8


def test_a_stage_that_fails_sends_its_neighbours_the_reason_without_the_store(tmp_path):
    (code, _, err, _), _ = members(tmp_path, "failing", 2)
    assert code == 1
    assert "a fault of this stage" in err.strip().splitlines()[-1], err


@pytest.mark.slow
def test_a_slow_stage_is_no_silent_one(tmp_path):
    for code, out, err, _ in members(tmp_path, "slow", 2):
        assert code == 0, err
        assert out == "done\n"
