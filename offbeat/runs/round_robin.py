"""Several runs in one process, which take turns: each trains one batch per turn.

    run 1  | batch 0     . | batch 1     . | ...
    run 2  |     batch 0 . |     batch 1 . | ...

On a GPU a turn only launches kernels, on streams of each run, so that the kernels of all runs overlap.

Each run has its own model, random streams, data order and records, so its results are bit for bit those of the run
alone. What a process has only once (threads, signals, the terminal) is handled here. A run that fails does not stop the
others. Ctrl-C saves and stops all. A time limit ends runs right after a checkpoint, or at the limit, from where they
are resumed from their newest checkpoint.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from offbeat.errors import FolderTaken, Interrupted
from offbeat.runs.signals import stopping
from offbeat.runs.training_run import TrainingRun

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Ending:
    """How a run ended: with a result, by an error, or (neither) by the time limit, to be resumed later."""

    result: dict[str, Any] | None = None
    error: Exception | None = None

    @property
    def by_budget(self) -> bool:
        return self.result is None and self.error is None


@dataclass
class ActiveRun:
    """A run that trains, and the time of its last checkpoint."""

    run: TrainingRun
    steps: Generator[None, None, dict[str, Any] | None]
    since: float
    saved: int | None = None
    stream: torch.cuda.Stream | None = None  # for batches and evaluations of the run


@dataclass
class RoundRobin(Generic[Name]):
    """Runs that take turns, `together` at once. `start` begins a run; `ended` is called when one has ended.

    until   the time limit, in seconds of time.monotonic(); None for no limit
    """

    start: Callable[[Name], TrainingRun]
    ended: Callable[[Name, Ending], None]
    together: int = 1
    until: float | None = None
    running: dict[Name, ActiveRun] = field(default_factory=dict)
    intervals: list[float] = field(default_factory=list)  # seconds from one checkpoint of a run to its next
    stopped: str = ""  # the signal that stopped all runs

    def all(self, names: Iterable[Name]) -> None:
        """Run all, within the time limit; raises Interrupted if a signal stopped them."""
        waiting = deque(names)
        with stopping(self._stop):
            try:
                while self.running or self._may_start(waiting):
                    while len(self.running) < self.together and self._may_start(waiting):
                        self._start(waiting.popleft())
                    for name in list(self.running):
                        self._turn(name)
            finally:
                for name in list(self.running):  # an error outside the runs
                    self._leave(name)
        if self.stopped:
            raise Interrupted(f"stopped by {self.stopped}")

    def _stop(self, why: str) -> None:
        self.stopped = why
        for active in self.running.values():
            active.run.stop(why)

    def _may_start(self, waiting: deque[Name]) -> bool:
        """Whether a run is waiting, and there is time for it to reach a checkpoint."""
        if not waiting or self.stopped:
            return False
        return self.until is None or time.monotonic() + min(self.intervals, default=0.0) < self.until

    def _start(self, name: Name) -> None:
        try:
            run = self.start(name)
        except (Interrupted, KeyboardInterrupt, FolderTaken):
            raise
        except Exception as error:
            self.ended(name, Ending(error=error))
            return
        self.running[name] = ActiveRun(run, run.steps(), time.monotonic(), run.saver.saved, _stream(run.recipe.device))
        if self.stopped:  # while the run was started
            run.stop(self.stopped)

    def _turn(self, name: Name) -> None:
        active = self.running[name]
        if torch.get_num_threads() != active.run.recipe.threads_per_stage:  # results depend on it
            torch.set_num_threads(active.run.recipe.threads_per_stage)
        try:
            with torch.cuda.stream(active.stream) if active.stream else nullcontext():
                next(active.steps)
        except StopIteration as end:
            self._leave(name)
            self.ended(name, Ending(result=end.value))
        except Interrupted:
            self._leave(name)
        except Exception as error:
            self._leave(name)
            self.ended(name, Ending(error=error))
        else:
            if self._out_of_time(active):
                self._leave(name)
                self.ended(name, Ending())

    def _out_of_time(self, active: ActiveRun) -> bool:
        """Whether the time limit is reached, or would be before the next checkpoint of a run that has just saved one. A
        run that has trained all its epochs may finish."""
        if active.run.first_epoch >= active.run.recipe.epochs:
            return False
        now = time.monotonic()
        if active.run.saver.saved != active.saved:
            active.saved = active.run.saver.saved
            self.intervals.append(now - active.since)
            active.since = now
            return self.until is not None and now + self.intervals[-1] > self.until
        return self.until is not None and now >= self.until

    def _leave(self, name: Name) -> None:
        active = self.running.pop(name)
        active.steps.close()
        active.run.pipe.close()
        active.run.close()
        on_gpu = active.run.recipe.device == "cuda"
        del active
        if on_gpu:
            torch.cuda.synchronize()  # kernels of a failed run may still use its memory
            gc.collect()  # stages and graphs refer to each other; the next run needs their memory


def _stream(device: str) -> torch.cuda.Stream | None:
    """A stream that waits for the work launched so far."""
    if device != "cuda":
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
