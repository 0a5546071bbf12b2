"""Copies that share memory until one side is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.core.lazy_copy import lazy_copy


def loaded(folder):
    torch.save(torch.arange(4.0), folder / "x.pt")
    return torch.load(folder / "x.pt")


SOURCES = {
    "torch": lambda folder: torch.arange(4.0),
    "a view": lambda folder: torch.arange(8.0)[2:6],
    "numpy": lambda folder: torch.from_numpy(np.arange(4.0)),
    "a file": loaded,
    "shared memory": lambda folder: torch.arange(4.0).share_memory_(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_copy_has_memory_of_its_own_once_one_side_is_written(source, tmp_path):
    one = SOURCES[source](tmp_path)
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
