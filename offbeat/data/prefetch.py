"""Prefetching: a background thread computes the next items while the consumer works on the last one.

consumer |        use 0    use 1    use 2 ...
thread   | make 0 1 2 (full)   3        4 ...      never more than `ahead` items wait
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(source: Iterator[Item], *, ahead: int = 3) -> Iterator[Item]:
    """The items of `source` in order, computed in a thread, at most `ahead` of them in advance.

    The thread starts with the first item requested and has ended once the iterator is exhausted, closed or
    garbage-collected, or the interpreter exits. An error in `source` is raised here, after the items before it.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    # SimpleQueue.put is reentrant: the garbage collector can close this generator in any thread at any point,
    # where a semaphore's or an Event's lock might already be held.
    free: SimpleQueue[bool] = SimpleQueue()  # one token per item that may still be computed; False means stop
    ready: SimpleQueue[tuple[list[Item], BaseException | None]] = SimpleQueue()  # no item and no error: the end
    stopped = False

    def produce() -> None:
        try:
            while free.get() and not stopped:
                ready.put(([next(source)], None))
        except StopIteration:
            ready.put(([], None))
        except BaseException as error:  # raised again in the consumer
            ready.put(([], error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    worker = threading.Thread(target=produce, name="offbeat-prefetch", daemon=True)

    def stop() -> None:
        nonlocal stopped
        stopped = True
        free.put(False)
        if worker is not threading.current_thread():
            worker.join()

    for _ in range(ahead):
        free.put(True)
    worker.start()
    # A daemon thread that is still inside numpy while the interpreter shuts down can crash it: end it before.
    atexit.register(stop)
    try:
        while True:
            items, error = ready.get()
            if error is not None:
                raise error
            if not items:
                return
            free.put(True)
            yield items.pop()  # popped, so that no batch is kept alive here
    finally:
        atexit.unregister(stop)
        stop()
