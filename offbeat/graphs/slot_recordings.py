"""Records the forward and the backward of a stage on every slot."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.in_flight import InFlight
from offbeat.core.layout import dense_copy
from offbeat.core.metrics import batch_size
from offbeat.core.stage import Stage
from offbeat.core.weights import Stash, Version
from offbeat.core.window import FixedSums
from offbeat.graphs.device_guard import DeviceGuard
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.graphs.neighbour_copies import tensors_of
from offbeat.graphs.recorder import Recorder
from offbeat.graphs.ring import Ring
from offbeat.graphs.slots import Slot

NO_BATCH = -1  # the index of the batch in a recording: none that is left out


class SlotRecordings:
    """Makes the slots of a stage, with what is recorded on them."""

    def __init__(self, stage: Stage, window: FixedSums, *, guard: DeviceGuard, recorder: Recorder) -> None:
        self.stage, self.network, self.weights = stage, stage.network, stage.weights
        self.window, self.guard, self.recorder = window, guard, recorder
        self.input_gradients: list[Tensor | None] = []  # of a batch, for their shapes
        self.output: Any = None  # of a batch, for its shape
        self.pool: Any = None  # of all recordings of a stage that recomputes

    def _new_slot(self, x: Any, target: Any, version: Version) -> Slot:
        """A slot with copies of that batch."""
        network = self.network
        leaves, structure = pytree.tree_flatten(pytree.tree_map_only(Tensor, dense_copy, x))
        samples = batch_size(target, x)
        if network.last:
            target = pytree.tree_map_only(Tensor, dense_copy, target)
        batch = InFlight(leaves, structure, target, version, 0, False, network.random.state)
        return Slot(batch, version, samples)

    def _new_version(self) -> Version:
        copies = isinstance(self.weights, Stash)
        return Version(self.weights.sources.snapshot()) if copies else self.weights.current()

    def warm_up(self, x: Any, target: Any) -> str | None:
        """Do the work to be recorded once, without a trace: libraries choose their algorithms, and sums of gradients
        are allocated. The reason why it cannot be recorded, if there is one."""
        network = self.network
        slot = self._new_slot(x, target, version := self._new_version())
        memory = self.stage.optimization.corrections.place.memory
        buffers = [buffer.clone() for buffer in network.module.buffers()]
        before = {p: {key: tensor.clone() for key, tensor in kept.items()} for p, kept in memory.items()}
        try:
            with network.random.drawing(replay=slot.batch.random), network.recorded():
                with network.measured(NO_BATCH, version, slot.batch):
                    self.forward(slot)
                ones = None if network.last else _ones(slot.output)
                taken, below, _ = self.stage.differentiate(NO_BATCH, slot.batch, version, ones)
                drawn = network.random.drawn(slot.batch.random)
        finally:
            for buffer, old in zip(network.module.buffers(), buffers, strict=True):
                buffer.data.copy_(old)
            for parameter, kept in memory.items():
                for key, tensor in kept.items():
                    old_values = before.get(parameter, {})
                    tensor.copy_(old_values[key]) if key in old_values else tensor.zero_()
            self.guard.counters.clear()
        self.window.recorded = self.window.fix(taken)
        self.input_gradients = [None if gradient is None else dense_copy(gradient) for gradient in below]
        self.output = pytree.tree_map_only(Tensor, dense_copy, slot.output)
        if slot.batch.buffers:
            return "its repeated forwards compute with buffers that it writes"
        return "it draws random numbers" if drawn else None

    def record_forwards(self, x: Any, target: Any, ring: Ring) -> list[tuple[Version, list[Slot]]]:
        """The slots of the ring, each with its forward, in groups that share the memory of one version.

        Each forward has a pool of its own: what it leaves there must last until its backward, while others run. One
        that is repeated at the backward leaves nothing: its output is outside, and all share the memory of one batch.
        """
        self.pool = self.recorder.new_pool() if self.weights.recomputes else None
        groups = []
        for _ in range(ring.groups):
            version = self._new_version()
            slots = [self._new_slot(x, target, version) for _ in range(ring.each)]
            for slot in slots:
                targets = slot.batch.target if self.network.last else []
                slot.inputs, slot.targets = (  # aliases, so that autograd does not see what is written there
                    [place.data for place in tensors_of(content)] for content in (slot.batch.inputs, targets)
                )
                slot.input_gradients = [None if g is None else torch.empty_like(g) for g in self.input_gradients]
                if self.weights.recomputes:
                    slot.output = pytree.tree_map_only(Tensor, dense_copy, self.output)
                recorded = self.recorder.record(partial(self.forward, slot), self.pool or self.recorder.new_pool())
                slot.forward = RecordedOperation(recorded, kind="forward")
            groups.append((version, slots))
        return groups

    def record_backwards(self, slots: Iterable[Slot], gradients: list[Tensor | None] | None) -> list[Tensor]:
        """Record the backward of every slot, for gradients from above such as these; where it will read them.

        They leave nothing in their pool, since sums and gradients of inputs are outside of it.
        """
        into = gradients
        if gradients is not None:
            into = [None if g is None else dense_copy(self.network.to_device(g)) for g in gradients]
        pool = self.pool or self.recorder.new_pool()
        with self.recorder.recording():
            for slot in slots:
                recorded = self.recorder.record(partial(self.backward, slot, into), pool)
                slot.backward = RecordedOperation(recorded, kind="backward")
        return tensors_of(into)

    def lacks_gradients(self, slot: Slot, gradients: list[Tensor | None] | None) -> bool:
        """Whether a gradient is missing that the warm-up had, so that fewer parameters get one."""
        return gradients is not None and any(
            gradient is None and isinstance(leaf, Tensor) and leaf.requires_grad
            for leaf, gradient in zip(pytree.tree_leaves(slot.output), gradients, strict=True)
        )

    # ---- the work that is recorded

    def forward(self, slot: Slot) -> None:
        with torch.set_grad_enabled(not self.weights.replays_on_current), self.network.recorded():
            output = self.network.forward(NO_BATCH, slot.batch, slot.weights, self.guard.observe)
            outgoing = self.network.outgoing(NO_BATCH, slot.batch, slot.weights, output)
        if not self.weights.replays:
            slot.batch.roots = pytree.tree_leaves(output)
        if self.weights.recomputes and slot.output is not None:
            places = [place.detach() for place in tensors_of(slot.output)]
            torch._foreach_copy_(places, [tensor.detach() for tensor in tensors_of(outgoing)])
        else:
            slot.output = outgoing

    def backward(self, slot: Slot, gradients: list[Tensor | None] | None) -> None:
        retain = self.recorder.captures
        with self.network.recorded():
            taken, below, _ = self.stage.differentiate(
                NO_BATCH, slot.batch, slot.weights, gradients, retain_graph=retain
            )
        if self.weights.replays:
            slot.batch.roots = []
        places = tensors_of(slot.input_gradients)
        if places:
            torch._foreach_copy_(places, tensors_of(below))
        self.window.sum(taken)


def _ones(output: Any) -> list[Tensor | None]:
    return [torch.ones_like(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(output)]
