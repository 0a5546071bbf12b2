"""Models of Hugging Face that tie their embedding to their output layer, trained in stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tied
import torch
from torch import nn

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "partitioning"))

import hugging_face as hf

import offbeat
from offbeat.engines.simulate import Simulate

NAMES = ["gpt2", "t5", "bert with a language model head"]


def build(name: str) -> nn.Module:
    """In float64 and without dropout, which stages draw from streams of their own; without caches, as stages are."""
    model = hf.build(name).double().eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def data(name: str) -> list:
    rows = (3, 3, 2, 3, 1, 3, 3)
    return [(hf.batch(name, n, length=10 + t % 2), torch.zeros(n)) for t, n in enumerate(rows)]


def scored(model: nn.Module, x: dict, y: object) -> torch.Tensor:
    return model(**x).loss


def pipeline(name: str, K: int, method: offbeat.Method, **options: object) -> offbeat.Pipeline:
    sample = data(name)[0][0]
    options = {"loss": lambda output, y: output.loss, "optimizer": tied.sgd, "sample": sample, **options}
    return offbeat.Pipeline(build(name), K, method=method, trace="sample", **options)


def train(pipe: offbeat.Pipeline, batches: list) -> dict:
    for x, y in batches:
        pipe.step(x, y)
    return pipe.drain().state_dict()


@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_back_propagation_is_that_of_the_unsplit_model_bit_for_bit(name, K):
    model = build(name)
    optimizer = tied.sgd(model.parameters())
    for x, y in data(name):
        optimizer.zero_grad()
        scored(model, x, y).backward()
        optimizer.step()
    expected = model.state_dict()
    found = train(pipeline(name, K, offbeat.BP()), data(name))
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), f"{key} differs by {(found[key] - tensor).abs().max()}"
    build(name).load_state_dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_adl_is_the_literal_serial_computation(name):
    pipe = pipeline(name, 4, offbeat.ADL(M=2))
    expected = tied.adl(build(name), pipe.parts, 2, data(name), scored)
    found = train(pipe, data(name))
    for key, tensor in expected.items():
        assert (found[key] - tensor).abs().max() <= 1e-12, key


def test_shuffled_stages_train_the_bits_of_the_simulator():
    method = offbeat.ADL(M=2)
    one, other = (train(pipeline("t5", 3, method, engine=Simulate(3, shuffle=n)), data("t5")) for n in (None, 4))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
