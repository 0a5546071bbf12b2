"""The signals that stop a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopping(stop: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, which saves and stops; another one, at least a second later, raises
    KeyboardInterrupt.

    (Ctrl-C in a terminal reaches a worker twice: from the terminal, and from its launcher.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def handle(number: int, frame: object) -> None:
        now = time.monotonic()
        if first and now - first[0] >= 1.0:
            raise KeyboardInterrupt
        if not first:
            first.append(now)
            stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
