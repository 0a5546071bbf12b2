"""Cuts: exact, deterministic, and named as in the unsplit model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat import models
from offbeat.errors import UserError
from offbeat.partitioning import balanced, cut, forward_flops, split


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_balanced_cuts_equal_exhaustive_search(costs, data):
    K = data.draw(st.integers(1, len(costs)))

    def largest(cuts) -> int:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    found = balanced(costs, K)
    assert len(found) == K - 1
    assert all(a < b for a, b in itertools.pairwise([0, *found, len(costs)]))
    assert largest(found) == min(largest(c) for c in itertools.combinations(range(1, len(costs)), K - 1))


def test_flops_are_counted_without_computing():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10))
    assert forward_flops(layers, torch.empty(2, 3, 4, 4)) == [2 * 2 * 8 * 16 * 27, 0, 2 * 2 * 128 * 10]
    assert layers[0].weight.device.type == "cpu"


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_the_pieces_are_the_model(K):
    torch.manual_seed(0)
    model = models.build("resnet20").eval()
    x = torch.randn(2, 3, 32, 32)
    parts = split(model, cut(model, K, sample=x))
    assert len(parts) == K
    z = x
    for part in parts:
        z = part(z)
    assert torch.equal(z, model(x))
    assert [name for part in parts for name in part.state_dict()] == list(model.state_dict())


def test_the_cut_of_resnet56_balances_flops():
    model = models.build("resnet56")
    flops = forward_flops(model, torch.empty(1, 3, 32, 32))
    edges = [0, *balanced(flops, 2), len(flops)]
    stages = [sum(flops[a:b]) for a, b in itertools.pairwise(edges)]
    assert min(stages) / max(stages) > 0.9


def test_a_model_that_is_no_sequence_cannot_be_cut():
    with pytest.raises(UserError, match=r"not a plain nn\.Sequential"):
        cut(nn.Linear(2, 2), 2)
