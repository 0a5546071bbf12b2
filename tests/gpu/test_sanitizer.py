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

SANITIZER = shutil.which("compute-sanitizer", path=os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_nothing_is_read_or_written_out_of_place_or_out_of_turn(tool):
    # Not what libraries ask the driver for and do without.
    command = [SANITIZER, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", sys.executable]
    script = Path(__file__).parent / "small.py"
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "bf16" in done.stderr
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-3000:]
