"""The processes of `offbeat bench`: where workers come from and how they end, and the load of other programs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_cases import SETTING
from processes import STOP, alive, wait_for

from offbeat.errors import UserError
from offbeat.runs import launch
from offbeat.studies.bench import fork_server as fork_server_module
from offbeat.studies.bench import rounds
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.rows import ROWS
from offbeat.studies.bench.worker_group import RowFailedError, WorkerGroup

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def fork_server():
    made = ForkServer()
    yield made
    made.close()


def test_a_worker_is_forked_with_its_own_surroundings_and_its_end_is_known(fork_server, tmp_path):
    born = [fork_server.spawn({"OFFBEAT_TOLD": str(n)}, tmp_path / f"{n}.err") for n in range(2)]
    for worker in born:
        told = {
            "row": "bp",
            "setting": SETTING.as_dict(),
            "rank": 0,
            "world": 1,
            "store": "",
            "threads": 1,
            "cores": sorted(os.sched_getaffinity(0))[:1],
        }
        worker.stdin.write(json.dumps(told) + "\n")
        assert json.loads(worker.stdout.readline()) == {}
    born[0].kill()
    assert born[0].wait() == -signal.SIGKILL
    born[1].stdin.close()
    assert born[1].wait() == 0
    for worker in born:
        worker.close()


def test_an_interrupted_request_ends_the_fork_server_and_it_can_still_be_closed(fork_server, tmp_path, monkeypatch):
    born = [fork_server.spawn({}, tmp_path / f"{n}.err") for n in range(2)]
    real = fork_server_module._line

    def broken_off(connection):
        monkeypatch.setattr(fork_server_module, "_line", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_server_module, "_line", broken_off)
    with pytest.raises(KeyboardInterrupt):
        fork_server.spawn({}, tmp_path / "last.err")
    for worker in born:
        worker.close()
    fork_server.close()
    assert wait_for(lambda: not any(alive(worker.pid) for worker in born), STOP)


def test_workers_end_with_their_fork_server_and_the_benchmark_reports_it(fork_server, tmp_path):
    worker = fork_server.spawn({}, tmp_path / "err")
    fork_server.process.kill()
    assert worker.stdout.readline() == ""  # within the half second in which it looks for its parent
    with pytest.raises(UserError, match="the process that starts the workers has ended: run the benchmark again"):
        fork_server.spawn({}, tmp_path / "err")
    worker.close()


@pytest.mark.parametrize(
    ("load", "machine", "here", "expected"), [(9.3, 16, 8, 1.3), (4.2, 16, 8, 0.0), (3.0, 2, 2, 3.0)]
)
def test_load_that_other_cores_can_carry_does_not_count(monkeypatch, load, machine, here, expected):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(rounds, "cores_here", lambda: list(range(here)))
    assert rounds.load_here() == pytest.approx(expected)


def test_more_workers_than_can_share_the_cores_are_refused_before_any_starts(offbeat, monkeypatch):
    """They started one by one until the memory was used up."""
    monkeypatch.setattr(launch, "cores", lambda: 2)
    monkeypatch.setattr(rounds, "StudyRunner", None)
    for options in ([], ["--until-loss", "1"]):
        found = offbeat("bench", "-K", "17", *options)
        assert found.code == 2
        assert found.err == (
            "offbeat: -K 17: 17 processes on 2 cores, use 16 or fewer (8 per core), or a machine with more cores\n"
        )
    launch.check_cores(16)


@pytest.mark.parametrize(
    ("name", "seconds", "timed"),
    [
        ("adl-micro", 1 / 64, [(2, 8), (0, 32), (2, 6), (0, 36)]),
        ("torch-1f1b", 1 / 64, [(0, 1), (0, 32)] * 2),
        ("torch-1f1b", 3 / 8, [(0, 1), (0, 2)] * 2),
        ("torch-1f1b", 1.0, [(0, 1)] * 2),
    ],
)
def test_a_sweep_times_whole_updates_for_half_a_second_in_every_row(name, seconds, timed, tmp_path, monkeypatch):
    asked = []
    workers = WorkerGroup(ROWS[name], replace(SETTING, batch_size=24, K=2), tmp_path, ForkServer())
    monkeypatch.setattr(workers, "ask", lambda what, given=None: [])
    monkeypatch.setattr(workers, "seconds", lambda *given: asked.append(given) or ([seconds, seconds / 2], 0.0))
    found = workers.sweep([4, 6], worse=2.0, report=lambda text: None)
    assert asked == timed
    assert found == {m: seconds * (m if name == "adl-micro" else 1) for m in (4, 6)}


def test_a_row_fails_for_the_reason_of_the_worker_that_failed_first(tmp_path):
    """A row that diverged was recorded as failed if its other worker answered before."""
    workers = WorkerGroup(ROWS["adl"], SETTING, tmp_path, ForkServer())
    for answer in ({"failed": "StageLost: stage 2 failed", "lost": True}, {"failed": "nan", "diverged": True}):
        there, here = os.pipe()
        os.write(here, json.dumps(answer).encode() + b"\n")
        os.close(here)
        workers.processes.append(SimpleNamespace(stdin=io.StringIO(), stdout=os.fdopen(there)))
    with pytest.raises(RowFailedError, match="nan") as failed:
        workers.ask("look")
    assert failed.value.diverged
    for process in workers.processes:
        process.stdout.close()


@pytest.mark.slow
def test_the_benchmark_of_the_engine_records_its_ratios(tmp_path):
    script = Path(__file__).resolve().parents[2] / "benchmarks/core.py"
    given = ("--model", "resnet8", "--batch-size", "4", "-K", "2", "-M", "2", "--rounds", "1", "--timed", "2")
    subprocess.run([sys.executable, script, *given, "--out", tmp_path / "core.json"], check=True, timeout=300)
    record = json.loads((tmp_path / "core.json").read_text())
    assert {"pipeline_over_bound", "speedup_of_the_cut", "balance"} <= record["ratios"].keys()
    assert record["settings"]["model"] == "resnet8"
    assert record["provenance"]["command"][:2] == ["python", "benchmarks/core.py"]
