"""Runs with replicas: in processes as simulated, and after whatever stopped them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON
from processes import ENDLESS, Run, check_stopped, last_line, processes_of, two_processes
from run_folders import run
from stopped_runs import METHODS, SMALL, done, killed, recorded, start, until

from offbeat.checkpoint import ls
from offbeat.runs.record import lines

REPLICAS = [*SMALL[:-2], "-K", "2", "--replicas", "2", "--batch-size", "8"]
HYBRID = ["-M", "2", "--weights", "hybrid"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing stops, simulated."""
    out = tmp_path_factory.mktemp("replicas") / "whole"
    done(start(out, *REPLICAS, *HYBRID, "--engine", "simulate"))
    return out


def test_a_killed_process_of_a_replica_is_replaced_and_the_run_continues(whole, tmp_path):
    out = tmp_path / "broken"
    broken = start(out, *REPLICAS, *HYBRID, "--checkpoint-every", "4b", "--max-restarts", "2")
    until(lambda: len(ls(out)) >= 1)
    assert sorted(processes_of(out).values()) == ["", "0", "1", "2", "3"]
    os.kill(next(pid for pid, rank in processes_of(out).items() if rank == "3"), signal.SIGKILL)
    (line,) = done(broken).splitlines()
    died = r"stage 2 of replica 1 has died \(SIGKILL, process \d+(, its last message was of batch \d+)?\)"
    assert re.fullmatch(f"offbeat: restart 1 of 2: {died}", line), line
    assert weights(out) == weights(whole)
    assert any(line["kind"] == "resumed" and line["batch"] > 0 for line in lines(out))


def test_a_signal_saves_all_replicas_after_the_same_batch_and_stops(whole, tmp_path, offbeat: Command):
    out = tmp_path / "broken"
    broken = start(out, *REPLICAS, *HYBRID)
    until(lambda: any(line["kind"] == "train" for line in lines(out)))
    broken.send_signal(signal.SIGTERM)
    printed = done(broken, 130)
    assert "stopped by SIGTERM after batch" in printed, printed
    assert printed.count("\n") == 1
    (made,) = ls(out)
    assert (made.checkpoint.K, made.checkpoint.replicas, made.checkpoint.mode) == (2, 2, "in-flight")
    assert processes_of(out) == {}
    train_here(offbeat, "--resume", out, "--engine", "simulate", "--json")
    assert weights(out) == weights(whole)


LATE = """
import os, time

import offbeat
from offbeat.runs import begin

if os.environ["RANK"] == "1":
    stopping = begin.stopping
    begin.stopping = lambda stop: time.sleep(3) or stopping(stop)
offbeat.train(offbeat.make_recipe(method="bp", model="mlp", data="synthetic", shape=(3, 8, 8), K=1, replicas=2, M=2,
                                  epochs=100000, threads_per_stage=1, checkpoint_mode="in-flight"), out={out!r})
"""


def test_no_process_trains_before_a_signal_saves_in_all(tmp_path):
    """One that was slow to start was killed by the signal, and there was no checkpoint."""
    out = tmp_path / "run"
    with two_processes(LATE.format(out=str(out))) as started:
        until(lambda: any(line["kind"] == "train" for line in lines(out)))
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            assert "stopped by SIGTERM after batch" in last_line(process)
    assert len(ls(out)) == 1


@pytest.mark.slow
def test_checkpoints_by_the_clock_are_agreed_upon_by_replicas(whole, tmp_path):
    out = tmp_path / "timed"
    done(start(out, *REPLICAS, *HYBRID, "--checkpoint-every", "0.1s", "--keep", "50", "--trace", "4"))
    assert ls(out)
    assert json.loads((out / "trace.json").read_text())["otherData"]["turns"] == 4  # that of replica 0
    assert all(each.checkpoint for each in ls(out))
    assert weights(out) == weights(whole)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_process_ends_those_of_all_replicas_with_one_line(rank, tmp_path):
    run = Run(tmp_path / "run", *ENDLESS, "-K", 2, "--replicas", 2, "--json")
    run.begin()
    os.kill(run.worker(rank), signal.SIGKILL)
    check_stopped(run.end(), f"stage 1 of replica {rank // 2}", "SIGKILL")


@pytest.mark.parametrize("name", ["adl", "warm-up", "gpipe"])
def test_a_simulated_run_with_replicas_resumes_bit_for_bit(name, tmp_path, offbeat: Command):
    settings = [*REPLICAS, "--engine", "simulate", "--checkpoint-every", "7b", *METHODS[name]]
    train_here(offbeat, *settings, "--out", tmp_path / "whole")
    killed(tmp_path / "broken", 19, *settings)
    assert [each.checkpoint.t for each in ls(tmp_path / "broken")] == [7, 14]
    train_here(offbeat, "--resume", tmp_path / "broken", "--json")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert recorded(tmp_path / "broken") == recorded(tmp_path / "whole")


@pytest.mark.slow
def test_another_number_of_replicas_in_processes_continues_as_simulated(tmp_path):
    settings = (*REPLICAS, "--replicas", "3", "--engine", "simulate", "-M", "2", "--checkpoint-every", "9b")
    killed(tmp_path / "simulate", 12, *settings, "--checkpoint-mode", "drained")
    shutil.copytree(tmp_path / "simulate", tmp_path / "processes")
    for engine in ("simulate", "processes"):
        command = [PYTHON, "-m", "offbeat", "train", "--resume", tmp_path / engine, "--replicas", "2"]
        done(subprocess.Popen([*command, "--engine", engine], stdout=PIPE, stderr=PIPE, text=True))
    assert weights(tmp_path / "processes") == weights(tmp_path / "simulate")


@pytest.mark.parametrize(("mode", "lost"), [("in-flight", True), ("drained", False)])
def test_a_run_resumes_with_another_number_of_replicas(mode, lost, tmp_path, offbeat: Command):
    run = tmp_path / "run"
    settings = (*REPLICAS, "--engine", "simulate", "-M", "2", "--checkpoint-every", "9b", "--checkpoint-mode", mode)
    killed(run, 12, *settings)
    train_here(offbeat, "--resume", run, "--json", "--replicas", "1", "--engine", "simulate")
    notes = [line["text"] for line in lines(run) if line["kind"] == "note"]
    assert any("in flight" in note and "lost by the change" in note for note in notes) == lost
    assert [line["epoch"] for line in lines(run) if line["kind"] == "epoch"] == [0, 1]
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    assert recipe["replicas"] == 1
    assert recipe["lr"] == 0.1 * 8 * 2 / 256  # the default follows the samples per update


def test_an_epoch_of_replicas_counts_a_batch_of_each(tmp_path, offbeat: Command):
    settings = ("--samples", 100, "--epochs", 1, "--engine", "simulate", "--out", "run")
    train_here(offbeat, *REPLICAS, *settings)
    (epoch,) = (line for line in lines(tmp_path / "run") if line["kind"] == "epoch")
    assert epoch["batches"] == 6  # 100 samples in batches of 2 * 8; the last 4 are not used


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replicas", 0), "--replicas 0: use an integer of at least 1"),
        (
            ("--replicas", 40),
            "--replicas 40 with --batch-size 8: a batch of each needs 320 samples, but an epoch has 100",
        ),
        (("--method", "dni"), "dni with --replicas 2: it trains its synthesisers by an optimizer of their own"),
        (("--method", "asgd", "-K", 1), "asgd with --replicas 2: it has several workers itself"),
        (("--diagnose", 2), "--diagnose 2 with --replicas 2: it compares an update with the batches of one replica"),
        (("--device", "cuda", "--engine", "streams"), "--engine streams with --replicas 2: on one GPU replicas share"),
        (
            ("--batch-per-update", 30, "-M", 2),
            "--batch-per-update 30 with M = 2 and --replicas 2: 30 samples cannot be",
        ),
    ],
)
def test_wrong_settings_of_replicas_are_refused(arguments, words, offbeat: Command):
    given = [*SMALL[:4], "--samples", 100, "--shape", "3,8,8", "-K", 2, "--replicas", 2]
    size = () if "--batch-per-update" in arguments else ("--batch-size", 8)
    check_refused(offbeat, ("train", *given, *size, *arguments), words)


def test_the_report_of_a_run_names_its_replicas(tmp_path, offbeat: Command):
    run(tmp_path / "run", replicas=2)
    outcome = offbeat("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert outcome.code == 0, outcome
    page = (tmp_path / "page.html").read_text()
    assert "K=3 stages in 2 replicas, M=2" in page
    assert "16 samples per update" in page
