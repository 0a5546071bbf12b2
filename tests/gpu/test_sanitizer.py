"""What NVIDIA's compute-sanitizer finds in a small training: nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = ["adl fp32", "adl-1f1b bf16-fused", "bp fp32"]
SANITIZER = shutil.which("compute-sanitizer", path=os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer"),
]


@pytest.mark.timeout(600)  # racecheck takes minutes where it is not alone
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_or_written_out_of_place_or_out_of_turn(tool, case):
    # Not what libraries ask the driver for and do without.
    tool = [SANITIZER, "--tool", tool, "--report-api-errors", "no", "--show-backtrace", "no", "--error-exitcode", "9"]
    command = [*tool, sys.executable, str(Path(__file__).parent / "small.py"), *case.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "trained to" in done.stderr
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-3000:]
