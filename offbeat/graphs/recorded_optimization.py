"""Updates that are recorded: the same tensor work for every whole window, with learning rates on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from offbeat.core.descriptions import USER_CODE_ERRORS
from offbeat.core.optimization import EagerOptimization
from offbeat.core.weights import Work
from offbeat.core.window import FixedSums, GradientWindow
from offbeat.errors import NotRecorded, first_line, warn_caller
from offbeat.graphs.device_guard import DeviceGuard
from offbeat.graphs.device_rates import DeviceRates
from offbeat.graphs.launch_queue import LaunchQueue, RecordedOperation
from offbeat.graphs.recorder import Recorder


class RecordedOptimization:
    """Applies windows by launching a recorded update; all others eagerly, after all work that is queued.

    operations  the recorded updates of a whole window, one for each place of the rates (see device_rates.py); the
                update itself where it cannot be recorded; None before
    options     the optimizer's options in the recording, by group: see `_options`
    stepped     indices of the parameters that the last update has changed
    """

    def __init__(
        self,
        eager: EagerOptimization,
        window: FixedSums,
        *,
        M: int,
        guard: DeviceGuard,
        recorder: Recorder,
        launch_queue: LaunchQueue,
        rank: int,
        predicts: bool,
    ) -> None:
        self.eager, self.window, self.M, self.guard, self.recorder = eager, window, M, guard, recorder
        self.optimizer, self.scheduler, self.corrections = eager.optimizer, eager.scheduler, eager.corrections
        self.clipping, self.norms, self.made = eager.clipping, eager.norms, eager.made
        self.prepare_for = eager.prepare_for
        self.launch_queue, self.rank = launch_queue, rank
        self.rates = DeviceRates(eager, launch_queue, rank, M=M, predicts=predicts)
        self.reset()

    def reset(self) -> None:
        """Drop what was recorded."""
        self.operations: list[RecordedOperation | Work | None] = [None] * self.rates.size
        self.pool = self.recorder.new_pool()  # in which updates leave nothing
        self.options: list[tuple[Callable[[Any], Any], Any]] = []
        self.stepped = frozenset[int]()
        self.rates.reset()

    @property
    def operation(self) -> RecordedOperation | Work | None:
        """The next update."""
        return self.operations[self.rates.next]

    def apply(self, window: GradientWindow, over: int, s: int) -> bool:
        if self.optimizer is None:
            return False
        batches = self.eager.guard
        if batches.on_nan != "stop" and not batches.accepts_gradients(window, s):
            return False  # with "stop" the device notes what is not finite, and it is reported later
        given, divisor = self.window.given, window.divisor(over)
        if given:
            self.guard.updates.append((s, list(window.batches)))
        whole = divisor == self.M and bool(given) and given == self.window.recorded
        operation = self.operation
        if whole and operation is None and given == self.stepped:
            operation = self._record()
        if whole and isinstance(operation, RecordedOperation):
            self.launch_queue.put(self.rank, operation)
        else:
            self.launch_queue.flush()
            self._update(divisor, given)
            if given and given != self.window.recorded and self._any_recorded():
                self.operations = [None] * self.rates.size  # the optimizer's state is no longer what was recorded
        self.stepped = given or self.stepped
        return True

    def _any_recorded(self) -> bool:
        return any(isinstance(operation, RecordedOperation) for operation in self.operations)

    def _update(self, over: float, given: frozenset[int]) -> None:
        with self.window.only(given):
            gradients = [p.grad for p in self.window.parameters.values() if p.grad is not None]
            if gradients and self.eager.guard.on_nan == "stop":
                self.guard.counters.gradients(gradients)
            self.eager.step(self.window, over)

    def _update_at(self, index: int) -> None:
        """The update of a whole window, with the rates at that place."""
        with self.rates.at(index):
            self._update(self.M, self.window.recorded)

    def _record(self) -> RecordedOperation | Work | None:
        """Record the update of a whole window; where that is impossible, warn of the reason."""
        assert self.optimizer is not None
        index, reason = self.rates.next, self._why_not_recordable()
        if reason is None:
            try:
                with self.recorder.recording():
                    self.options = [_options(group) for group in self.optimizer.param_groups]
                    recorded = self.recorder.record(partial(self._update_at, index), self.pool)
                    self.operations[index] = RecordedOperation(recorded, kind="update")
            except USER_CODE_ERRORS as error:
                reason = first_line(error)
        if reason is not None:
            self._continue_eagerly(reason)
        return self.operation

    def _continue_eagerly(self, reason: str) -> None:
        self.operations = [partial(self._update, self.M, self.window.recorded)] * self.rates.size
        if self.recorder.captures:
            text = f"updates are not recorded, so that stages wait for them: {reason}"
            warn_caller(text, NotRecorded)

    def _why_not_recordable(self) -> str | None:
        """Why an update is not the same tensor work every time; the learning rate has to be on the device."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            option = "capturable" if "capturable" in group else "fused"
            if not group.get(option):
                name = type(self.optimizer).__name__
                known = option in group
                return f"{name} has {option}=False: give {option}=True" if known else f"{name} has no capturable=True"
        if getattr(self.scheduler, "cycle_momentum", False):
            return f"{type(self.scheduler).__name__} changes the momentum, too: give cycle_momentum=False"
        if self.clipping.exchanged or self.clipping.carried:
            return "clip_over='model' reads the norms of all stages on the host: give clip_over='stage'"
        unfit = [type(corrector).__name__ for corrector in self.corrections.active if not corrector.recordable]
        return f"{', '.join(unfit)} computes on the host" if unfit else None

    def advance(self) -> None:
        if self.scheduler is None:
            return
        self.rates.advance()
        if isinstance(self.operation, RecordedOperation) and self._options_changed():
            self._continue_eagerly("the schedule changes more than the learning rate, such as the momentum")

    def _options_changed(self) -> bool:
        assert self.optimizer is not None
        for (read, fixed), group in zip(self.options, self.optimizer.param_groups, strict=True):
            if read(group) != fixed:
                return True
        return False

    def learning_rates(self) -> list[float]:
        return self.rates.known()

    def resume_schedule(self, updates: int) -> None:
        self.eager.resume_schedule(updates)
        self.reset()


def _options(group: dict[str, Any]) -> tuple[Callable[[Any], Any], Any]:
    """What a recorded update has fixed: all options of a group except the rate, as the function that reads them, and
    their values."""
    names = [
        name
        for name, value in group.items()
        if name not in ("params", "param_names", "lr") and not isinstance(value, Tensor)
    ]
    read: Callable[[Any], Any] = itemgetter(*names) if names else lambda _: None
    return read, read(group)
