"""How far the clocks of several hosts are apart.

On one host every process reads the same clock. Between hosts messages go to and fro before a recording, and the fastest
exchange counts: a clock that was read in the middle of it is off by at most half of the round trip. (How far
they drift apart afterwards, some microseconds a second, is not in that.)

    here    t0 ---.                   .--> t3
                   `--> t1 ... t2 ---'               there
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.core.links import Link, Message
from offbeat.engines import Engine

ROUNDS = 50  # exchanges with each stage that is on another host


@dataclass(frozen=True)
class ClockOffset:
    """What the clock of a stage shows when the first stage's shows 0, and how wrong that may be; nanoseconds."""

    offset: int = 0
    uncertainty: int = 0


def clock() -> str:
    """A name of the clock that this process reads: equal where `time.perf_counter_ns` is."""
    found = []
    try:
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())  # a machine since it was started
        found.append(os.readlink("/proc/self/ns/time"))  # containers may have a clock of their own
    except OSError:
        pass
    return " ".join(found) or platform.node()


def clock_offsets(engine: Engine, down: Mapping[int, Link], up: Mapping[int, Link]) -> dict[int, ClockOffset]:
    """The clocks of all stages of this replica; collective. `down` and `up` are links from and to the first stage, by
    the other one."""
    begin = engine.replicas_here[0] * engine.K
    clocks = engine.exchange(clock())[begin : begin + engine.K]
    found = {k: ClockOffset() for k in range(1, engine.K + 1)}
    for k, its in enumerate(clocks, start=1):
        if its == clocks[0]:
            continue
        if k in engine.here:
            _answer(down[k], up[k])
        elif 1 in engine.here:
            found[k] = _ask(down[k], up[k])
    return found


def _ask(down: Link, up: Link) -> ClockOffset:
    best = None
    for number in range(ROUNDS):
        sent = time.perf_counter_ns()
        down.send(Message(number))
        heard, answered = up.receive().content
        back = time.perf_counter_ns()
        way = (back - sent) - (answered - heard)
        if best is None or way < best[0]:
            best = way, ((heard - sent) + (answered - back)) // 2
    assert best is not None
    return ClockOffset(offset=best[1], uncertainty=-(-best[0] // 2))


def _answer(down: Link, up: Link) -> None:
    for number in range(ROUNDS):
        down.receive()
        heard = time.perf_counter_ns()
        up.send(Message(number, (heard, time.perf_counter_ns())))
