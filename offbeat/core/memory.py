"""Bytes that a stage holds, counted by its tensors: the same on every device and engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def size(*contents: Any) -> int:
    """Bytes of all tensors of some pytrees, each address counted once.

    By where tensors begin and not by their storages: a received tensor shares its storage with its whole message.
    """
    places: dict[tuple[int, torch.device], int] = {}
    for leaf in pytree.tree_leaves(contents):
        if isinstance(leaf, Tensor):
            place = leaf.data_ptr(), leaf.device
            places[place] = max(places.get(place, 0), leaf.nbytes)
    return sum(places.values())


class SavedTensors:
    """The tensors that autograd keeps for the backward of one forward, other than parameters and buffers."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.places: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.known:
            self.places[tensor.data_ptr()] = max(self.places.get(tensor.data_ptr(), 0), tensor.nbytes)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.places.values())
