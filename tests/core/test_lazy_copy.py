"""Copies that share memory until one side is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import offbeat
from offbeat.core.lazy_copy import lazy_copy

SOURCES = {
    "torch": lambda: torch.arange(4.0),
    "a view": lambda: torch.arange(8.0)[2:6],
    "numpy": lambda: torch.from_numpy(np.arange(4.0)),
    "shared memory": lambda: torch.arange(4.0).share_memory_(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_copy_has_memory_of_its_own_once_one_side_is_written(source):
    one = SOURCES[source]()
    before = one.tolist()
    other = lazy_copy(one)
    other.add_(1)
    assert one.tolist() == before
    third = lazy_copy(one)
    one.mul_(2)
    assert third.tolist() == before
    assert other.tolist() == [value + 1 for value in before]
    assert len({one.data_ptr(), other.data_ptr(), third.data_ptr()}) == 3


def test_gradients_pass_through_a_copy():
    leaf = torch.arange(3.0, requires_grad=True)
    lazy_copy(leaf).mul_(3).sum().backward()
    assert leaf.grad.tolist() == [3, 3, 3]


def test_a_batch_from_a_file_can_be_trained_and_evaluated(tmp_path):
    torch.save((torch.randn(4, 3), torch.randn(4, 2)), tmp_path / "batch.pt")
    batch = torch.load(tmp_path / "batch.pt")
    pipe = offbeat.Pipeline(
        [torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 2)), torch.nn.Linear(2, 2)],
        method=offbeat.ADL(M=2),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    before = batch[0].clone()
    pipe.fit([batch] * 4)
    assert pipe.evaluate([batch])["samples"] == 4
    assert torch.equal(batch[0], before)
