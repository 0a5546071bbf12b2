"""Deferred BatchNorm: the running statistics of a batch do not depend on the micro-batches that it came in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offbeat

SIZES = (8, 7, 3, 5, 2)  # not multiples of m, and fewer samples than m


def data(*, shift: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            (shift + scale * torch.randn(b, 3, 4, 4, generator=generator, dtype=torch.float64)).to(dtype),
            torch.randint(3, (b,), generator=generator),
        )
        for b in SIZES
    ]


def network(norm: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The layer comes first, so that what it sees is the data."""
    torch.manual_seed(0)
    model = nn.Sequential(norm, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    return model.to(dtype)


def trained(norm: nn.Module, batches: list[tuple[Tensor, Tensor]], *, m: int = 3, recompute: bool = False):
    model = network(norm, batches[0][0].dtype)
    pipe = offbeat.Pipeline(
        model,
        2,
        method=offbeat.GPipe(m, recompute=recompute),
        loss=nn.functional.cross_entropy,
        cuts=[3],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    for t, (x, y) in enumerate(batches):
        pipe.step(x, y)
        if t == 1:
            pipe.evaluate(batches)  # leaves no trace
    pipe.drain()
    return model


def plain(norm: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    norm = norm.to(batches[0][0].dtype)
    for x, _ in batches:
        norm(x)
    return norm


def same_statistics(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("m", [2, 3, 6])
def test_statistics_are_those_of_whole_batches_each_counted_once(m, momentum, recompute):
    model = trained(nn.BatchNorm2d(3, momentum=momentum), data(), m=m, recompute=recompute)
    same_statistics(model[0], plain(nn.BatchNorm2d(3, momentum=momentum), data()), rtol=0, atol=1e-12)
    assert model[0].momentum == momentum
    assert int(model[2].num_batches_tracked) == len(SIZES)


def test_a_variance_that_is_small_beside_the_mean_is_not_lost_in_rounding():
    far = data(shift=300.0, scale=0.1, dtype=torch.float32)
    expected = plain(nn.BatchNorm2d(3, momentum=None), far)
    assert 0.005 < float(expected.running_var.mean()) < 0.02
    same_statistics(trained(nn.BatchNorm2d(3, momentum=None), far)[0], expected, rtol=1e-3, atol=0)


def test_a_layer_in_evaluation_mode_keeps_its_statistics():
    norm = nn.BatchNorm2d(3).eval()
    model = trained(norm, data())
    same_statistics(model[0], nn.BatchNorm2d(3).double(), rtol=0, atol=0)
    assert int(model[2].num_batches_tracked) == len(SIZES)


def test_a_layer_without_statistics_trains():
    model = trained(nn.BatchNorm2d(3, track_running_stats=False), data())
    assert model[0].running_mean is None
    assert int(model[2].num_batches_tracked) == len(SIZES)


def test_in_half_precision_sums_are_made_in_single():
    low = data(shift=3.0, dtype=torch.bfloat16)
    model = trained(nn.BatchNorm2d(3, momentum=1.0), low)
    x = low[-1][0].double()
    torch.testing.assert_close(model[0].running_mean.double(), x.mean((0, 2, 3)), rtol=2**-8, atol=0)
    torch.testing.assert_close(model[0].running_var.double(), x.var((0, 2, 3)), rtol=2**-8, atol=0)
