"""Tied weights in captured graphs: the bits of the simulator."""

from __future__ import annotations

import pytest
import torch
from tied import LR, batches, network, pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
METHODS = [
    "bp",
    "adl:M=2",
    "adl:M=2,weights=hybrid",
    "adl:M=2,weights=replay",
    "adl:M=2,recompute=yes",
    "dsp",
    "pipemare",
]


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=1e-3, fused=True)


@pytest.mark.parametrize("method", METHODS)
def test_captured_stages_train_the_bits_of_the_simulator(method):
    found = []
    for engine in ("simulate", "streams"):
        pipe = pipeline(network().cuda(), 3, method, engine=engine, device="cuda", optimizer=sgd)
        for x, y in batches(29):
            pipe.step(x.cuda(), y.cuda())
        found.append({name: tensor.clone() for name, tensor in pipe.drain().state_dict().items()})
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
