"""K processes that share one GPU: recorded stages, messages through host memory, the bits of simulate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPT = Path(__file__).parent.parent / "ranks.py"


@pytest.mark.parametrize(
    ("method", "K", "messages"),
    [
        ("adl", 2, "exact"),
        ("adl", 3, "exact"),
        ("pipedream", 2, "exact"),
        ("fr", 2, "exact"),
        ("adl", 3, "int8"),
        ("adl", 2, "bf16"),
    ],
)
def test_processes_on_one_gpu_give_the_bits_of_simulate(method, K, messages, tmp_path):
    surroundings = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={K}"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), method, messages],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=surroundings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads(json.dumps(trained(method, "simulate", K, messages)))
    for rank in range(K):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["recorded"] == [True]
        assert found["weights"] == expected["weights"]
        assert found["staleness"] == expected["staleness"]
        assert rank < K - 1 or found["losses"] == expected["losses"]
