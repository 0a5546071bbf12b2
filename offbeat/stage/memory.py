"""How many bytes a stage holds, counted rather than asked from an allocator, so that any device and engine can tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def size(*contents: Any) -> int:
    """Bytes of the storages behind all tensors of some pytrees, each counted once."""
    storages = {}
    for leaf in pytree.tree_leaves(contents):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            storages[storage.data_ptr(), leaf.device] = storage.nbytes()
    return sum(storages.values())


class Saved:
    """The tensors that autograd keeps for the backward of one forward, other than parameters and buffers."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.storages: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor):
            yield

    def _see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())
