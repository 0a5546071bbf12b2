"""What a callback of `Pipeline.fit` may define, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offbeat.errors import UserError, unknown
from offbeat.pipeline.checks import kind_of

if TYPE_CHECKING:
    from offbeat.pipeline.pipeline import Pipeline
    from offbeat.pipeline.training_loop import TrainingLoop

EVENTS = ("on_step", "on_update", "on_epoch_end", "on_evaluate", "on_end")


@dataclass(frozen=True)
class TrainingStep:
    """The batch that the stages of this process have completed last, with figures of training.

    batch       number of the batch, from 0
    epoch       its epoch, from 0
    epochs      epochs of this call of fit
    losses      training losses by batch that became known since the last step. They are late where another process has
                the last stage, and on a GPU, where reading a loss would wait for it. Each loss is in one step
    loss        the newest loss that is known; None before the first
    loss_batch  its batch; None before the first
    samples_per_second
                of the last batches, of all replicas; None for the first batch
    updated     stages of this process whose weights have changed since the last `on_update`

    With replicas a loss is that of the replica of this process, or the mean where one process has all of them.

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
    >>> class Print:
    ...     def on_step(self, step):
    ...         print(step.batch, step.epoch, step.loss_batch, step.lr, step.staleness)
    >>> pipe.fit(batches[:2], callbacks=[Print()])
    0 0 0 0.001 [0.0, 0.0]
    1 0 1 0.001 [0.0, 0.0]
    """

    pipe: Pipeline
    batch: int
    epoch: int
    epochs: int
    losses: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None
    loss_batch: int | None = None
    samples_per_second: float | None = None
    updated: Sequence[int] = ()
    _loop: TrainingLoop | None = field(default=None, repr=False)

    @property
    def lr(self) -> float | None:
        """Learning rate of the next update of the first stage of this process (of its first parameter group)."""
        self.pipe._local.complete_updates()
        for stage in self.pipe.stages.values():
            if rates := stage.optimization.learning_rates():
                return rates[0]
        return None

    @property
    def staleness(self) -> list[float]:
        """Mean measured staleness of each stage, in updates; of stages in other processes as of the last evaluation,
        gather or drain."""
        return [stage.mean for stage in self.pipe.staleness]

    def stop(self) -> None:
        """End training after the same batch in all processes, from whichever process it is called: in one process after
        this batch, else after a few more. What is in flight is completed, as at the regular end.

        >>> import torch, offbeat
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
        >>> class StopAfter:
        ...     def on_step(self, step):
        ...         if step.batch == 1:
        ...             step.stop()
        >>> pipe.fit(batches, epochs=10, callbacks=[StopAfter()])
        >>> pipe.batches
        2
        """
        assert self._loop is not None
        self._loop.requested = True


class Callback:
    """The methods that `Pipeline.fit` calls, in every process that was given the callback; a callback needs only those
    it uses, and need not inherit from this class.

    collective  True for a callback whose methods communicate between processes (`pipe.gather`, `pipe.evaluate`): `fit`
                checks that every process has it
    evaluated   True for a callback that needs evaluations: `fit` refuses it without `evaluate`
    saves       True for a callback that calls `pipe.save`: it is called after the others, so that a checkpoint has the
                states of all of them after the same batch

    A callback that has the methods `state_dict()` and `load_state_dict(state)` is saved in the checkpoints of
    `pipe.save`, and restored by `fit(..., resume=True)` after `pipe.load`, before its other methods are called. A state
    is made of dicts, lists, tuples, numbers, text and tensors. Callbacks are matched by class and by their order among
    those of the same class. In several processes each saves its own; each loads the states of all, merged: dicts key
    by key, and of other values its own, or that of the first process that has one.

    >>> class PrintLoss:
    ...     def on_step(self, step):
    ...         if step.batch % 100 == 0:
    ...             print(step.loss_batch, step.loss)
    """

    collective = False
    evaluated = False
    saves = False

    def on_step(self, step: TrainingStep) -> None:
        """After every batch (with `batch=`, every micro-batch)."""

    def on_update(self, step: TrainingStep) -> None:
        """After a batch in which stages of this process have changed their weights: `step.updated`. The updates of the
        drain at the end are included."""

    def on_epoch_end(self, step: TrainingStep) -> None:
        """After the last batch of an epoch, and its evaluation; batches are still in flight."""

    def on_evaluate(self, step: TrainingStep, result: Mapping[str, Any]) -> None:
        """After an evaluation by `fit(evaluate=...)`; the result is the same in every process."""

    def on_end(self, step: TrainingStep) -> None:
        """At the end of `fit`, also after an error: to close files. `step.losses` has those that were not known
        before."""


def check_callbacks(callbacks: object) -> list[Any]:
    """The callbacks as a list; refuses one without a known method, or with an unknown one."""
    if callbacks is None:
        return []
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UserError(f"callbacks is {kind_of(callbacks)}: give a list of callbacks, such as [EMA(0.999)]")
    for callback in callbacks:
        name = type(callback).__name__
        if sum(callback is other for other in callbacks) > 1:
            raise UserError(f"callback {name} is given twice: give each object once")
        if isinstance(callback, type):
            raise UserError(f"callback {callback.__name__} is a class: give an object, {callback.__name__}(...)")
        named = [each for each in dir(callback) if each.startswith("on_") and callable(getattr(callback, each))]
        for each in named:
            if each not in EVENTS:
                raise unknown(f"method of callback {name}", each, EVENTS)
        if not named:
            raise UserError(f"callback {name} has no method that fit calls: define one of {', '.join(EVENTS)}")
    return list(callbacks)
