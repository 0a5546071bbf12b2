"""Which samples make up which batch: seeded shuffling and the cutting of an epoch into batches."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.errors import UserError
from offbeat.seeds import derive


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A random stream of its own; the global one is never used."""
    stream = torch.Generator(device="cpu")
    stream.manual_seed(derive(purpose, *numbers))
    return stream


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """The fresh permutation of the samples for one epoch, int64 (samples,)."""
    return torch.randperm(samples, generator=generator("order", seed, epoch), device="cpu")


def slices(samples: int, *, batch_size: int, start: int = 0) -> list[slice]:
    """The batches of one epoch as slices of its order, from batch `start` on, the short last one included.

    >>> slices(10, batch_size=4, start=1)
    [slice(4, 8, None), slice(8, 10, None)]
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size {batch_size}: give a whole number of at least 1")
    if not isinstance(start, int) or start < 0:
        raise UserError(f"start {start}: give the number of batches to skip, at least 0")
    first = range(start * batch_size, samples, batch_size)
    return [slice(begin, min(begin + batch_size, samples)) for begin in first]
