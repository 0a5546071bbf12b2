"""A stage whose operations are recorded over a ring of slots (see ring.py) and repeated, each with a single launch.

Exactly the stage that it stands in for: the same policies choose the weights, the same code is recorded. A batch that
fits no slot (another shape, such as a short last one; one that is left out; a model that cannot be recorded) runs
eagerly beside the others, on the same weights and into the same window.

Recorded work is put on the launch queue (see launch_queue.py), which launches it together with that of the other
stages, or ahead of anything that is done eagerly.

Nothing here waits for the device. So a loss or gradient that is not finite is noted there, with its number, and looked
at from time to time; `settle` waits and looks.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.layout import dense_copy
from offbeat.core.memory import size
from offbeat.core.metrics import batch_size
from offbeat.core.stage import USERS_CODE, InFlight, Stage, differentiable
from offbeat.core.weights import Stash, Version, Work
from offbeat.core.window import FixedSums
from offbeat.errors import NotFinite, NotRecorded, earliest, first_line
from offbeat.graphs.capture import Recorded, captures, own_stream, recording
from offbeat.graphs.device_counters import DeviceCounters
from offbeat.graphs.launch_queue import LaunchQueue, Row
from offbeat.graphs.ring import BEHIND, Ring

LOOK = 64  # forwards between two looks at what the device has noted
LONG_AGO = -(10**9)
NO_BATCH = -1  # the number of the batch in a recording: none that is left out


@dataclass(eq=False)
class Slot:
    """The memory of one batch, and the work that was recorded on it with the weights in one place."""

    batch: InFlight
    weights: Version
    inputs: list[Tensor] = field(default_factory=list)  # where a batch is copied to
    targets: list[Tensor] = field(default_factory=list)  # at the last stage
    samples: int = 0
    output: Any = None  # at the last stage the loss
    below: list[Tensor | None] = field(default_factory=list)  # gradients of the input
    forward: Row | None = None
    backward: Row | None = None
    forwards: dict[int, Row] = field(default_factory=dict)  # with a copy of what the stage below gives, by its id
    backwards: dict[int, Row] = field(default_factory=dict)  # the same of what the stage above gives
    forwarded: int = LONG_AGO  # turn of its last forward
    backwarded: int = LONG_AGO  # and of its last backward


NOTHING = Version(None)


class RecordedStage(Stage):
    """A stage for an engine that runs all of them at once; see the module and engines/streams.py."""

    window: FixedSums

    def __init__(self, *arguments: Any, launch_queue: LaunchQueue, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.launch_queue, self.rank = launch_queue, self.k - 1
        self.stream = own_stream(self.device)
        self.window = FixedSums(self.parameters)
        self.notes = DeviceCounters(self.device)
        self.eager: str | None = None  # why nothing is recorded
        self.ring = Ring.of(self.method, self.k, self.K, copies=self._copies)
        self.rest = self.ring.below + BEHIND - self.lag  # turns from a backward until the neighbours have read it
        self.seen: deque[int] = deque(maxlen=4 * LOOK)  # batches of the last recorded losses
        self.applied: deque[tuple[int, list[int]]] = deque(maxlen=4 * LOOK)  # and of the last updates with gradients
        self.turn = self.irregular = 0  # forwards so far, and those of them that were not recorded
        self.below: list[Tensor | None] = []  # what gradients of inputs look like
        self.recording = False
        self.reset()
        self.weights.do = self._do
        unfit = _unfit(self)
        if unfit:
            self._refuse(unfit)

    def reset(self) -> None:
        """Forget what was recorded, since tensors have moved; the batches in flight go on eagerly."""
        self.launch_queue.forget()
        self.small: dict[object, Row | None] = {}  # copies of weights and the like; None when done once
        self.carried: dict[tuple[int, int], Recorded] = {}  # of what neighbours give, by its id and that of its place
        self.rates: list[Tensor] = []  # of learning on the host, as the schedule has left them
        self.told: list[float] = []  # those that the device has been told
        self.kind: Any = None  # of the batches that were recorded
        self.target: Any = None  # the same of their targets
        self.known: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # what neighbours have given, by id
        self.comes: dict[int, Any] = {}  # what comes from their slots time and again, by id, which so nothing else gets
        self.free: dict[int, deque[Slot]] = {}  # slots by the memory of the weights
        self.slots: dict[int, Slot] = {}  # of the batches in flight that have one
        self.passed: dict[int, Slot] = {}  # whose turn it was when a batch came that does not fit
        self.rings: list[tuple[Version, list[Slot]]] = []  # all of them, in the order in which a program begins
        self.given: list[Tensor] = []  # where a recorded backward finds the gradients from above
        self.step: Row | Work | None = None  # the recorded update of a whole window
        self.stepped_by: list[dict[str, Any]] = []  # the options that it has
        self.stepped = frozenset[int]()  # parameters that have been
        self.window.usual = frozenset()
        if isinstance(self.weights, Stash):
            self.weights.memory = []

    @property
    def _copies(self) -> bool:
        return isinstance(self.weights, Stash)

    # ---- forward and backward

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        known = id(x) in self.comes and not self.last and not self.left_out  # it lies in a slot of the stage below
        fits = known or self._fits(t, x, target)
        self.turn += 1
        steady, version = self._full(), self.weights.current()
        slot = self._slot(version)
        if slot is None or not fits:
            self.irregular += 1
            self.launch()
            if slot is not None:  # or from now on slots of this stage and its neighbours would meet that never did
                self.passed[t], version = slot, slot.batch.version
            if self.k > 1:
                x = pytree.tree_map_only(Tensor, dense_copy, x)  # what was given is the memory of somebody's slot
            for tensor in _only_tensors((x, target)):
                if tensor.is_cuda:  # made on the caller's stream, and read on this one
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            output = self._forward(t, x, target, share, steady, version)
            return pytree.tree_map_only(Tensor, dense_copy, output)
        batch = slot.batch
        if self.last:
            self._fill(slot.targets, target)
        else:
            batch.target = target  # which it only passes on
        if self.k == 1:
            self._fill(slot.inputs, x)
        row = slot.forwards.get(id(x)) or self._from_below(slot, x)
        batch.update, batch.steady, batch.random = self.update_index - batch.version.age, steady, self.random.state
        if self.keeping:
            self.launch()
            batch.kept = self.weights.remember()
        self.launch_queue.put(self.rank, row)
        slot.forwarded, self.slots[t] = self.turn, slot
        self._forwarded(t, batch, slot.samples)
        if self.last:
            self.seen.append(t)
        if self.turn % LOOK == 0:
            self._check(self.notes.look())
        return slot.output

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        slot = self.slots.get(t)
        if slot is None:
            self.weights.returning(self.in_flight[t].version)
            self.launch()
            below = super().backward(t, gradients)
            if t in self.passed:
                self._leave(self.passed.pop(t))
            return [None if gradient is None else dense_copy(gradient) for gradient in below]
        batch = slot.batch
        self.weights.returning(batch.version)
        if slot.backward is None:
            self._record_backwards(gradients)
            if self.eager is not None:
                return self.backward(t, gradients)
        row = slot.backwards.get(id(gradients)) or self._from_above(slot, gradients)
        if not self.window.levels:
            self._do("zero", self.window.zero)
        self.launch_queue.put(self.rank, row)
        self.window.recorded(t, self._level(batch))
        self.backwards += 1
        del self.slots[t], self.in_flight[t]
        self._leave(slot)
        return slot.below

    def _leave(self, slot: Slot) -> None:
        """Its batch is done; the version may go."""
        slot.backwarded = self.turn
        self.free[id(slot.weights.tensors)].append(slot)
        slot.batch.version, slot.batch.kept = NOTHING, None

    def _do(self, key: object, work: Work) -> None:
        """Work that reads and writes the same memory for the same key: recorded when it is done for the second time
        (never without a key).

        Predictions are left alone: what they read comes and goes with the first updates.
        """
        row = self.small.get(key)
        if row is None:
            sources = self.weights.sources
            if self.kind is None or sources.forward or sources.backward or key not in self.small:
                self.launch()
                work()
                if self.kind is not None and key is not None:
                    self.small[key] = None
                return
            with self._recording():
                row = self.small[key] = Row(self._recorded(work))
        self.launch_queue.put(self.rank, row)

    def launch(self) -> None:
        self.launch_queue.flush()

    def pause(self) -> None:
        self.launch_queue.pause()

    def end_turn(self) -> None:
        self.launch_queue.close(self.rank)

    def _fits(self, t: int, x: Any, target: Any) -> bool:
        """Whether a batch is such as were recorded; the first one decides."""
        if self.eager is not None or (self.left_out and self._left_out(t)):
            return False
        if self._weight(batch_size(target, x)) != 1.0:  # recorded backwards add gradients as they are
            return False
        if self.kind is None:
            self.launch()
            self._record(x, target)
        return self.kind == _looks(x) and (not self.last or self.target == _looks(target))

    def _slot(self, version: Version, *, elsewhere: bool = True) -> Slot | None:
        """A slot with the memory of that version, or `elsewhere`, in which nobody reads any more."""
        slots = self.free.get(id(version.tensors))
        if slots:
            slot = slots[0]
            if slot.forwarded <= self.turn - BEHIND and slot.backwarded <= self.turn - self.rest:
                slot.batch.version = version
                return slots.popleft()
        if elsewhere and type(self.weights) is Stash and self.weights.room() is not None:
            # While a stage fills, a version serves more than M batches.
            return self._slot(self.weights.again_elsewhere(), elsewhere=False)
        return None

    def _fill(self, places: list[Tensor], content: Any) -> None:
        """Copy what the caller gave, in new memory every time, into its slot.

        A turn forwards before it backwards, so that nothing on the tape works on this slot, which may just be free.
        """
        for place, tensor in zip(places, _only_tensors(content), strict=True):
            self.launch_queue.first(self.rank, partial(place.copy_, tensor))

    def _from_below(self, slot: Slot, x: Any) -> Row:
        """The forward of a slot, with a copy of what the stage below gives."""
        assert slot.forward is not None
        return slot.forward if self.k == 1 else self._copying(slot.inputs, x, slot.forward, slot.forwards)

    def _from_above(self, slot: Slot, gradients: list[Tensor | None] | None) -> Row:
        """The backward of a slot, with a copy of what the stage above gives."""
        assert slot.backward is not None
        return self._copying(self.given, gradients, slot.backward, slot.backwards)

    def _copying(self, places: list[Tensor], given: Any, row: Row, rows: dict[int, Row]) -> Row:
        """The row behind copies of what a neighbour gives, which mostly lies in one of its slots and comes again."""
        tensors = _only_tensors(given) if places else []
        if not all(self.known.get(id(tensor)) is tensor for tensor in tensors):
            self.launch()
            for place, tensor in zip(places, tensors, strict=True):
                self.known[id(tensor)] = tensor
                place.copy_(tensor)
            return row
        copies = []
        for place, tensor in zip(places, tensors, strict=True):
            key = id(tensor), id(place)
            if key not in self.carried:
                with self._recording():
                    self.carried[key] = self._recorded(partial(place.copy_, tensor))
            copies.append(self.carried[key])
        self.comes[id(given)] = given
        rows[id(given)] = made = Row(*copies, *row.pieces, kind=row.kind)
        return made

    # ---- recording

    def _record(self, x: Any, target: Any) -> None:
        """Record the forward of every slot, or note why that cannot be."""
        try:
            if captures(self.device):
                gc.collect()  # also memory of older recordings
            with self._recording():
                entered, target = self._entering(x), self._here(target)  # which copies into slots do on their way
                self._warm_up(entered, target)
                if self.eager is None:
                    self._record_forwards(entered, target)
                    self.kind, self.target = _looks(x), _looks(target) if self.last else None
        except USERS_CODE as error:
            self._refuse(first_line(error))

    def _recording(self) -> AbstractContextManager[None]:
        return recording(self.device, self.stream)

    def _refuse(self, why: str) -> None:
        """Go on eagerly."""
        self.eager = why
        self.reset()
        warnings.warn(f"stage {self.k} is not recorded and runs eagerly: {why}", NotRecorded, stacklevel=3)

    def _new_batch(self, x: Any, target: Any, version: Version) -> InFlight:
        """A batch in memory of its own."""
        leaves, structure = pytree.tree_flatten(pytree.tree_map_only(Tensor, dense_copy, x))
        if self.last:
            target = pytree.tree_map_only(Tensor, dense_copy, target)
        return InFlight(self.wanting(leaves), structure, target, version, 0, False, self.random.state)

    def _new_version(self) -> Version:
        return Version(self.weights.sources.snapshot()) if self._copies else self.weights.current()

    def _warm_up(self, x: Any, target: Any) -> None:
        """The work to be recorded, once and without a trace: libraries choose their ways, sums get their places."""
        slot = Slot(self._new_batch(x, target, version := self._new_version()), version)
        memory, buffers = self.corrections.place.memory, [buffer.clone() for buffer in self.module.buffers()]
        before = {p: {key: tensor.clone() for key, tensor in kept.items()} for p, kept in memory.items()}
        self.recording = True
        try:
            with self.random.drawing(replay=slot.batch.random):
                with self._watched(NO_BATCH, version, slot.batch.inputs):
                    self._work_forward(slot)
                ones = (
                    None
                    if self.last
                    else [
                        torch.ones_like(leaf) if isinstance(leaf, Tensor) else None
                        for leaf in pytree.tree_leaves(slot.output)
                    ]
                )
                taken, below, _ = self._differentiate(NO_BATCH, slot.batch, version, ones)
                drawn = self.random.drawn(slot.batch.random)
        finally:
            self.recording = False
            for buffer, old in zip(self.module.buffers(), buffers, strict=True):
                buffer.data.copy_(old)
            for parameter, kept in memory.items():
                for key, tensor in kept.items():
                    old_values = before.get(parameter, {})
                    tensor.copy_(old_values[key]) if key in old_values else tensor.zero_()
            self.notes.clear()
        self.window.usual = self.window.fix(taken)
        self.below = [None if gradient is None else dense_copy(gradient) for gradient in below]
        if drawn:
            self._refuse("it draws random numbers")

    def _record_forwards(self, x: Any, target: Any) -> None:
        """Each in a pool of its own: what it leaves there must last until its backward, while others run."""
        for _ in range(self.ring.groups):
            version = self._new_version()
            slots = [Slot(self._new_batch(x, target, version), version) for _ in range(self.ring.each)]
            for slot in slots:
                slot.samples = batch_size(target, x)
                targets = slot.batch.target if self.last else []
                slot.inputs, slot.targets = (  # autograd, whose graphs go on, sees no writing there
                    [place.data for place in _only_tensors(content)] for content in (slot.batch.inputs, targets)
                )
                slot.below = [None if gradient is None else torch.empty_like(gradient) for gradient in self.below]
                work = partial(self._work_forward, slot)
                slot.forward = Row(self._recorded(work, _pool(self.device)), kind="forward")
            self.rings.append((version, slots))
        self._rewind()

    def _rewind(self) -> None:
        """All slots are free, and come in the order in which they did at first."""
        self.free = {id(version.tensors): deque(slots) for version, slots in self.rings}
        if isinstance(self.weights, Stash):
            self.weights.memory = [version.tensors for version, _ in self.rings if version.tensors is not None]

    def _record_backwards(self, gradients: list[Tensor | None] | None) -> None:
        """Record the backward of every slot, for gradients from above such as these, or note why that cannot be.

        They leave nothing in their pool, since sums and gradients of inputs have places outside.
        """
        into = gradients
        if gradients is not None:
            if self._lacks(gradients):
                self._refuse("the stage above does not use all that it gives")
                return
            into = [None if gradient is None else dense_copy(self._here(gradient)) for gradient in gradients]
        pool = _pool(self.device)
        try:
            with self._recording():
                for slot in chain(*(slots for _, slots in self.rings)):
                    work = partial(self._work_backward, slot, into)
                    slot.backward = Row(self._recorded(work, pool), kind="backward")
        except USERS_CODE as error:
            self._refuse(first_line(error))
        else:
            self.given = _only_tensors(into)

    def _lacks(self, gradients: list[Tensor | None]) -> bool:
        """Whether a gradient is missing that the warm-up had, so that fewer parameters get one."""
        slot = next(chain(*(slots for _, slots in self.rings)))
        given = slot.batch.roots or pytree.tree_leaves(slot.output)
        return any(
            gradient is None and differentiable(leaf) and (leaf.requires_grad or self.weights.replays)
            for leaf, gradient in zip(given, gradients, strict=True)
        )

    def _recorded(self, work: Work, pool: Any = None) -> Recorded:
        """The work as a recording: nothing in it may ask the device, and graphs are kept for all its repetitions."""

        def quietly() -> None:
            self.recording = self.random.still = True
            self.retains = captures(self.device)
            try:
                work()
            finally:
                self.recording = self.random.still = self.retains = False

        return Recorded(quietly, device=self.device, pool=pool)

    def _work_forward(self, slot: Slot) -> None:
        with torch.set_grad_enabled(not self.weights.replays):
            output = self._run(NO_BATCH, slot.batch, slot.weights)
        if not self.weights.replays:
            slot.batch.roots = pytree.tree_leaves(output)
        slot.output = pytree.tree_map_only(Tensor, Tensor.detach, output)

    def _work_backward(self, slot: Slot, gradients: list[Tensor | None] | None) -> None:
        taken, below, _ = self._differentiate(NO_BATCH, slot.batch, slot.weights, gradients)
        if self.weights.replays:
            slot.batch.roots = []
        places = _only_tensors(slot.below)
        if places:
            torch._foreach_copy_(places, _only_tensors(below))
        self.window.sum(taken)

    def _observe(self, t: int, loss: Tensor, output: Any, target: Any) -> None:
        if self.recording:
            self.notes.loss(loss, output, target)
        else:
            super()._observe(t, loss, output, target)

    # ---- update

    def _usable(self) -> bool:
        return True if self.on_nan == "stop" else super()._usable()  # what is not finite is noted, and found later

    def _apply(self, over: float) -> None:
        given = self.window.given
        if given:
            self.applied.append((self.update_index, list(self.window.batches)))
        usual = over == self.M and bool(given) and given == self.window.usual
        if usual and self.step is None and given <= self.stepped:
            self.step = self._record_step()
        if usual and isinstance(self.step, Row):
            self.launch_queue.put(self.rank, self.step)
        else:
            self.launch()
            self._work_update(over, given)
        self.stepped |= given  # so that the optimizer's state has its place

    def _record_step(self) -> Row | Work:
        """The update of a whole window: recorded, or else as it is, with a word why."""
        work, why = partial(self._work_update, self.M, self.window.usual), self._steps_unlike()
        if why is None:
            try:
                with self._recording():
                    self.stepped_by = _options(self.optimizer)
                    return Row(self._recorded(work), kind="update")
            except USERS_CODE as error:
                why = first_line(error)
        self._tell(why)
        return work

    def _tell(self, why: str) -> None:
        if captures(self.device):
            warnings.warn(f"updates are not recorded, so that stages wait for them: {why}", NotRecorded, stacklevel=3)

    def _steps_unlike(self) -> str | None:
        """Why an update is not the same tensor work every time; the rate has to be on the device."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            option = "capturable" if "capturable" in group else "fused"
            if not group.get(option):
                name = type(self.optimizer).__name__
                known = option in group
                return f"{name} has {option}=False: give {option}=True" if known else f"{name} has no capturable=True"
        if getattr(self.scheduler, "cycle_momentum", False):
            return f"{type(self.scheduler).__name__} changes the momentum, too: give cycle_momentum=False"
        unfit = [type(corrector).__name__ for corrector in self.corrections.active if not corrector.recordable]
        return f"{', '.join(unfit)} reckons on the host" if unfit else None

    def _work_update(self, over: float, given: frozenset[int]) -> None:
        with self.window.only(given):
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            if gradients and self.on_nan == "stop":
                self.notes.gradients(gradients)
            super()._apply(over)

    def _advance(self) -> None:
        self._advance_rates()
        if isinstance(self.step, Row) and _options(self.optimizer) != self.stepped_by:
            self.step = partial(self._work_update, self.M, self.window.usual)
            self._tell("the schedule changes more than the rate, such as the momentum")

    def _advance_rates(self) -> None:
        """The schedule reckons on the host; the device learns of a new rate when it has made this update."""
        groups = self.optimizer.param_groups if self.optimizer and self.launch_queue.defers else []
        there = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        if not there or len(there) < len(groups):
            super()._advance()
            return
        if not self.rates:
            self.launch()
            self.rates = [rate.to("cpu", copy=True) for rate in there]
            self.told = [float(rate) for rate in self.rates]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
        super()._advance()
        self.rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, there, strict=True):
            group["lr"] = rate
        before, self.told = self.told, [float(rate) for rate in self.rates]
        if self.told != before:
            self.launch_queue.after(self.rank, partial(_fill, there, self.told))

    def resume_schedule(self, updates: int) -> None:
        super().resume_schedule(updates)
        self.rates = []

    def restart(self) -> None:
        super().restart()
        for slot in chain(*self.free.values()):  # everybody has read everything
            slot.forwarded = slot.backwarded = LONG_AGO
        self._rewind()

    # ---- what it tells

    def settle(self) -> None:
        self._check(self.notes.now())
        self.notes.read(self.meter)

    def _check(self, bad: list[int | None]) -> None:
        """Raise for what the device has noted."""
        if not any(bad):
            return
        losses, updates = self.notes.counts.tolist()
        found = []
        if bad[0]:
            t = self.seen[bad[0] - losses - 1]
            found.append(
                NotFinite(
                    f"the loss of {self._batch(t)} is not finite (seen at stage {self.k} of {self.K}): "
                    "lower the learning rate, or look at this batch",
                    [t],
                )
            )
        if bad[1]:
            behind = updates - bad[1]
            found.append(self._not_finite(*self.applied[-1 - behind]))
        raise earliest(found)

    def memory(self) -> int:
        if self.kind is None:
            return super().memory()
        spare = self.ring.slots - self.most_held, self.ring.groups - self.most_versions
        return super().memory() + spare[0] * (self.held_bytes or 0) + spare[1] * size(list(self.parameters.values()))


def _options(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """What a recorded update has fixed: all options of its groups but the rates."""
    groups = optimizer.param_groups if optimizer else []
    return [
        {
            name: value
            for name, value in group.items()
            if name not in ("params", "param_names", "lr") and not isinstance(value, Tensor)
        }
        for group in groups
    ]


def _unfit(stage: Stage) -> str | None:
    """Why the operations of a stage cannot be recorded."""
    sources = stage.weights.sources
    if stage.on_nan != "stop":
        return f"on_nan={stage.on_nan!r} looks at every loss before it goes on"
    if stage.weights.replays and (sources.forward or sources.backward):
        return "its forwards are repeated on predicted weights"
    return None


def _fill(places: list[Tensor], values: list[float]) -> None:
    for place, value in zip(places, values, strict=True):
        place.fill_(value)


def _pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _only_tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _looks(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.stride()
    leaves, structure = pytree.tree_flatten(tree)
    return structure, [_looks(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
