"""One run at a time in a folder: who comes second is refused in one line, while a process of the first lives."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command import Command, check_refused, contents, weights
from disks import fill, small_disk
from preloaded import PYTHON
from processes import ENVIRONMENT, START, Run, another_process, group, processes_of, stopped, wait_for

from offbeat.checkpoint import ls
from offbeat.errors import FolderTaken, UserError
from offbeat.runs import lock
from offbeat.runs.record import lines

SMALL = (
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    "256",
    "--shape",
    "3,8,8",
    "--batch-size",
    "8",
    "--epochs",
    "2",
    "-K",
    "2",
    "-M",
    "2",
    "--threads-per-stage",
    "1",
    "--checkpoint-every",
    "5b",
    "--json",
)
IN_USE = ("in use by the run of process", f"on {platform.node()}", "one run at a time", "then try again")


def freeze(run: Run) -> dict[int, str]:
    """Stop all processes of a run where they are, once it has a checkpoint: they live and do nothing."""
    assert wait_for(lambda: ls(run.out) or run.process.poll() is not None, START, every=0.01), run.stderr
    found = processes_of(run.out)
    assert run.process.pid in found, run.stderr
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    assert wait_for(lambda: all(map(stopped, found)), START, every=0.001)
    return found


# ---- a run that is running


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
def test_resuming_a_run_that_still_runs_is_refused_and_changes_nothing(engine, tmp_path, offbeat: Command):
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", "whole").code == 0
    run = Run(tmp_path / "run", *SMALL, "--engine", engine)
    try:
        frozen = freeze(run)
        (run.out / "checkpoints" / "000000099.part").mkdir(exist_ok=True)  # that it is about to write
        before = contents(run.out)
        message = check_refused(offbeat, ("train", "--resume", run.out), *IN_USE, str(run.out), str(run.process.pid))
        assert "records so far" not in message
        assert contents(run.out) == before
        check_refused(offbeat, ("train", *SMALL, "--out", run.out), "already contains a run")
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        ended = run.end()
    assert ended.code == 0, ended
    assert weights(run.out) == weights(tmp_path / "whole")
    assert not (run.out / lock.FILE).exists()


@pytest.mark.parametrize("engine", [pytest.param("simulate", marks=pytest.mark.slow), "processes"])
def test_a_killed_run_can_be_resumed_once_its_last_process_has_ended(engine, tmp_path, offbeat: Command, monkeypatch):
    monkeypatch.setattr(lock, "LEAVING", 0.5)
    run = Run(tmp_path / "run", *SMALL, "--engine", engine)
    try:
        frozen = freeze(run)
        run.process.kill()
        run.process.wait()
        if engine == "processes":  # the launcher is gone, its workers do not know yet
            check_refused(offbeat, ("train", "--resume", run.out), *IN_USE, str(run.process.pid))
    finally:
        for pid in frozen:
            if pid != run.process.pid:
                os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not processes_of(run.out), 20)
    assert (run.out / lock.FILE).exists(), "nobody was there to remove it"
    assert offbeat("train", "--resume", run.out, "--engine", "simulate", "--json").code == 0
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", "whole").code == 0
    assert weights(run.out) == weights(tmp_path / "whole")
    assert not (run.out / lock.FILE).exists()


def test_the_last_processes_of_a_killed_run_are_waited_for(tmp_path):
    """Workers notice within a second that their launcher is gone: a command that comes at once is not refused."""
    with another_process(tmp_path) as first:
        token = json.loads((tmp_path / lock.FILE).read_text())["token"]
        worker = lock.joined(tmp_path, token)
        assert worker.__enter__()
        first.kill()
        first.wait()
    leaving = threading.Timer(0.5, worker.__exit__, (None, None, None))
    began = time.monotonic()
    leaving.start()
    with lock.held(tmp_path):
        assert time.monotonic() - began > 0.4
    leaving.join()


# ---- a folder that is about to be used


def test_a_new_run_in_a_folder_that_another_is_about_to_use_is_refused(tmp_path, offbeat: Command):
    with another_process(tmp_path / "run") as first:
        check_refused(offbeat, ("train", *SMALL, "--engine", "simulate", "--out", "run"), *IN_USE, str(first.pid))
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", "run").code == 0


@pytest.mark.slow
def test_of_two_runs_that_begin_in_one_folder_at_once_one_is_refused(tmp_path, offbeat: Command):
    command = [PYTHON, "-m", "offbeat", "train", *SMALL, "--engine", "simulate", "--out", str(tmp_path / "run")]

    def start(_: int) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)

    with ThreadPoolExecutor(2) as pool:
        both = sorted(pool.map(start, range(2)), key=lambda done: done.returncode)
    assert [done.returncode for done in both] == [0, 2], both
    assert both[1].stderr.count("\n") == 1
    assert "in use" in both[1].stderr or "already contains a run" in both[1].stderr
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", "whole").code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert [line["kind"] for line in lines(tmp_path / "run")].count("result") == 1


COMPARE = (
    "compare",
    "--methods",
    "bp,adl",
    "--seeds",
    "1",
    "-K",
    "2",
    "--data",
    "synthetic",
    "--samples",
    "64",
    "--model",
    "mlp",
    "--epochs",
    "1",
    "--engine",
    "simulate",
)


def test_a_comparison_that_runs_already_is_refused(tmp_path, offbeat: Command):
    with another_process(tmp_path / "runs") as first:
        check_refused(offbeat, (*COMPARE, "--out", "runs"), *IN_USE, str(first.pid))


@pytest.mark.parametrize("how", [(), ("--side-by-side", "2")], ids=["in turn", "side by side"])
def test_a_comparison_leaves_a_run_alone_that_another_process_uses(how, tmp_path, offbeat: Command):
    with another_process(tmp_path / "x" / "adl-seed0") as first:
        outcome = offbeat(*COMPARE, "--out", "x", "--json", *how)
        assert outcome.code == 2, outcome
        assert f"process {first.pid}" in outcome.err
        assert outcome.err.count("\n") == 1
        assert [path.name for path in (tmp_path / "x" / "adl-seed0").iterdir()] == [lock.FILE]
    assert offbeat(*COMPARE, "--out", "x", "--json", *how).code == 0


def test_a_reproduction_that_runs_already_is_refused(tmp_path, offbeat: Command):
    with another_process(tmp_path / "runs") as first:
        check_refused(offbeat, ("reproduce", "cifar10-table", "--out", "runs"), *IN_USE, str(first.pid))


# ---- under torchrun


@pytest.mark.parametrize("how", ["resume", "new"])
def test_a_group_that_finds_its_folder_in_use_is_refused_in_every_process(how, tmp_path, offbeat: Command):
    run = tmp_path / "run"
    if how == "resume":
        assert offbeat("train", *SMALL, "--engine", "simulate", "--out", run).code == 0
    with another_process(run) as first:
        before = contents(run)
        arguments = ("--resume", run, "--epochs", "3") if how == "resume" else (*SMALL, "--out", run)
        for done in group([tmp_path] * 2, "train", *arguments, "--json"):
            assert done.returncode == 2, done
            assert done.stderr.startswith("offbeat: "), done
            assert done.stderr.count("\n") == 1
            assert f"process {first.pid}" in done.stderr
        assert contents(run) == before


@pytest.mark.slow
def test_a_group_that_would_begin_where_a_run_is_leaves_its_records_alone(tmp_path, offbeat: Command):
    run = tmp_path / "run"
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", run).code == 0
    before = contents(run)
    for done in group([tmp_path] * 2, "train", *SMALL, "--out", run):
        assert done.returncode == 2, done
        assert "already contains a run" in done.stderr
    assert contents(run) == before


# ---- the lock itself


def test_a_process_may_hold_a_folder_more_than_once(tmp_path):
    with lock.held(tmp_path) as first:
        with lock.held(tmp_path) as second:
            assert first == second
        assert (tmp_path / lock.FILE).exists()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_run_block_no_other_run(tmp_path):
    (tmp_path / lock.FILE).write_text(json.dumps({"process": 1, "host": platform.node(), "token": "old"}))
    with lock.held(tmp_path) as token:
        assert token != "old"
        assert json.loads((tmp_path / lock.FILE).read_text())["process"] == os.getpid()


def test_a_folder_created_for_its_lock_is_removed_while_empty(tmp_path):
    with lock.held(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with lock.held(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.json").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


def test_a_process_that_does_not_see_the_folder_cannot_join(tmp_path):
    with lock.held(tmp_path / "here") as token:
        with lock.joined(tmp_path / "here", token) as sees:
            assert sees
        with lock.joined(tmp_path / "there", token) as sees:
            assert not sees
        with lock.joined(tmp_path / "here", "another") as sees:
            assert not sees
    with another_process(tmp_path / "there"), lock.joined(tmp_path / "there", token) as sees:
        assert not sees


def test_the_file_outlives_its_first_process_while_others_hold_it(tmp_path):
    with lock.held(tmp_path) as token:
        others = lock.joined(tmp_path, token)
        assert others.__enter__()
    assert (tmp_path / lock.FILE).exists()
    others.__exit__(None, None, None)
    assert not (tmp_path / lock.FILE).exists()


def test_a_folder_without_locks_is_used_without(tmp_path, monkeypatch):
    """Some network file systems have none: a run goes on, and its stages still find out whether they see the folder."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock.held(tmp_path) as token, lock.joined(tmp_path, token) as sees:
        assert sees


def test_a_held_folder_is_refused_at_once(tmp_path):
    with another_process(tmp_path):
        began = time.monotonic()
        with pytest.raises(FolderTaken), lock.held(tmp_path):
            pass
        assert time.monotonic() - began < lock.LEAVING / 2


def test_a_folder_that_cannot_be_held_for_lack_of_space_is_left_as_it_was(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        fill(disk, 0)
        with pytest.raises(UserError, match=r"cannot write to .*No space left on device"), lock.held(disk / "run"):
            pass
        assert [path.name for path in disk.iterdir()] == ["ballast"]
