"""A small training on one GPU, for tools that watch every access to its memory, a hundred times slower than it is:
recorded stages, joined kernels, a short batch, whole ticks launched at once, a drain, an evaluation.

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

BATCHES, SHORT = 32, 1  # ticks come again, and are launched at once, from batch 26 on
GPU = torch.device("cuda")


def trained(name: str, numbers: str, device: torch.device = GPU) -> float:
    """The last loss."""
    torch.manual_seed(0)
    model = models.build("resnet8", shape=(3, 8, 8), classes=10)
    x, y = torch.randn(8, 3, 8, 8, device=device), torch.randint(10, (8,), device=device)
    precision, _, fused = numbers.partition("-")
    pipe = offbeat.Pipeline(
        model,
        4,
        method=named(name, M=2),
        loss=nn.functional.cross_entropy,
        sample=x,
        device=device,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        engine=Streams(4, device),
        precision=precision,
        fuse=bool(fused),
    )
    for t in range(BATCHES):
        size = 5 if t == SHORT else 8
        loss = pipe.step(x[:size], y[:size])
    pipe.drain()
    pipe.evaluate([(x, y)])
    assert all(worker.executor.eager is None for worker in pipe.workers)
    assert any(pipe.engine.launch_queue.joined.values())
    return float(loss)


if __name__ == "__main__":
    print("trained to", trained(*sys.argv[1:]), file=sys.stderr, flush=True)
