"""The mean of a window over batches or over samples, where a batch is short."""

from __future__ import annotations

import pytest
import torch
from captured import capture
from torch import nn

import offbeat
from offbeat.engines.streams import Streams

SIZES = (4, 2, 2, 3, 4, 4, 1, 4, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches(sizes=SIZES):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, generator=draw).double(), torch.randn(size, 1, generator=draw).double()) for size in sizes
    ]


def pipeline(method, K, weighting, engine=lambda: "simulate"):
    return offbeat.Pipeline(
        network(),
        K,
        method=method,
        loss=nn.functional.mse_loss,
        engine=engine(),
        weighting=weighting,
        sample=torch.zeros(1, 3).double(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def streams():
    return Streams(3, torch.device("cpu"))


def trained(method, K, weighting, *, engine=lambda: "simulate", stop=None):
    pipe = pipeline(method, K, weighting, engine)
    for t, (x, y) in enumerate(batches()):
        pipe.step(x, y)
        if t == stop:
            state = pipe.stage_states()
            pipe = pipeline(method, K, weighting, engine)
            pipe.load_stage_states(state, batches=t + 1)
    return [parameter.detach().clone() for parameter in pipe.drain().parameters()]


def literal(weighting):
    """Plain PyTorch: the gradient of three batches at a time."""
    model, M = network(), 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = batches()
    for start in range(0, len(given), M):
        window = given[start : start + M]
        optimizer.zero_grad()
        if weighting == "samples":
            x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
            nn.functional.mse_loss(model(x), y).backward()
        else:
            (sum(nn.functional.mse_loss(model(x), y) for x, y in window) / M).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("weighting", ["batches", "samples"])
@pytest.mark.parametrize(("method", "K"), [(offbeat.BP(M=3), 1), (offbeat.BP(M=3), 3), (offbeat.ADL(M=3), 1)])
def test_without_staleness_a_window_is_the_mean_over_batches_or_samples(method, K, weighting):
    for ours, theirs in zip(trained(method, K, weighting), literal(weighting), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_batches_of_one_size_have_the_same_bits_either_way():
    same = [(x[:1], y[:1]) for x, y in batches()]

    def run(weighting):
        pipe = pipeline(offbeat.ADL(M=2), 3, weighting)
        for x, y in same:
            pipe.step(x, y)
        return [parameter.detach() for parameter in pipe.drain().parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("batches"), run("samples"), strict=True))


@pytest.mark.parametrize("method", [offbeat.ADL(M=3), offbeat.BP(M=3), offbeat.ADL(M=2, window="aligned")])
def test_recorded_stages_weigh_as_simulated_ones(method, monkeypatch):
    wanted = trained(method, 3, "samples")
    capture(monkeypatch)
    found = trained(method, 3, "samples", engine=streams)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(wanted, trained(method, 3, "batches"), strict=True))


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_state_keeps_the_weights_of_its_open_window_and_batches_in_flight(stop, recorded, monkeypatch):
    whole = trained(offbeat.ADL(M=3), 3, "samples")
    if recorded:  # after loading, a short batch may be the first to come
        capture(monkeypatch)
    engine = streams if recorded else lambda: "simulate"
    again = trained(offbeat.ADL(M=3), 3, "samples", stop=stop, engine=engine)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_an_unknown_weighting_is_refused():
    with pytest.raises(offbeat.UserError, match="did you mean 'samples'"):
        trained(offbeat.ADL(M=2), 1, "sample")
