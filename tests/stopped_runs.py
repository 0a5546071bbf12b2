"""Runs by the real command that are stopped, and how they continue."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from preloaded import PYTHON
from processes import KILLED, wait_for

from offbeat.runs.record import lines

RUN = [
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    "512",
    "--batch-size",
    "16",
    "--epochs",
    "2",
    "--threads-per-stage",
    "1",
    "--json",
]
SMALL = [*RUN, "--samples", "240", "--shape", "3,8,8", "--engine", "simulate"]
METHODS = {
    "adl": ["--method", "adl", "-M", "2"],
    "adl-hybrid": ["--method", "adl", "-M", "2", "--weights", "hybrid"],
    "adl-replay": ["--method", "adl", "-M", "3", "--weights", "replay"],
    "warm-up": ["--method", "adl", "-M", "2", "--weights", "hybrid", "--staleness-warmup", "bp@4+adl-1f1b@4"],
    "fr": ["--method", "fr"],
    "gpipe": ["--method", "gpipe"],
    "dgl": ["--method", "dgl"],
    "dgl-async": ["--method", "dgl-async"],
    "pb": ["--method", "pb"],
    "int8-messages": ["--method", "adl", "-M", "2", "--messages", "int8"],
    "drained": ["--method", "adl", "-M", "2", "--checkpoint-mode", "drained"],
}


def start(out: Path, *arguments: str) -> subprocess.Popen:
    command = [PYTHON, "-m", "offbeat", "train", *map(str, arguments), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    return err


def until(condition) -> None:
    assert wait_for(condition, 60, every=0.02), "it does not come"


def killed(out: Path, before: int, *arguments: str) -> None:
    """A run in one process that is killed before that batch, as by SIGKILL from outside."""
    command = [PYTHON, "-c", KILLED, str(before), "train", *arguments, "--out", str(out)]
    done(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), -signal.SIGKILL)


def recorded(run: Path) -> list[tuple]:
    return [
        (line["kind"], line.get("batch"), line.get("loss"), line.get("test_loss"))
        for line in lines(run)
        if line["kind"] in ("train", "epoch")
    ]
