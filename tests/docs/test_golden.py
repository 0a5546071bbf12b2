"""The hashes of small runs (benchmarks/golden.py) repeat, and a changed bit is reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from preloaded import PYTHON

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks/golden.py"


def golden(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYTHON, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_hashes_repeat_and_every_difference_is_one_line(tmp_path):
    file = tmp_path / "golden.json"
    made = golden("--out", file, "--only", "simulate/bp")
    assert made.returncode == 0, made.stderr
    content = json.loads(file.read_text())
    assert list(content["cases"]) == ["simulate/bp"]
    assert set(content["origin"]) >= {"commit", "torch"}
    same = golden("--check", file, "--only", "simulate/bp")
    assert same.returncode == 0, same.stdout + same.stderr
    content["cases"]["simulate/bp"]["losses"] = "0" * 64
    content["cases"]["simulate/bp/gone"] = {}
    file.write_text(json.dumps(content))
    other = golden("--check", file, "--only", "simulate/bp")
    assert other.returncode == 1
    assert other.stdout.splitlines()[:-1] == ["simulate/bp/gone: not run here", "simulate/bp: other losses"]


def test_at_least_sixty_runs_cover_all_methods():
    from offbeat.methods import METHODS

    names = golden("--list").stdout.split()
    assert len(names) >= 60
    assert {f"simulate/{name}" for name in METHODS} <= set(names)
