"""What every benchmark shares: pinning, a stopwatch, links that send nothing, the peak of a process's memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from offbeat.core.links import Message


class Canned:
    """A link that always has the same message and throws away what is sent."""

    def __init__(self, content: Any) -> None:
        self.content, self.t = content, 0

    def peek(self) -> Message:
        return Message(self.t, self.content)

    def receive(self) -> Message:
        message = self.peek()
        self.t += 1
        return message

    def send(self, message: Message) -> None:
        pass


class Tap:
    """A link that remembers the last content that came through."""

    def __init__(self, link: Any) -> None:
        self.link, self.last = link, None

    def receive(self) -> Message:
        message: Message = self.link.receive()
        self.last = message.content
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


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
