"""Checkpoints during training."""

from __future__ import annotations

import time
from pathlib import Path

from offbeat.checkpoint import CheckpointFailed
from offbeat.errors import UserError, number, warn_caller
from offbeat.pipeline import Pipeline
from offbeat.pipeline.callback import TrainingStep
from offbeat.pipeline.checks import path_of


class CheckpointEvery:
    """Save a checkpoint (`pipe.save`) every N batches of the loader, or every N minutes; `pipe.load(folder)` and
    `fit(..., resume=True)` continue from it, with the states of the other callbacks. Must be given to all processes,
    which save after the same batch.

    batches, minutes    one of them. Elapsed minutes are those of the first process; the other processes save after the
                        same batch, some batches later
    keep                checkpoints that remain, the newest ones

    A checkpoint that cannot be written is a warning, and training continues.

    >>> import tempfile, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> folder = tempfile.mkdtemp()
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 10
    >>> pipe.fit(batches, callbacks=[CheckpointEvery(folder, batches=4)])
    >>> [checkpoint.name for checkpoint in sorted(Path(folder, "checkpoints").iterdir())]
    ['000000004', '000000008']
    """

    collective = saves = True

    def __init__(
        self, folder: str | Path, *, batches: int | None = None, minutes: float | None = None, keep: int = 3
    ) -> None:
        if (batches is None) == (minutes is None):
            raise UserError(f"batches={batches} and minutes={minutes}: give one of them")
        if batches is not None:
            number(batches, "batches", "use a whole number from 1 up", lambda n: n >= 1, whole=True)
        if minutes is not None:
            number(minutes, "minutes", "use a number above 0", lambda n: n > 0)
        number(keep, "keep", "use a whole number from 1 up", lambda n: n >= 1, whole=True)
        self.folder, self.batches, self.minutes, self.keep = path_of(folder), batches, minutes, keep
        self.began = time.monotonic()
        self.requested: int | None = None  # batches after which all processes save

    def on_step(self, step: TrainingStep) -> None:
        pipe, done = step.pipe, step.batch + 1
        unit = pipe.method.M if pipe.batch else 1  # micro-batches of a batch of the loader
        if self.minutes is not None:
            self._request(pipe, done, unit)
            due = pipe.marks.pop(done, None) is not None
        else:
            due = self._counted(pipe, done, unit)
        if due:
            self._save(pipe)

    def _counted(self, pipe: Pipeline, done: int, unit: int) -> bool:
        """Whether a checkpoint is due after that many batches; the stages keep what the next one needs."""
        assert self.batches is not None
        interval, notice = self.batches * unit, pipe.method.notice(pipe.K)
        if pipe.method.weights == "hybrid" and interval < notice:
            raise UserError(
                f"batches={self.batches} with weights='hybrid', which keeps weights {notice} batches ahead of a "
                f"checkpoint: use batches={-(-notice // unit)} or more"
            )
        if 0 < -done % interval <= notice:
            pipe.keep()
        return done % interval == 0

    def _request(self, pipe: Pipeline, done: int, unit: int) -> None:
        """In the first process, once the minutes are over: request a checkpoint in all processes, as early as all
        stages can keep what it needs."""
        assert self.minutes is not None
        if len(pipe.engine.replicas_here) < pipe.replicas:
            raise UserError(
                f"minutes={self.minutes:g} with replicas={pipe.replicas} in several processes, which would save after "
                "different batches: give batches="
            )
        if pipe.leads and done > (self.requested or 0) and time.monotonic() - self.began >= 60 * self.minutes:
            earliest = done + pipe.method.reach(pipe.K, done) + pipe.method.notice(pipe.K)
            self.requested = -(-earliest // unit) * unit
            pipe.mark(self.requested)

    def _save(self, pipe: Pipeline) -> None:
        self.requested, self.began = None, time.monotonic()
        try:
            pipe.save(self.folder, keep=self.keep)
        except CheckpointFailed as error:
            warn_caller(f"no checkpoint after batch {pipe.batches - 1}: {error}")
