"""What the benchmarks share: how they start themselves in K processes, their progress, and their records."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.runs import record
from offbeat.runs.provenance import gpu_name, provenance

BEGUN = time.monotonic()


def say(line: str) -> None:
    """A line of progress, with the seconds so far."""
    print(f"[{time.monotonic() - BEGUN:5.0f} s] {line}", flush=True)


def arguments() -> list[str]:
    """The command's arguments, without where the record goes."""
    given = [part for part in sys.argv[1:] if part != "--worker"]
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return given


def in_processes(K: int, given: Sequence[str]) -> int:
    """Run this very script as a worker in K processes, each on one thread; the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={K}", sys.argv[0]]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *given, "--worker"], env=surroundings, check=False).returncode


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as a record has them, without where the record goes."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "worker")}


def origin(*, on_gpu: bool = False) -> dict[str, Any]:
    """Where a record comes from; the machine is the GPU alone for what is timed on it."""
    made = provenance(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments()])
    return {**made, "machine": gpu_name()} if on_gpu else made


def write_record(out: Path | str | None, content: Mapping[str, Any]) -> None:
    """A record, complete or not at all; none without a file for it."""
    if out:
        record.write(Path(out), json.dumps(content, indent=1) + "\n")
