"""What a model returns, and what its parts return to each other, comes out of the stages in the same classes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from offbeat.partitioning import partition


@dataclass
class Scores:
    loss: Tensor
    hidden: Tensor
    note: str = "plain"


@dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Tensor


class Named(NamedTuple):
    sum: Tensor
    hidden: Tensor


class Returning(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.output(x)


RETURNED = {
    "dataclass": lambda h: Scores(h.sum(), h),
    "frozen dataclass": lambda h: Frozen(h, h + 1),
    "ordered dict": lambda h: OrderedDict(sum=h.sum(), hidden=h),
    "named tuple": lambda h: Named(h.sum(), h),
    "nested": lambda h: (Scores(h.sum(), h), {"all": [h, OrderedDict(last=Frozen(h, h))]}),
}


def through(stages: list[nn.Module], x: Any) -> Any:
    for stage in stages:
        x = stage(x)
    return x


def same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
        return
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if hasattr(a, "__dataclass_fields__"):
        a, b = list(vars(a).values()), list(vars(b).values())
    if isinstance(a, tuple | list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("way", ["fx", "sample"])
@pytest.mark.parametrize("kind", RETURNED)
def test_stages_return_objects_of_the_models_classes(kind, way):
    model, x = Returning(RETURNED[kind]), torch.randn(3, 4)
    made = partition(model, 2, x, trace=way)
    assert made.trace == way
    same(through(made.stages, x), model(x))


@pytest.mark.parametrize("way", ["fx", "sample"])
def test_an_output_of_transformers_keeps_its_class(way):
    outputs = pytest.importorskip("transformers").modeling_outputs
    model = Returning(lambda h: outputs.BaseModelOutputWithPooling(last_hidden_state=h, pooler_output=h[:, 0]))
    x = torch.randn(3, 4)
    found = through(partition(model, 2, x, trace=way).stages, x)
    assert type(found) is outputs.BaseModelOutputWithPooling
    assert torch.equal(found.pooler_output, found[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Frozen:
        self.calls = int(x.abs().sum() > -1)  # reads values: called as a whole
        return Frozen(torch.tanh(self.layer(x)), x)


class OfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            result = block(x)
            x = result.first + 0.5 * result.second
        return x


@pytest.mark.parametrize("way", ["auto", "sample"])
def test_blocks_that_return_dataclasses_are_units(way):
    model, x = OfBlocks(), torch.randn(3, 4)
    made = partition(model, 4, x, trace=way)
    assert torch.equal(through(made.stages, x), model(x))


def test_a_pipeline_of_blocks_that_return_dataclasses_trains():
    loss, optimizer = F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1)
    pipe = offbeat.Pipeline(OfBlocks(), 4, method="adl:M=2", loss=loss, optimizer=optimizer)
    losses = [float(pipe.step(torch.ones(3, 4), torch.zeros(3, 4))) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_the_loss_in_a_dataclass_is_the_models_own():
    torch.manual_seed(0)
    model = Returning(lambda h: Scores(F.mse_loss(h, torch.ones_like(h)), h))
    pipe = offbeat.Pipeline(model, K=2, method="bp", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    losses = [float(pipe.step({"x": torch.ones(2, 4)})) for _ in range(5)]
    assert losses[-1] < losses[0]
