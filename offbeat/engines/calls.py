"""Which call of the user's script each process is in, for the error about calls that do not match.

    stage 1: evaluate (train.py:31), stage 2: step (train.py:24)

A process keeps its own call in memory; a thread writes it to the store of the group where it has changed, every few
seconds. So a step does not wait for the network, and a process that waits for long has its call in the store.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import Any, NamedTuple

from offbeat.call_stack import INSIDE, PACKAGE, calling_frame

LONGEST_PAUSE = 10.0  # seconds between two looks at the call
UNKNOWN = "no call so far"


class Call(NamedTuple):
    """A call into the package, and the line of the script that makes it."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        path = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{self.name} ({path}:{self.line})"


def current_call() -> Call | None:
    """The innermost call from outside of the package; None where there is none.

    >>> current_call() and current_call().name
    'current_call'
    """
    frame, between = calling_frame(*INSIDE)
    if frame is None:
        return None
    name = [each.name for each in between if each.is_of(PACKAGE) and each.name != "<module>"][-1]
    return Call("Pipeline" if name == "__init__" else name, frame.f_code.co_filename, frame.f_lineno)


class Calls:
    """The calls of all processes of a group.

    timeout   seconds that a call may wait for other processes; `inf`: the store is not used
    """

    def __init__(self, rank: int, names: list[str], store: Any, *, timeout: float) -> None:
        """names: of the stages of all processes."""
        self.rank, self.names, self.store, self.timeout = rank, names, store, timeout
        self.call: Call | None = None  # the present one, or the last
        self.inside = 0  # calls that are open, one inside the other
        self.leaving = threading.Event()
        self.publishes = True
        self.threads: list[threading.Thread] = []
        if math.isfinite(timeout):
            self.threads = [threading.Thread(target=self._publish, name="offbeat-calls", daemon=True)]
            self.threads[0].start()

    def __enter__(self) -> None:
        self.call, self.inside = current_call() or self.call, self.inside + 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    def __str__(self) -> str:
        if self.call is None:
            return UNKNOWN
        if self.leaving.is_set():
            return f"ended, after {self.call}"
        return str(self.call) if self.inside else f"none, after {self.call}"

    def close(self, *, publish: bool) -> None:
        """End; publish: whether to tell the store, which may have ended with its process."""
        self.publishes = publish
        self.leaving.set()

    def _key(self, rank: int) -> str:
        return f"offbeat/calls/{rank}"

    def _publish(self) -> None:
        published = ""
        with contextlib.suppress(RuntimeError):  # the store ended with its process
            leaving = False
            while not leaving:
                leaving = self.leaving.wait(min(self.timeout / 4, LONGEST_PAUSE))
                if self.publishes and (now := str(self)) != published:
                    self.store.set(self._key(self.rank), now)
                    published = now

    def report(self) -> str:
        """The calls of all processes, as far as the store has them."""
        found = {self.rank: str(self)}
        asking = threading.Thread(target=self._ask, args=(found,), name="offbeat-store", daemon=True)
        asking.start()
        asking.join(min(self.timeout, 2.0))
        return ", ".join(f"{name}: {found.get(rank, UNKNOWN)}" for rank, name in enumerate(self.names))

    def _ask(self, found: dict[int, str]) -> None:
        with contextlib.suppress(RuntimeError):
            for rank in range(len(self.names)):
                if rank != self.rank and self.store.check([self._key(rank)]):
                    found[rank] = self.store.get(self._key(rank)).decode()
