"""Does the operations of a stage by recordings over a ring of slots (see ring.py), each with a single launch.

The stage keeps all state, and its own code is what is recorded; its policies choose the weights. A batch that fits no
slot (another shape, such as a short last one; one that is left out; a model that cannot be recorded) is done eagerly by
the stage, on the same weights and into the same window.

Recorded work is put on the launch queue (see launch_queue.py), which launches it together with that of the other
stages. All eager work is preceded by a flush of the queue.

Nothing here waits for the device. So a loss or gradient that is not finite is counted there (device_guard.py), checked
from time to time, and by `settle`, which waits.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.descriptions import USER_CODE_ERRORS
from offbeat.core.layout import dense_copy
from offbeat.core.memory import size
from offbeat.core.metrics import batch_size
from offbeat.core.optimization import EagerOptimization
from offbeat.core.stage import Stage
from offbeat.core.weights import Stash, Version, Work
from offbeat.core.window import FixedSums
from offbeat.errors import NotRecorded, first_line, warn_caller
from offbeat.graphs.device_guard import CHECK_INTERVAL, DeviceGuard
from offbeat.graphs.launch_queue import LaunchQueue, RecordedOperation
from offbeat.graphs.neighbour_copies import NeighbourCopies, tensors_of
from offbeat.graphs.recorded_optimization import RecordedOptimization
from offbeat.graphs.recorder import Recorder
from offbeat.graphs.ring import Ring
from offbeat.graphs.slot_recordings import SlotRecordings
from offbeat.graphs.slots import Slots


class RecordedStage:
    """Executes the operations of `stage`, and is its launcher.

    eager            why nothing is recorded, if so
    irregular        batches that were forwarded eagerly
    layout           shapes, types, strides and requires_grad of the inputs that were recorded, and of their targets
    predicts         whether batches are computed with predicted weights
    policy_work      recorded copies of weights and the like, by key and, for predictions, by the update that needs the
                     same; None when done once
    policy_pool      memory of these recordings, which leave nothing in it
    above            where a recorded backward reads the gradients from above
    """

    def __init__(self, stage: Stage, *, launch_queue: LaunchQueue, replicas: int = 1) -> None:
        self.stage, self.launch_queue, self.rank = stage, launch_queue, stage.k - 1
        self.flush, self.pause = launch_queue.flush, launch_queue.pause
        self.end_turn = partial(launch_queue.close, self.rank)
        self.update, self.teach = stage.update, stage.teach
        network, weights, method = stage.network, stage.weights, stage.method
        self.predicts = bool(weights.sources.forward or weights.sources.backward)
        self.window = FixedSums(stage.parameters)
        self.recorder = Recorder(network.device, network.random)
        self.guard = DeviceGuard(stage.guard, network.device)
        self.copies = NeighbourCopies(self.recorder, launch_queue)
        ring = Ring.of(method, stage.k, stage.K, copies=isinstance(weights, Stash))
        self.slots = Slots(ring, weights)
        self.recordings = SlotRecordings(stage, self.window, guard=self.guard, recorder=self.recorder)
        assert isinstance(stage.optimization, EagerOptimization)
        self.optimization = RecordedOptimization(
            stage.optimization,
            self.window,
            M=method.M * replicas,
            guard=self.guard,
            recorder=self.recorder,
            launch_queue=launch_queue,
            rank=self.rank,
            predicts=self.predicts,
        )
        stage.window, stage.optimization, stage.launcher, weights.do = (
            self.window,
            self.optimization,
            self,
            self.run_policy_work,
        )
        self.accepts_recurring = not network.last and not stage.guard.left_out
        self.irregular = 0
        self.eager: str | None = None
        self.reset()
        reason = _why_not_recordable(stage)
        if reason:
            self._refuse(reason)

    # ---- the launcher of the stage

    def reset(self) -> None:
        """Drop all recordings, since tensors move; the batches in flight continue eagerly."""
        self.launch_queue.forget()
        self.policy_work: dict[tuple[object, object], RecordedOperation | None] = {}
        self.policy_pool = self.recorder.new_pool()
        self.layout: tuple[Any, Any] | None = None
        self.above: list[Tensor] = []
        self.copies.clear()
        self.slots.clear()
        self.optimization.reset()
        self.window.recorded = frozenset()

    def restart(self) -> None:
        self.slots.restart()
        self.optimization.rates.restart()

    def settle(self) -> None:
        self.guard.settle(self.stage.figures.meter)

    def reserved(self) -> int:
        if self.layout is None:
            return 0
        ring, figures = self.slots.ring, self.stage.figures
        batches = (ring.slots - figures.most_held) * (self.stage.network.batch_bytes or 0)
        return batches + (ring.groups - figures.most_versions) * size(list(self.stage.parameters.values()))

    def run_policy_work(self, key: object, work: Work) -> None:
        """Work of the weight policy, which reads and writes the same memory for the same key: recorded when it is done
        for the second time (never with key None).

        Predictions also read the state of the optimizer and of correctors, which the first updates allocate, and the
        learning rate of the next update. They are recorded once that update is: it needs the same, at the same
        addresses.
        """
        predicts = self.predicts and key != "zero"
        update = self.optimization.operation if predicts else None
        operation = self.policy_work.get((key, update))
        if operation is not None:
            self.launch_queue.put(self.rank, operation)
            return
        recordable = self.layout is not None and key is not None
        if predicts:
            recordable = recordable and isinstance(update, RecordedOperation)
        if recordable and (key, update) in self.policy_work:
            if predicts:
                work = partial(self._predict_at, self.optimization.rates.next, work)
            with self.recorder.recording():
                operation = RecordedOperation(self.recorder.record(work, self.policy_pool))
            self.policy_work[key, update] = operation
            self.launch_queue.put(self.rank, operation)
            return
        self.flush()
        work()
        if recordable:
            self.policy_work[key, update] = None

    def _predict_at(self, index: int, work: Work) -> None:
        """A prediction with the rates at that place, also if it runs after the next update was queued."""
        with self.optimization.rates.at(index):
            work()

    # ---- forward

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        stage, slots = self.stage, self.slots
        fits = (self.accepts_recurring and id(x) in self.copies.recurring) or self._fits(t, x, target)
        slots.turn += 1
        steady, version = stage.full(), stage.weights.current()
        slot = slots.take(version)
        if slot is None or not fits:
            if slot is not None:  # or from now on slots of this stage and its neighbours would meet that never did
                slots.bypassed[t], version = slot, slot.batch.version
            return self._forward_eagerly(version, t, x, target, share=share, steady=steady)
        batch, network = slot.batch, stage.network
        if network.last:
            self._copy_first(slot.targets, target)
        else:
            batch.target = target  # which it only passes on
        if stage.k == 1:
            self._copy_first(slot.inputs, x)
            operation = slot.forward
        else:
            operation = slot.forwards.get(id(x))
            if operation is None:
                assert slot.forward is not None
                operation = self.copies.before(slot.forward, slot.inputs, x, slot.forwards)
        assert operation is not None
        batch.update, batch.steady = stage.update_index - batch.version.age, steady
        batch.random = network.random.state
        if stage.keeping:
            self.flush()
            batch.kept = stage.weights.remember()
        self.launch_queue.put(self.rank, operation)
        slot.forwarded, slots.used[t] = slots.turn, slot
        stage.enter(t, batch, slot.samples)
        if network.last:
            self.guard.losses.append(t)
        if slots.turn % CHECK_INTERVAL == 0:
            self.guard.check_soon()
        return slot.output

    def _forward_eagerly(self, version: Version, t: int, x: Any, target: Any, *, share: float, steady: bool) -> Any:
        self.irregular += 1
        self.flush()
        if self.stage.k > 1:
            x = pytree.tree_map_only(Tensor, dense_copy, x)  # what was given is the memory of a neighbour's slot
        for tensor in tensors_of((x, target)):
            if tensor.is_cuda:  # made on the caller's stream, and read on this one
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        output = self.stage.forward_on(version, t, x, target, share=share, steady=steady)
        return pytree.tree_map_only(Tensor, dense_copy, output)

    def _copy_first(self, places: list[Tensor], content: Any) -> None:
        """Copy what the caller gave, in new memory every time, into its slot.

        A turn forwards before it backwards, so that nothing in the queue uses this slot, which may just be free.
        """
        for place, tensor in zip(places, tensors_of(content), strict=True):
            self.launch_queue.first(self.rank, partial(place.copy_, tensor.detach()))

    def _fits(self, t: int, x: Any, target: Any) -> bool:
        """Whether a batch is like those that were recorded; the first one decides."""
        stage = self.stage
        if self.eager is not None or stage.guard.leaves_out(t):
            return False
        if stage.batch_weights.weight(batch_size(target, x)) != 1.0:  # recorded backwards add gradients unweighted
            return False
        if self.layout is None:
            self.flush()
            self._record_forwards(x, target)
        return self.layout == self._layout(x, target)

    def _layout(self, x: Any, target: Any) -> tuple[Any, Any]:
        return _layout(x), _layout(target) if self.stage.network.last else None

    # ---- backward

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        stage, slots = self.stage, self.slots
        slot = slots.used.get(t)
        if slot is None:
            return self._backward_eagerly(t, gradients)
        batch = slot.batch
        stage.weights.returning(batch.version)
        if slot.backward is None:
            self._record_backwards(gradients)
            if self.eager is not None:
                return self._backward_eagerly(t, gradients)
        operation = slot.backwards.get(id(gradients))
        if operation is None:
            assert slot.backward is not None
            operation = self.copies.before(slot.backward, self.above, gradients, slot.backwards)
        if not self.window.levels:
            self.run_policy_work("zero", self.window.zero)
        self.launch_queue.put(self.rank, operation)
        self.window.add_recorded(t, stage.level(batch))
        stage.figures.backwards += 1
        del slots.used[t]
        stage.leave(t)
        slots.release(slot)
        return slot.input_gradients

    def _backward_eagerly(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        stage, slots = self.stage, self.slots
        stage.weights.returning(stage.in_flight[t].version)
        self.flush()
        below = stage.backward(t, gradients)
        if t in slots.bypassed:
            slots.release(slots.bypassed.pop(t))
        return [None if gradient is None else dense_copy(gradient) for gradient in below]

    # ---- recording

    def _record_forwards(self, x: Any, target: Any) -> None:
        """Record the forward of every slot, or continue eagerly."""
        network = self.stage.network
        try:
            if self.recorder.captures:
                gc.collect()  # also memory of older recordings
            with self.recorder.recording():
                entered, on_device = network.entering(x), network.to_device(target)  # as copies into slots do
                reason = self.recordings.warm_up(entered, on_device)
                if reason is None:
                    self.slots.fill(self.recordings.record_forwards(entered, on_device, self.slots.ring))
                    self.layout = self._layout(x, on_device)
        except USER_CODE_ERRORS as error:
            reason = first_line(error)
        if reason is not None:
            self._refuse(reason)

    def _record_backwards(self, gradients: list[Tensor | None] | None) -> None:
        """Record the backward of every slot for gradients such as these, or continue eagerly."""
        if self.recordings.lacks_gradients(next(iter(self.slots)), gradients):
            self._refuse("the stage above does not use all that it gives")
            return
        try:
            self.above = self.recordings.record_backwards(self.slots, gradients)
        except USER_CODE_ERRORS as error:
            self._refuse(first_line(error))

    def _refuse(self, reason: str) -> None:
        """Continue eagerly."""
        self.eager = reason
        self.reset()
        warn_caller(f"stage {self.stage.k} is not recorded and runs eagerly: {reason}", NotRecorded)


def _why_not_recordable(stage: Stage) -> str | None:
    """Why the operations of a stage cannot be recorded."""
    sources = stage.weights.sources
    if stage.guard.on_nan != "stop":
        return f"on_nan={stage.guard.on_nan!r} reads every loss before it continues"
    if stage.weights.replays_on_current and (sources.forward or sources.backward):
        return "its forwards are repeated on predicted weights"
    return None


def _layout(tree: Any) -> Any:
    """Shapes, types and strides of the tensors in a tree, and whether they require gradients."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.stride(), tree.requires_grad
    leaves, structure = pytree.tree_flatten(tree)
    return structure, [_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
