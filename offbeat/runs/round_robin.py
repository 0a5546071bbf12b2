"""Several runs side by side in one process: each does a batch, then it is the next one's turn.

    run 1  | batch 0     . | batch 1     . | ...
    run 2  |     batch 0 . |     batch 1 . | ...

On a GPU a turn only hands out work, on streams of each run's own, so that the kernels of all runs overlap.

Each run has its own model, random streams, data order and records, so its bits are those it would have alone; what a
process has only once (threads, signals, the screen) is handled here. A run that fails ends alone. Ctrl-C saves and
stops all. A budget of time ends runs where nothing is lost, or takes them back to their newest checkpoint.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from offbeat.errors import FolderTaken, Interrupted, UserError
from offbeat.runs.signals import stopping
from offbeat.runs.training_run import TrainingRun

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Ending:
    """How a run ended: with a result, by an error, or (neither) by the budget, to go on another time."""

    result: dict[str, Any] | None = None
    error: Exception | None = None
    account: str | None = None  # the traceback of an error that nobody foresaw

    @property
    def by_budget(self) -> bool:
        return self.result is None and self.error is None


@dataclass
class ActiveRun:
    """A run under way, and when it last was safe."""

    run: TrainingRun
    steps: Generator[None, None, dict[str, Any] | None]
    since: float
    saved: int | None = None
    stream: torch.cuda.Stream | None = None  # for what the run does itself: its batches, its evaluations


@dataclass
class RoundRobin(Generic[Name]):
    """Runs by turns, so many at once. `start` makes one; `ended` hears how each ended.

    until   the end of the budget, in time.monotonic() seconds; None for no budget
    """

    start: Callable[[Name], TrainingRun]
    ended: Callable[[Name, Ending], None]
    together: int = 1
    until: float | None = None
    running: dict[Name, ActiveRun] = field(default_factory=dict)
    intervals: list[float] = field(default_factory=list)  # seconds from one checkpoint of a run to its next
    stopped: str = ""  # why, where a signal stopped all

    def all(self, names: Iterable[Name]) -> None:
        """Run them all, as far as the budget goes; raises Interrupted where a signal stopped them."""
        waiting = deque(names)
        with stopping(self._stop):
            try:
                while self.running or self._may_start(waiting):
                    while len(self.running) < self.together and self._may_start(waiting):
                        self._start(waiting.popleft())
                    for name in list(self.running):
                        self._turn(name)
            finally:
                for name in list(self.running):  # something that no single run is to blame for
                    self._leave(name)
        if self.stopped:
            raise Interrupted(f"stopped by {self.stopped}")

    def _stop(self, why: str) -> None:
        self.stopped = why
        for active in self.running.values():
            active.run.stop(why)

    def _may_start(self, waiting: deque[Name]) -> bool:
        """Whether there is one to start, and time enough for it to come to anything."""
        if not waiting or self.stopped:
            return False
        return self.until is None or time.monotonic() + min(self.intervals, default=0.0) < self.until

    def _start(self, name: Name) -> None:
        try:
            run = self.start(name)
        except (Interrupted, KeyboardInterrupt, FolderTaken):
            raise
        except Exception as error:
            self._end(name, error)
            return
        self.running[name] = ActiveRun(run, run.steps(), time.monotonic(), run.saver.saved, _stream(run.recipe.device))
        if self.stopped:  # while it was made
            run.stop(self.stopped)

    def _turn(self, name: Name) -> None:
        active = self.running[name]
        if torch.get_num_threads() != active.run.recipe.threads_per_stage:  # part of the numbers, on a CPU
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
            self._end(name, error)
        else:
            if self._out_of_time(active):
                self._leave(name)
                self.ended(name, Ending())

    def _out_of_time(self, active: ActiveRun) -> bool:
        """Whether the budget is spent, or would be before the next checkpoint of a run that has just made one; a run
        that has trained for all its epochs only has to say so."""
        if active.run.first_epoch >= active.run.recipe.epochs:
            return False
        now = time.monotonic()
        if active.run.saver.saved != active.saved:
            active.saved = active.run.saver.saved
            self.intervals.append(now - active.since)
            active.since = now
            return self.until is not None and now + self.intervals[-1] > self.until
        return self.until is not None and now >= self.until

    def _end(self, name: Name, error: Exception) -> None:
        account = None if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        self.ended(name, Ending(error=error, account=account))

    def _leave(self, name: Name) -> None:
        active = self.running.pop(name)
        active.steps.close()
        active.run.pipe.close()
        active.run.close()
        on_gpu = active.run.recipe.device == "cuda"
        del active
        if on_gpu:
            torch.cuda.synchronize()  # a run that failed may still be at work in its memory
            gc.collect()  # stages and graphs know each other; the next run needs their memory


def _stream(device: str) -> torch.cuda.Stream | None:
    """A stream that goes on from what was asked for so far."""
    if device != "cuda":
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
