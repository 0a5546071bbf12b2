"""Warnings name the line of the user's script that called the package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat

sgd = partial(torch.optim.SGD, lr=0.1)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def pipeline(**options) -> offbeat.Pipeline:
    given = {"model": model(), "K": 2, "method": offbeat.ADL(), "loss": nn.functional.cross_entropy, "optimizer": sgd}
    return offbeat.Pipeline(**{**given, **options})


def data(count: int = 3) -> list:
    return [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(count)]


def uneven() -> None:
    layers = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 1), nn.Linear(1, 1))
    pipeline(model=layers, sample=torch.ones(4, 400))


def without_a_batch() -> None:
    pipeline(method="auto")


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x + 1


def not_fused() -> None:
    pipeline(model=nn.Sequential(nn.Linear(4, 4), DependsOnValues(), nn.Linear(4, 2)), cuts=[2], fuse=True)


def schedule_not_used_up() -> None:
    pipe = pipeline(scheduler=lambda made: torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=50))
    pipe.fit(data())


def mostly_synchronous() -> None:
    pipe = pipeline(method="auto", K=3, M=1)
    pipe.fit(data())


CASES: dict[Callable, tuple[type[Warning], str]] = {
    uneven: (offbeat.Unbalanced, "return offbeat.Pipeline("),
    without_a_batch: (offbeat.LateGradients, "return offbeat.Pipeline("),
    not_fused: (offbeat.NotFused, "return offbeat.Pipeline("),
    schedule_not_used_up: (offbeat.ScheduleLength, "pipe.fit("),
    mostly_synchronous: (offbeat.ScheduleLength, "pipe.fit("),
}


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_a_warning_names_the_line_that_called_the_package(call):
    category, text = CASES[call]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    named = [each for each in found if each.category is category]
    assert named, [str(each.message) for each in found]
    lines = Path(__file__).read_text().splitlines()
    for each in named:
        assert each.filename == __file__ == inspect.getfile(call)
        assert text in lines[each.lineno - 1]
