"""What the benchmarks share: how they start themselves in K processes, and their command as a record names it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


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
