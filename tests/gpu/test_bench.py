"""`offbeat bench` on one GPU: rows on streams are timed, and what needs several GPUs is left out with its reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_rows_of_one_gpu_are_timed_and_the_others_say_why_not(tmp_path):
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "bench",
        "-K",
        "2",
        "--model",
        "resnet8",
        "--batch-size",
        "16",
        "--device",
        "cuda",
        "--repetitions",
        "2",
        "--batches",
        "1",
        "--json",
        "--out",
        str(tmp_path / "found"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    names = ["bp", "bp-cores", "bp-windows", "adl", "adl-1f1b", "ddg", "fr", "dsp"]
    assert [row["name"] for row in record["rows"]] == names
    assert [row["samples_per_update"] for row in record["rows"]] == [16, 16, 64, 64, 64, 16, 16, 16]
    assert all(len(row["seconds_per_batch"]) == 2 and row["memory_per_worker"] > 0 for row in record["rows"])
    micro = {"adl-micro", "adl-recompute", "adl-1f1b-micro"}
    assert set(record["left_out"]) == {"torch-gpipe", "torch-1f1b", "torch-interleaved", "ddp", "gpipe"} | micro
    assert record["bound"]["seconds_per_batch"] == []
    assert (tmp_path / "found/bench.png").exists() == (importlib.util.find_spec("vl_convert") is not None)
