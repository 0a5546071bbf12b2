"""How many bytes a stage holds, counted rather than asked from an allocator, so that any device and engine can tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def size(*contents: Any) -> int:
    """Bytes of all tensors of some pytrees, each place in memory counted once.

    By where tensors begin and not by their storages: what came over a link shares one with its whole message.
    """
    places: dict[tuple[int, torch.device], int] = {}
    for leaf in pytree.tree_leaves(contents):
        if isinstance(leaf, Tensor):
            place = leaf.data_ptr(), leaf.device
            places[place] = max(places.get(place, 0), leaf.nbytes)
    return sum(places.values())


class Saved:
    """The tensors that autograd keeps for the backward of one forward, other than parameters and buffers."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.places: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor):
            yield

    def _see(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.known:
            self.places[tensor.data_ptr()] = max(self.places.get(tensor.data_ptr(), 0), tensor.nbytes)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.places.values())
