"""The training loop around the batches of `Pipeline.fit`: callbacks, evaluation, stopping."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.errors import UserError, stage_name
from offbeat.pipeline import checks, schedules
from offbeat.pipeline.callback import TrainingStep, check_callbacks
from offbeat.pipeline.callback_states import restore
from offbeat.pipeline.late_losses import LossReader
from offbeat.pipeline.loading import Batches, Loader

if TYPE_CHECKING:
    from offbeat.pipeline.local_stages import LocalStages
    from offbeat.pipeline.pipeline import Pipeline

Evaluation = Batches | Callable[[], Mapping[str, Any]]  # batches, or a function that evaluates and returns the result
SPEED_BATCHES = 50  # over which samples per second are measured
STOP = 1  # what replicas request


def fit(
    pipe: Pipeline,
    local: LocalStages,
    loader: Loader | None,
    epochs: int,
    *,
    callbacks: Sequence[Any] | None,
    evaluate: Evaluation | None,
    evaluate_every: int,
    drain: bool,
    **options: Any,
) -> None:
    """Train with callbacks and evaluation; the other options are those of `Pipeline.steps`."""
    loop = TrainingLoop(pipe, callbacks, epochs=epochs, evaluate=evaluate, evaluate_every=evaluate_every)
    with local.guard(computes=False):
        observed = loop.agree(drain=drain, resume=options["resume"], first_epoch=options["first_epoch"])
    local.callback_states.begin(loop if observed else None, resume=options["resume"])
    if not observed:
        for _ in pipe.steps(loader, epochs, drain=drain, **options):
            pass
    else:
        local.loop = loop
        options |= {"after_step": loop.after_step, "after_epoch": loop.after_epoch}
        try:
            for _ in pipe.steps(loader, epochs, drain=drain, **options):
                pass
            with local.guard():
                loop.finish()
        finally:
            local.loop = None
            loop.end()
    if drain and not loop.stopped and pipe.leads:
        schedules.warn_of_lengths(pipe.stages.values())


class BatchSpeed:
    """Samples per second over the last batches."""

    def __init__(self) -> None:
        self.total = 0
        self.points: deque[tuple[float, int]] = deque(maxlen=SPEED_BATCHES + 1)
        self.counted = 0  # samples of the stage's counter that are in the total

    def restart(self) -> None:
        """Leave out the time since the last batch, which was not training."""
        self.points.clear()

    def add(self, counter: int) -> float | None:
        """The counter of a stage after a batch, which starts from 0 after a report; None for the first batch."""
        self.total += counter - self.counted if counter >= self.counted else counter
        self.counted = counter
        self.points.append((time.perf_counter(), self.total))
        began, before = self.points[0]
        seconds = self.points[-1][0] - began
        return (self.total - before) / seconds if seconds else None


class TrainingLoop:
    """One call of `fit` in one process: calls the callbacks, evaluates, and ends training where one requests it.

    requested   whether a callback of this process, or of one with a later stage, has requested a stop
    stopped     whether training ends after the batches that the first stage has read, in all processes
    """

    def __init__(
        self,
        pipe: Pipeline,
        callbacks: Sequence[Any] | None,
        *,
        epochs: int,
        evaluate: Evaluation | None,
        evaluate_every: int,
    ) -> None:
        self.pipe, self.epochs, self.evaluate, self.every = pipe, epochs, evaluate, evaluate_every
        self.callbacks = sorted(check_callbacks(callbacks), key=lambda each: bool(getattr(each, "saves", False)))
        checks.whole(evaluate_every, "evaluate_every", least=1)
        if not isinstance(evaluate, Iterable | Callable | None):
            raise UserError(
                f"evaluate is {checks.kind_of(evaluate)}: give an iterable of (x, y) or of dicts, or a function that "
                "returns a dict of figures"
            )
        self.requested = self.stopped = False
        self.reader, self.speed = LossReader(pipe), BatchSpeed()
        self.count_updates()
        self.epoch = 0
        self.newest: tuple[int, float] | None = None
        self.rest: dict[int, float] = {}  # losses that no step has had yet
        self.unsent: dict[int, float] = {}  # losses that the process below has not been sent
        self.found: dict[str, Any] | None = None  # states of callbacks, to be restored
        self.ended = False
        self.samples_per_second: float | None = None

    def agree(self, **options: Any) -> bool:
        """Compare what the processes were given, with options; whether any of them has callbacks or evaluates.

        Losses and requests to stop pass through all processes, so all of them take part where one has callbacks.
        """
        given = "function" if callable(self.evaluate) else "loader" if self.evaluate is not None else ""
        mine = {
            "callbacks": len(self.callbacks),
            "collective": [type(each).__name__ for each in self.callbacks if getattr(each, "collective", False)],
            "evaluate": given,
            "every": self.every,
            "options": {"epochs": self.epochs, **options},
        }
        found = self.pipe.engine.exchange(mine)
        first = found[0]
        for rank, other in enumerate(found):
            where = f"but in the process of {stage_name(rank, self.pipe.K, self.pipe.replicas)}"
            for name, here in first["options"].items():
                if here != (there := other["options"][name]):
                    raise UserError(f"fit() with {name}={here!r}, {where} {there!r}: give the same to all processes")
            here, there = (", ".join(each["collective"]) or "none" for each in (first, other))
            if here != there:
                raise UserError(
                    f"callbacks that communicate between processes: {here}, {where} {there}: give the same ones to all "
                    "processes, in the same order"
                )
            here, there = (each["evaluate"] or "None" for each in (first, other))
            if here != there and "function" in (here, there):
                raise UserError(
                    f"evaluate= is a {here}, {where} a {there}: give a function to all processes, each of which calls "
                    "it, or a loader to the first"
                )
        self.evaluates, self.every = bool(first["evaluate"]), first["every"]
        for callback in self.callbacks:
            if getattr(callback, "evaluated", False) and not self.evaluates:
                name = type(callback).__name__
                raise UserError(f"callback {name} without evaluations: give fit(evaluate=...), in the first process")
        return self.evaluates or any(each["callbacks"] for each in found)

    @property
    def observes_updates(self) -> bool:
        return any(hasattr(callback, "on_update") for callback in self.callbacks)

    def count_updates(self) -> None:
        """Later updates are new ones."""
        self.updates = {k: stage.update_index for k, stage in self.pipe.stages.items()}

    def restore(self) -> None:
        """Continue from a checkpoint that was loaded; there are stages now."""
        found, self.found = self.found, None
        if found is not None:
            restore(self.callbacks, found["callbacks"])
            self.newest, self.rest = found["newest"], {**dict(found["losses"]), **self.rest}

    def call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(*arguments)

    def step(self, *, losses: Mapping[int, float] | None = None, updated: Sequence[int] = ()) -> TrainingStep:
        """What callbacks are given after the newest batch."""
        batch, loss = self.newest or (None, None)
        return TrainingStep(
            self.pipe,
            self.pipe.batches - 1,
            self.epoch,
            self.epochs,
            losses or {},
            loss,
            batch,
            self.samples_per_second,
            updated,
            self,
        )

    # ---- during training

    def after_step(self, t: int) -> None:
        """Batch t is done by the stages of this process."""
        self._measure_speed()
        self.after_turn()
        self._collect()
        losses, self.rest = self.rest, {}
        self.call("on_step", self.step(losses=losses))
        self._pass_on(t)

    def _measure_speed(self) -> None:
        stage = next(iter(self.pipe.stages.values()))
        speed = self.speed.add(stage.figures.samples)
        self.samples_per_second = None if speed is None else speed * self.pipe.replicas

    def _collect(self, *, wait: bool = False) -> None:
        """Add the losses that became known."""
        losses = self.reader.read(wait=wait) if self.pipe.last else {}
        received, stop = self.pipe.loss_chain.receive(wait=wait)
        losses |= received
        self.requested = self.requested or stop
        if losses:
            batch = max(losses)
            self.newest = batch, losses[batch]
        self.rest |= losses
        self.unsent |= losses

    def _pass_on(self, t: int, *, end: bool = False) -> None:
        """Send the process below what it has not been sent; end: the last that it waits for."""
        self.pipe.loss_chain.send(self.unsent, stop=self.requested, t=t, end=end)
        self.unsent = {}

    def settle_losses(self) -> None:
        """Wait until all losses up to the newest batch, which is the same in all processes, are known in every
        process; callbacks get them with the next step."""
        self._collect(wait=True)
        self._pass_on(self.pipe.batches, end=True)

    def after_turn(self) -> None:
        """Stages may have made an update: in each local iteration, and in each of a drain."""
        if self.observes_updates:
            self.pipe._local.complete_updates()
        self.restore()
        now = {k: stage.update_index for k, stage in self.pipe.stages.items()}
        updated = [k for k, updates in now.items() if updates != self.updates.get(k, 0)]
        self.updates = now
        if updated and self.observes_updates:
            self.call("on_update", self.step(updated=updated))

    def stops(self) -> bool:
        """In the process of the first stage, before a batch: whether training ends here. With replicas in several
        processes, a request reaches all of them with the next window, so that they end after the same batch."""
        pipe = self.pipe
        separate = len(pipe.engine.replicas_here) < pipe.replicas
        window_sum = pipe.workers[0].window_sum if separate and pipe.workers else None
        if window_sum is None:
            self.stopped = self.requested
        else:
            window_sum.request = STOP if self.requested else 0
            self.stopped = window_sum.requested == STOP
        return self.stopped

    def after_epoch(self, epoch: int) -> None:
        self.restore()
        if self.evaluates and (epoch + 1) % self.every == 0:
            result = self.evaluate() if callable(self.evaluate) else self.pipe.evaluate(self.evaluate)
            if not isinstance(result, Mapping):
                raise UserError(f"evaluate() returned a value {checks.kind_of(result)}: return a dict of figures")
            self.call("on_evaluate", self.step(), result)
        self.call("on_epoch_end", self.step())
        if self.evaluates and (epoch + 1) % self.every == 0:  # all processes are here, so the next batch need not be
            self.requested = self.stopped = any(self.pipe.engine.exchange(self.requested))
        self.speed.restart()

    # ---- the end

    def finish(self) -> None:
        """Wait until all losses are known in every process, after the last batch."""
        self.settle_losses()
        for worker in self.pipe.workers:
            worker.forget_requests()

    def end(self) -> None:
        self.ended = True
        self.restore()
        losses, self.rest = self.rest, {}
        self.call("on_end", self.step(losses=losses))
