"""Bytes that a stage holds, counted by its tensors: the same on every device and engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Storage = tuple[torch.device, int]


def storage_of(tensor: Tensor) -> Storage:
    """The device and the address of a tensor's storage.

    Without an internal function of torch, `data_ptr` copies what two tensors share until one is written (lazy_copy.py).
    """
    address = getattr(torch._C, "_data_address", None)
    return tensor.device, address(tensor) if address else tensor.untyped_storage().data_ptr()


class TensorSizes:
    """Bytes of tensors, each memory once; of those in storages that are `known`, and of sparse ones, none."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.known = {storage_of(tensor) for tensor in known if tensor.layout is torch.strided}
        self.places: dict[tuple[Storage, int], int] = {}  # by where they begin
        self.saved: dict[Storage, int] = {}

    def add(self, *contents: Any) -> None:
        """Add the tensors of some pytrees, without the rest of their storages: a received tensor shares its storage
        with its whole message."""
        for leaf in pytree.tree_leaves(contents):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                place = storage_of(leaf), int(leaf.storage_offset()) * leaf.element_size()
                if place[0] not in self.known:
                    self.places[place] = max(self.places.get(place, 0), leaf.nbytes)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: add the storages that autograd keeps for its backward, besides those added before."""
        counted = self.known | {storage for storage, _ in self.places}

        def note(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and (storage := storage_of(tensor)) not in counted:
                self.saved[storage] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    @property
    def bytes(self) -> int:
        return sum(self.places.values()) + sum(self.saved.values())


def size(*contents: Any) -> int:
    """Bytes of all tensors of some pytrees."""
    sizes = TensorSizes()
    sizes.add(*contents)
    return sizes.bytes
