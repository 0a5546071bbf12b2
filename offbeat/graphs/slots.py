"""The slots of a stage: memory of one batch each, with the work that was recorded on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from offbeat.core.in_flight import InFlight
from offbeat.core.weights import Stash, Version, WeightPolicy
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.graphs.ring import MAX_LEAD, Ring

NEVER = -(10**9)  # a turn before all others
NO_VERSION = Version(None)


@dataclass(eq=False, slots=True)
class Slot:
    """The memory of one batch, and the operations that were recorded on it with the weights at one address.

    inputs, targets     where a batch is copied to; targets at the last stage
    output              at the last stage the loss
    input_gradients     what the stage below gets
    forward, backward   recorded on what is in inputs, or in the gradients from above
    forwards, backwards the same after a copy of a neighbour's message, by the id of the message
    forwarded           turn of its last forward; backwarded: and of its last backward
    """

    batch: InFlight
    weights: Version
    samples: int
    inputs: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    output: Any = None
    input_gradients: list[Tensor | None] = field(default_factory=list)
    forward: RecordedOperation | None = None
    backward: RecordedOperation | None = None
    forwards: dict[int, RecordedOperation] = field(default_factory=dict)
    backwards: dict[int, RecordedOperation] = field(default_factory=dict)
    forwarded: int = NEVER
    backwarded: int = NEVER


class Slots:
    """The ring of slots: which are free, and which hold batches in flight.

    groups      all slots, in groups that share the memory of one version, in the order in which a program uses them
    free        free slots by the memory of their weights
    used        slots of the batches in flight, by batch
    bypassed    slots whose turn it was when a batch came that does not fit, by batch
    turn        forwards so far
    """

    def __init__(self, ring: Ring, weights: WeightPolicy) -> None:
        self.ring, self.weights = ring, weights
        self.turn = 0
        self.clear()

    def clear(self) -> None:
        """Drop all slots."""
        self.groups: list[tuple[Version, list[Slot]]] = []
        self.free: dict[int, deque[Slot]] = {}
        self.used: dict[int, Slot] = {}
        self.bypassed: dict[int, Slot] = {}
        if isinstance(self.weights, Stash):
            self.weights.reuse([])

    def __iter__(self) -> Iterator[Slot]:
        return (slot for _, slots in self.groups for slot in slots)

    def fill(self, groups: list[tuple[Version, list[Slot]]]) -> None:
        """Use these slots."""
        self.groups = groups
        self._rewind()

    def _rewind(self) -> None:
        """All slots are free, in their first order."""
        self.free = {id(version.tensors): deque(slots) for version, slots in self.groups}
        if isinstance(self.weights, Stash):
            self.weights.reuse([version.tensors for version, _ in self.groups if version.tensors is not None])

    def restart(self) -> None:
        """All batches are done, and the neighbours have read everything."""
        for slots in self.free.values():
            for slot in slots:
                slot.forwarded = slot.backwarded = NEVER
        self._rewind()

    def take(self, version: Version, *, elsewhere: bool = True) -> Slot | None:
        """A slot with the memory of that version that nobody reads any more, or one with a copy of it elsewhere."""
        slots = self.free.get(id(version.tensors))
        if slots:
            slot = slots[0]
            if slot.forwarded <= self.turn - MAX_LEAD and slot.backwarded <= self.turn - self.ring.rest:
                slot.batch.version = version
                return slots.popleft()
        if elsewhere and type(self.weights) is Stash and self.weights.room() is not None:
            # While a stage fills, a version serves more than M batches.
            return self.take(self.weights.again_elsewhere(), elsewhere=False)
        return None

    def release(self, slot: Slot) -> None:
        """The batch of the slot is done; its version may be dropped."""
        slot.backwarded = self.turn
        self.free[id(slot.weights.tensors)].append(slot)
        slot.batch.version, slot.batch.kept = NO_VERSION, None
