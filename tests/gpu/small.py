"""A small training on one GPU, for tools that watch every access to its memory: recorded stages, joined kernels, a
short batch, a drain, an evaluation.

    compute-sanitizer python tests/gpu/small.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import offbeat
from offbeat import models
from offbeat.engines.streams import Streams
from offbeat.methods import named

BATCHES, GPU = 40, torch.device("cuda")


def trained(method: offbeat.Method, *, precision: str, fuse: bool) -> float:
    """The last loss."""
    torch.manual_seed(0)
    model = models.build("resnet20", shape=(3, 16, 16), classes=10)
    x, y = torch.randn(8, 3, 16, 16, device=GPU), torch.randint(10, (8,), device=GPU)
    pipe = offbeat.Pipeline(
        model, 4, method=method, loss=nn.functional.cross_entropy, sample=x, device=GPU, engine=Streams(4, GPU),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True), precision=precision, fuse=fuse,
    )  # fmt: skip
    for t in range(BATCHES):
        size = 5 if t == BATCHES // 2 else 8
        loss = pipe.step(x[:size], y[:size])
    pipe.drain()
    pipe.evaluate([(x, y)])
    assert all(stage.eager is None for stage in pipe.stages.values())
    return float(loss)


if __name__ == "__main__":
    for method in (named("adl", M=2), named("adl-1f1b", M=2)):
        for precision, fuse in (("fp32", False), ("bf16", True)):
            print(method.name, precision, trained(method, precision=precision, fuse=fuse), file=sys.stderr, flush=True)
