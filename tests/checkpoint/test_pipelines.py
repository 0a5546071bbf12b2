"""The state of a real pipeline, through the files of a checkpoint: it goes on bit for bit, and exports as one model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import test_state
import torch
from safetensors.torch import load_file
from selected import some
from test_contract import batches, network, pipeline, sgd
from test_state import LENGTH, OPTIONS, finish, interrupted, same
from torch import nn

import offbeat
from offbeat import checkpoint as checkpoints
from offbeat.checkpoint.export import export
from offbeat.methods import METHODS


def through_files(run: Path, states: dict, t: int = 1) -> dict:
    folder = checkpoints.begin(run, t)
    facts = [
        each for k, tree in states.items() for each in checkpoints.write_part(folder, checkpoints.part_name(k), tree)
    ]
    checkpoints.finish(folder, facts, t=t, mode="in-flight", K=len(states), method="any", run={})
    found, notes = checkpoints.newest(run)
    assert notes == []
    return {k: found.stage(k) for k in states}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch) -> None:
    number = itertools.count(1)
    monkeypatch.setattr(test_state, "moved", lambda states: through_files(tmp_path / "run", states, next(number)))


@pytest.mark.parametrize("name", some(METHODS, of=3))
def test_every_method_resumes_from_a_file(name):
    uninterrupted = finish(pipeline(name), batches(LENGTH))
    resumed, went_on = interrupted(lambda: pipeline(name), (7,))
    assert same(went_on, uninterrupted)
    assert same(resumed[7], (uninterrupted[0][7:], uninterrupted[1]))


@pytest.mark.parametrize("name", some(OPTIONS, of=3))
def test_settings_that_add_state_go_on_from_a_file(name):
    def make():
        options = {"optimizer": sgd, **OPTIONS[name]}
        return offbeat.Pipeline(network(), 3, loss=nn.functional.cross_entropy, cuts=[1, 2], seed=3, **options)

    expected = finish(make(), batches(LENGTH))
    resumed, _ = interrupted(make, (7,))
    assert same(resumed[7], (expected[0][7:], expected[1]))


def test_a_checkpoint_of_a_pipeline_exports_as_the_unsplit_model(tmp_path):
    pipe = pipeline("adl")
    for x, y in batches(5):
        pipe.step(x, y)
    through_files(tmp_path, pipe.stage_states())
    assert export(tmp_path, tmp_path / "model.safetensors")["tensors"] == len(pipe.model.state_dict())
    plain = network()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, tensor in pipe.gather().state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
