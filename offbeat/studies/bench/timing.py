"""What every benchmark shares: pinning, a stopwatch, links that send nothing, the peak of a process's memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from offbeat.core.links import Message
from offbeat.method import Method


class FixedMessages:
    """A link with the same messages for every batch, which throws away what is sent.

    contents    of a batch, or of its micro-batches
    order       the batches, or micro-batches, as the stage receives them
    """

    def __init__(self, contents: Mapping[int, Any] | None = None, order: Iterable[int] = ()) -> None:
        self.contents, self.order = contents or {}, iter(order)

    def receive(self) -> Message:
        t = next(self.order)
        return Message(t, self.contents[t % len(self.contents)])

    def send(self, message: Message) -> None:
        pass


class RecordingLink:
    """A link that remembers the last contents that came through, of each of m micro-batches."""

    def __init__(self, link: Any, m: int) -> None:
        self.link, self.m = link, m
        self.contents: dict[int, Any] = {}

    def receive(self) -> Message:
        message: Message = self.link.receive()
        self.contents[message.t % self.m] = message.content
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


def received(method: Method, k: int, K: int, source: int) -> Iterator[int]:
    """The batches, or micro-batches, in the order in which stage k receives their messages from another stage.

    >>> from itertools import islice
    >>> from offbeat.methods import GPipe
    >>> list(islice(received(GPipe(m=3), 1, 2, 2), 6))  # gradients
    [2, 1, 0, 5, 4, 3]
    """
    for iteration in method.program(k, K, count()):
        for operation in iteration:
            if method.receives(operation, k, K) == source:
                yield operation.t  # type: ignore[union-attr]


def pin(cores: set[int]) -> None:
    """Keep all threads of this process on these cores."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has ended, or a system that does not let us
            os.sched_setaffinity(int(task), cores)


def sgd(parameters: Any, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, fused=fused or None)


def timed(
    work: Callable[[], Any], warm_up: int, batches: int, *, wait: Callable[[], Any] = lambda: None
) -> tuple[float, float]:
    """Seconds a batch, of the clock and of the processor (all threads of this process), after a warm-up in which stages
    find their distance; nothing synchronises them afterwards. `wait` waits for a device that computes on its own."""
    for _ in range(warm_up):
        work()
    wait()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(batches):
        work()
    wait()
    return (time.perf_counter() - began) / batches, (time.process_time() - busy) / batches


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest."""
    return median(values), min(values), max(values)


def ratio(times: Mapping[str, Sequence[float]], above: str, below: str) -> tuple[float, float, float]:
    """Median, smallest and largest over the rounds of one time divided by another of the same round.

    >>> ratio({"a": [4.0, 9.0], "b": [2.0, 3.0]}, "a", "b")
    (2.5, 2.0, 3.0)
    """
    return spread([a / b for a, b in zip(times[above], times[below], strict=True)])


# ---- memory of this process, in bytes


def resident() -> int:
    """What it holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most that it held since its start, or since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> bool:
    """Give back what is free, and start the peak anew; False where the system does not allow it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
