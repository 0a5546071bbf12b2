"""The recorded trace of a run, and what the clock would have had its stages do with the same costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.ops import Backward, Forward, Update
from offbeat.timeline import Costs, period, timeline

KINDS = ("forward", "backward", "update", "send", "wait", "drain")
BUSY = ("forward", "backward", "update", "send")


@dataclass(frozen=True, slots=True)
class Interval:
    """What one stage did, from when to when, in seconds."""

    k: int
    kind: str
    start: float
    end: float
    batch: int | None = None


@dataclass(frozen=True)
class Trace:
    """All intervals of all stages, on one clock.

    idle_shares   share of its time in which each stage was idle, where the trace has it, without evaluations
    """

    K: int
    intervals: list[Interval]
    idle_shares: tuple[float, ...] | None = None

    def window(self) -> tuple[float, float]:
        """When all stages were being recorded: from the last that began to the first that ended."""
        begins = [min(one.start for one in self.of(k)) for k in self.stages]
        ends = [max(one.end for one in self.of(k)) for k in self.stages]
        return (max(begins), min(ends)) if max(begins) < min(ends) else (min(begins), max(ends))

    @property
    def stages(self) -> list[int]:
        """Those that have been recorded."""
        return sorted({one.k for one in self.intervals})

    def of(self, k: int, *kinds: str) -> list[Interval]:
        return [one for one in self.intervals if one.k == k and (not kinds or one.kind in kinds)]

    def seconds(self, k: int, kind: str) -> float:
        """The median; 0 where the stage did no such thing."""
        found = [one.end - one.start for one in self.of(k, kind)]
        return median(found) if found else 0.0

    def idle(self) -> list[float | None]:
        """Share of the recording in which each stage did no work, as recorded, or else neither computed nor sent while
        all were recorded; None for a stage that was not."""
        if self.idle_shares:
            return list(self.idle_shares)
        start, end = self.window()
        shares: list[float | None] = []
        for k in range(1, self.K + 1):
            busy = covered(((one.start, one.end) for one in self.of(k, *BUSY)), start, end)
            shares.append(1 - busy / (end - start) if self.of(k) and end > start else None)
        return shares

    def costs(self, method: Method) -> Costs:
        """What a batch costs each stage, as recorded, without what the clock adds itself for a repeated forward."""
        stages = range(1, self.K + 1)
        forward = [self.seconds(k, "forward") * method.m for k in stages]
        backward = [self.seconds(k, "backward") * method.m for k in stages]
        for k in stages:
            if method.replays(k, self.K):
                backward[k - 1] = max(0.0, backward[k - 1] - forward[k - 1])
        return Costs(forward, backward, [self.seconds(k, "update") for k in stages])

    def excerpt(self, turns: int) -> Trace:
        """The stretch of median length among those of `turns` turns of stage 1; from the start of a forward, at 0."""
        starts = sorted(one.start for one in self.of(1, "forward"))
        stretches = sorted(zip(starts, starts[turns:], strict=False), key=lambda stretch: stretch[1] - stretch[0])
        if stretches:
            return self.between(*stretches[len(stretches) // 2])
        return self.between(starts[0] if starts else self.window()[0], max(one.end for one in self.intervals))

    def between(self, start: float, end: float) -> Trace:
        """What happened then, cut off at both ends; time begins at 0."""
        kept = [one for one in self.intervals if one.end > start and one.start < end]
        return Trace(
            self.K, [replace(one, start=max(one.start, start) - start, end=min(one.end, end) - start) for one in kept]
        )

    @property
    def length(self) -> float:
        return max((one.end for one in self.intervals), default=0.0)


def covered(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of a window that are in at least one of the spans.

    >>> covered([(0, 2), (1, 3), (5, 9)], 1, 6)
    3.0
    """
    total, until = 0.0, start
    for begin, finish in sorted(spans):
        begin, finish = max(begin, until), min(finish, end)
        if finish > begin:
            total += finish - begin
            until = finish
    return total


def read_trace(content: Any) -> Trace:
    """A trace in Chrome's format; UserError with the reason where it is none."""
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise UserError("it has no list traceEvents")
    intervals = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") not in KINDS:
            continue
        k: Any = event.get("tid")
        start: Any = event.get("ts")
        length: Any = event.get("dur")
        if not (_whole(k) and k >= 1 and finite(start) and finite(length) and length >= 0):
            raise UserError(f"an event has no place in time and stage: {str(event)[:80]}")
        arguments = event.get("args")
        batch = arguments.get("batch") if isinstance(arguments, dict) else None
        end = (start + length) / 1e6
        intervals.append(Interval(k, event["cat"], start / 1e6, end, batch if _whole(batch) else None))
    if not intervals:
        raise UserError("it has no operations")
    other = content.get("otherData")
    other = other if isinstance(other, dict) else {}
    most = max(one.k for one in intervals)
    K = max(other["K"], most) if _whole(other.get("K")) else most
    idle: Any = other.get("idle")
    fits = isinstance(idle, list) and len(idle) == K and all(finite(share) and 0 <= share <= 1 for share in idle)
    return Trace(K, intervals, tuple(map(float, idle)) if fits else None)


def finite(value: Any) -> bool:
    """Whether it is a number, and neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- the plan

NAMES = {Forward: "forward", Backward: "backward", Update: "update"}


def planned(
    method: Method, costs: Costs, *, turns: int, length: float | None = None, first: int | None = None
) -> Trace:
    """The timeline of these costs in steady state: for that number of turns of stage 1, or of seconds.

    first: what the first batch that stage 1 forwards is called, to stand beside a recorded one

    >>> from offbeat.methods import ADL
    >>> from offbeat.timeline import balanced
    >>> trace = planned(ADL(M=1), balanced(2), turns=2)
    >>> [(one.k, one.kind, one.start, one.end) for one in trace.of(1, "forward", "backward")][:2]
    [(1, 'forward', 0.0, 1.0), (1, 'backward', 1.0, 3.0)]
    """
    K = costs.K
    fill = 2 * K + 2 * method.M + 2 * method.fill(K)
    fill += ((first or 0) // method.m - fill) % method.M  # so that updates come where they came there
    turn = period(method, costs) * method.workers
    length = length or turns * turn
    batches = fill + 2 * turns + math.ceil(length / turn if turn > 0 else turns) + 2 * K
    spans = timeline(method, batches, costs)
    starts = [
        span.start
        for span in spans
        if span.k == 1 and isinstance(span.operation, Forward) and span.operation.t >= fill * method.m
    ]
    start = min(starts, default=0.0)
    intervals = [
        Interval(span.k, NAMES[type(span.operation)], span.start, span.end, getattr(span.operation, "t", None))
        for span in spans
        if type(span.operation) in NAMES
    ]
    shown = Trace(K, intervals).between(start, start + length)
    shift = 0 if first is None else first - fill * method.m
    moved = [one if one.batch is None else replace(one, batch=one.batch + shift) for one in shown.intervals]
    return Trace(K, moved)


def planned_idle(plan: Trace) -> list[float]:
    """Share of the planned time in which each stage waits."""
    length = plan.length
    return [
        1 - covered(((one.start, one.end) for one in plan.of(k, *BUSY)), 0.0, length) / length if length else 0.0
        for k in range(1, plan.K + 1)
    ]


def usable(costs: Costs) -> bool:
    """Whether every stage has a time of its own."""
    return all(forward + backward > 0 for forward, backward in zip(costs.forward, costs.backward, strict=True))


def costs_from_shares(shares: Sequence[float]) -> Costs:
    """Costs of stages of which only the shares of a forward are known: B = 2F, the mean forward is 1."""
    mean = sum(shares) / len(shares) or 1.0
    forward = [share / mean for share in shares]
    return Costs(forward, [2 * cost for cost in forward])
