"""Recorded copies of what neighbours send: mostly the memory of one of their slots, so that the same tensors recur."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.graphs.capture import Recorded
from offbeat.graphs.launch_queue import LaunchQueue, RecordedOperation
from offbeat.graphs.recorder import Recorder


class NeighbourCopies:
    """Puts copies of a neighbour's message before the operation that reads it.

    recurring   messages that have been sent more than once, by id; held, so that nothing else gets this id
    """

    def __init__(self, recorder: Recorder, launch_queue: LaunchQueue) -> None:
        self.recorder, self.launch_queue = recorder, launch_queue
        self.clear()

    def clear(self) -> None:
        """Drop all copies."""
        self.recurring: dict[int, Any] = {}
        self.sent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # tensors sent at least once, by id
        self.copies: dict[tuple[int, int], Recorded] = {}  # by the ids of source and place

    def before(
        self,
        operation: RecordedOperation,
        places: list[Tensor],
        message: Any,
        known: dict[int, RecordedOperation],
    ) -> RecordedOperation:
        """The operation after copies of the message to `places`; added to `known` where the message recurs, else copied
        now."""
        tensors = tensors_of(message) if places else []
        if not all(self.sent.get(id(tensor)) is tensor for tensor in tensors):
            self.launch_queue.flush()
            for place, tensor in zip(places, tensors, strict=True):
                self.sent[id(tensor)] = tensor
                place.copy_(tensor.detach())
            return operation
        copies = [self._copy(place, tensor) for place, tensor in zip(places, tensors, strict=True)]
        self.recurring[id(message)] = message
        known[id(message)] = made = RecordedOperation(*copies, *operation.pieces, kind=operation.kind)
        return made

    def _copy(self, place: Tensor, tensor: Tensor) -> Recorded:
        key = id(tensor), id(place)
        if key not in self.copies:
            with self.recorder.recording():
                self.copies[key] = self.recorder.record(partial(place.copy_, tensor.detach()))
        return self.copies[key]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
