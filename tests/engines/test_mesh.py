"""The torch DeviceMesh (replica, stage) of a pipeline in several processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from mesh_cases import pipeline, weights
from preloaded import PYTHON
from replica_cases import images

from offbeat.errors import UserError

SCRIPT = Path(__file__).parent.parent / "mesh_cases.py"


def test_the_mesh_of_a_pipeline_and_one_of_the_user_train_the_same_bits(tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    simulated, batches = pipeline(K=2, replicas=2, engine="simulate"), images(8)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        simulated.step(*map(list, zip(first, second, strict=True)))
    assert (tmp_path / "weights").read_text() == weights(simulated.drain())


def test_one_process_has_no_mesh():
    assert pipeline(K=2).mesh is None
    with pytest.raises(UserError, match="mesh= is of type Tensor: give a torch DeviceMesh, made by init_device_mesh"):
        pipeline(mesh=torch.arange(4))
