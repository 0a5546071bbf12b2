"""Which samples make up which batch: seeded shuffling and the cutting of an epoch into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from offbeat.errors import UserError
from offbeat.seeds import derive

Batches = Iterator[tuple[Tensor, Tensor]]


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A random generator for one purpose; the global one is never used."""
    stream = torch.Generator(device="cpu")
    stream.manual_seed(derive(purpose, *numbers))
    return stream


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """The fresh permutation of the samples for one epoch, int64 (samples,)."""
    return torch.randperm(samples, generator=generator("order", seed, epoch), device="cpu")


def slices(
    samples: int, *, batch_size: int, skip: int = 0, drop_last: bool = False, share: tuple[int, int] = (0, 1)
) -> list[slice]:
    """The batches of one epoch as slices of its order, without its first `skip` samples; the short last batch is
    included unless `drop_last`. A share (r, R) has the batches r, r + R, ..., equally many for every r.

    >>> slices(10, batch_size=4, skip=4), slices(10, batch_size=4, drop_last=True)
    ([slice(4, 8, None), slice(8, 10, None)], [slice(0, 4, None), slice(4, 8, None)])
    >>> slices(10, batch_size=2, share=(1, 2))
    [slice(2, 4, None), slice(6, 8, None)]
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size={batch_size}: give a whole number of at least 1")
    if not isinstance(skip, int) or skip < 0:
        raise UserError(f"skip={skip}: give the number of samples to skip, at least 0")
    end = samples - batch_size + 1 if drop_last else samples
    found = [slice(begin, min(begin + batch_size, samples)) for begin in range(skip, end, batch_size)]
    replica, replicas = share
    return found[: len(found) // replicas * replicas][replica::replicas]


class CutIntoBatches(Protocol):
    """A data set that makes its batches from slices: of the order of an epoch, or of the test samples."""

    @property
    def train_samples(self) -> int: ...
    @property
    def test_samples(self) -> int: ...
    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches: ...
    def test_batches(self, parts: list[slice]) -> Batches: ...


class Passes:
    """The passes over such a data set, as `offbeat.data.DataSet` describes them."""

    def train(
        self: CutIntoBatches,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        skip: int = 0,
        drop_last: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> Batches:
        """One shuffled and augmented epoch without its first `skip` samples."""
        parts = slices(self.train_samples, batch_size=batch_size, skip=skip, drop_last=drop_last, share=share)
        return self.train_batches(parts, seed=seed, epoch=epoch)

    def test(self: CutIntoBatches, *, batch_size: int) -> Batches:
        """The test samples once, in order."""
        return self.test_batches(slices(self.test_samples, batch_size=batch_size))
