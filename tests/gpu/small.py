"""A small training on one GPU, for tools that watch every access to its memory: recorded stages, joined kernels, a
short batch, a drain, an evaluation.

    compute-sanitizer python tests/gpu/small.py adl-1f1b bf16-fused
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import offbeat
from offbeat import models
from offbeat.engines.streams import Streams
from offbeat.methods import named

BATCHES, GPU = 30, torch.device("cuda")


def trained(name: str, numbers: str) -> float:
    """The last loss."""
    torch.manual_seed(0)
    model = models.build("resnet20", shape=(3, 16, 16), classes=10)
    x, y = torch.randn(8, 3, 16, 16, device=GPU), torch.randint(10, (8,), device=GPU)
    precision, _, fused = numbers.partition("-")
    pipe = offbeat.Pipeline(
        model, 4, method=named(name, M=2), loss=nn.functional.cross_entropy, sample=x, device=GPU,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True), engine=Streams(4, GPU),
        precision=precision, fuse=bool(fused),
    )  # fmt: skip
    for t in range(BATCHES):
        size = 5 if t == BATCHES // 2 else 8
        loss = pipe.step(x[:size], y[:size])
    pipe.drain()
    pipe.evaluate([(x, y)])
    assert all(stage.eager is None for stage in pipe.stages.values())
    return float(loss)


if __name__ == "__main__":
    print("trained to", trained(*sys.argv[1:]), file=sys.stderr, flush=True)
