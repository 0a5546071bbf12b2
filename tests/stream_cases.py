"""Pipelines of engine `streams` without a GPU, and the comparison of their bits with those of `simulate`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import offbeat
from offbeat.engines.streams import Streams
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.methods import METHODS, named

K, N, CPU = 4, 23, torch.device("cpu")


ALIKE = [name for name in METHODS if not named(name).why_not_capturable()]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for wide in (2, 4, 4)]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout) if dropout else nn.Identity())
    return nn.Sequential(*blocks, nn.Sequential(end, nn.Linear(4, 3)))


def batches(n: int = N, poisoned: tuple[int, ...] = (), short: bool = True) -> list:
    generator = torch.Generator().manual_seed(7)
    sizes = [5] * (n - 1) + [3 if short else 5]
    made = [(torch.randn(b, 2, 4, 4, generator=generator), torch.randint(3, (b,), generator=generator)) for b in sizes]
    return [(x * math.nan if t in poisoned else x, y) for t, (x, y) in enumerate(made)]


def sgd(parameters, **options) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, **options)


def on_device(parameters, make=None) -> torch.optim.Optimizer:
    """With a learning rate as on a GPU."""
    made = (make or partial(sgd, fused=True))(parameters)
    for group in made.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], torch.tensor(group["lr"])
    return made


def pipeline(method: offbeat.Method, engine: str = "streams", *, model: nn.Module | None = None, **options):
    stages = 1 if method.workers > 1 else K
    made = Streams(stages, CPU) if engine == "streams" else engine
    return offbeat.Pipeline(
        model or network(),
        stages,
        method=method,
        cuts=[1, 2, 3][: stages - 1],
        loss=nn.functional.cross_entropy,
        engine=made,
        seed=3,
        **{"optimizer": sgd, **options},
    )


def recorded(pipe: offbeat.Pipeline) -> list[RecordedStage]:
    """The recordings of its stages."""
    return [worker.executor for worker in pipe.workers]


def train(pipe: offbeat.Pipeline, data: list, drains: tuple[int, ...] = ()) -> list[str]:
    losses = []
    for t, (x, y) in enumerate(data):
        losses.append(pipe.step(x, y))
        x.fill_(7.0)  # the caller may use its memory again
        if t % 5 == 4 and t < 15:
            losses[-1].item()  # waits for it, and for all that was asked for
        if t in drains:
            pipe.drain()
    pipe.drain()
    return [loss.item().hex() for loss in losses]


def check_same(method: offbeat.Method, *, drains: tuple[int, ...] = (), data=batches, **options) -> offbeat.Pipeline:
    """Streams and simulate end in the same bits, and have told the same on the way."""
    one, other = pipeline(method, "simulate", **options), pipeline(method, **options)
    assert train(one, data(), drains) == train(other, data(), drains)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert one.staleness == other.staleness
    told = [[(r.updates, r.samples, r.versions, r.lr, r.loss, r.error) for r in p.reports()] for p in (one, other)]
    for (*here, loss, error), (*there, loss_there, error_there) in zip(*told, strict=True):
        assert here == there
        assert loss is None or (loss, error) == pytest.approx((loss_there, error_there), rel=1e-6)
    return other
