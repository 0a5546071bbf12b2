"""The runner of all studies: tasks in order, in a folder that one process uses at a time.

order         tasks run in the order given; those whose results are in the folder already are not given
budget        no task starts that would end after the budget, by what the task before it took
failures      a task that fails is recorded with the reason, and the others run
interruption  Ctrl-C keeps all results so far; the message states how to continue
records       a file is written completely or not at all
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offbeat.errors import FolderTaken, Interrupted, NotFinite, UserError, first_line
from offbeat.runs import lock, record

Task = TypeVar("Task")


@dataclass(frozen=True)
class Failure:
    """Why a task has no result: one line, and the traceback of an error that was not foreseen."""

    reason: str
    traceback: str | None = None
    diverged: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, UserError):
            return cls(str(error), diverged=isinstance(error, NotFinite))
        return cls(f"{type(error).__name__}: {first_line(error)}", "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class StudyRunner:
    """Runs the tasks of a study in `folder`, for at most `minutes` (None: without limit)."""

    folder: Path
    minutes: float | None = None
    show: bool = True
    began: float = field(default_factory=lambda: time.monotonic())

    # ---- time and progress

    @property
    def seconds(self) -> float:
        """Since the study began."""
        return time.monotonic() - self.began

    @property
    def deadline(self) -> float | None:
        """The end of the budget, in time.monotonic() seconds."""
        return None if self.minutes is None else self.began + 60 * self.minutes

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether a task that takes so long would end within the budget."""
        return self.deadline is None or time.monotonic() + seconds < self.deadline

    def report(self, line: str) -> None:
        """A line of progress on standard error, with the seconds so far."""
        if self.show:
            print(f"[{self.seconds:4.0f} s] {line}", file=sys.stderr, flush=True)

    # ---- the folder

    @contextmanager
    def opened(self, finish: Callable[[], object], *, arguments: str = "") -> Iterator[None]:
        """Use the folder alone. After Ctrl-C, `finish` writes what there is; `arguments` are those with which the
        study continues."""
        with lock.held(self.folder):
            try:
                yield
            except (Interrupted, KeyboardInterrupt) as error:
                finish()
                again = f"repeat the command{arguments} to continue in {self.folder}"
                raise Interrupted(f"{str(error) or 'stopped by Ctrl-C'}; {again}") from None

    def write(self, name: str, content: str | dict[str, Any], *, indent: int = 2) -> None:
        """A file of the folder, completely or not at all; a dictionary as JSON."""
        text = content if isinstance(content, str) else json.dumps(content, indent=indent) + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            record.write(self.folder / name, text)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder} ({first_line(error)}): give another folder as out="
            ) from error

    # ---- tasks

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], object],
        *,
        failed: Callable[[Task, Failure], object] | None = None,
        late: Callable[[Task], object] = lambda task: None,
        resumable: bool = False,
        least: int = 0,
        errors: type[Exception] = Exception,
    ) -> None:
        """Do the tasks in order. `failed` records one that raised, `late` one for which there is no time.

        resumable   the budget interrupts a task, which continues another time: it starts in whatever time is left
        least       so many are done without time left, too
        errors      those that end a task alone; others end the study, and so do all without `failed`
        """
        took = 0.0
        for place, task in enumerate(tasks):
            if place >= least and not self.has_time(0.0 if resumable else took):
                late(task)
                continue
            began = self.seconds
            with isolated(partial(failed, task), errors=errors) if failed else nullcontext():
                work(task)
            took = self.seconds - began


@contextmanager
def isolated(failed: Callable[[Failure], object], *, errors: type[Exception] = Exception) -> Iterator[None]:
    """An error ends this task alone, and is passed on; an interruption, or a folder in use elsewhere, ends all."""
    try:
        yield
    except (Interrupted, FolderTaken):
        raise
    except errors as error:
        failed(Failure.of(error))
