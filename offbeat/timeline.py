"""Steps with durations: when every stage does what, and how long a batch takes.

A stage does its operations in the order of its program, each as soon as it is free and the message has arrived; sends
cost the stage nothing. So what a method hides of a link's latency, and what not, follows from its program alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from offbeat.errors import UserError
from offbeat.interpreter import Mail, Step
from offbeat.method import Method
from offbeat.ops import Backward, Barrier, Forward, Operation, Update

MOST_TURNS = 100_000  # local iterations of a trace, which is held in memory and read by people


@dataclass(frozen=True)
class Costs:
    """Seconds a batch of each stage, and seconds that a message is under way.

    up[k-1] and down[k-1] belong to the boundary between stages k and k+1: activations up, gradients down.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float] = ()
    up: Sequence[float] = field(default=())
    down: Sequence[float] = field(default=())
    baseline: float | None = None  # seconds a batch of BP on one worker, where workers differ

    @property
    def K(self) -> int:  # noqa: N802
        return len(self.forward)

    @property
    def alone(self) -> float:
        """Seconds a batch of back-propagation on one worker, the fastest."""
        return self.baseline or sum(self.forward) + sum(self.backward) + sum(self.update)

    def of(self, operation: Operation, k: int, method: Method) -> float:
        """Seconds that the operation keeps stage k busy."""
        if isinstance(operation, Forward):
            return self.forward[k - 1] / method.m
        if isinstance(operation, Backward):
            return self.backward[k - 1] / method.m + self.replayed(k, method)
        return self.update[k - 1] if isinstance(operation, Update) and self.update else 0.0

    def replayed(self, k: int, method: Method) -> float:
        """Seconds at the start of a backward in which stage k repeats the forward."""
        return self.forward[k - 1] / method.m if method.replays(k, self.K) else 0.0

    def under_way(self, source: int, target: int, method: Method) -> float:
        """Seconds that a message between two stages takes."""
        times = self.up if target > source else self.down
        return times[min(source, target) - 1] / method.m if times else 0.0


def balanced(K: int, *, forward: float = 1.0, backward: float = 2.0) -> Costs:
    """K equal stages without communication, by default with B = 2F."""
    return Costs([forward] * K, [backward] * K)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one stage, from when to when.

    version    of the weights that it computes with, or that an update makes
    replayed   seconds at the start of a backward in which it repeats its forward
    """

    k: int
    operation: Operation
    start: float
    end: float
    version: int = 0
    replayed: float = 0.0


def timeline(method: Method, batches: int, costs: Costs) -> list[Span]:
    """The spans of all stages for that many batches, fill and drain included, in the order of each stage's program."""
    K = costs.K
    programs = [chain.from_iterable(method.steps(k, K, range(batches))) for k in range(1, K + 1)]
    ahead = [next(program, None) for program in programs]
    replayed = [costs.replayed(k, method) for k in range(1, K + 1)]
    busy: list[dict[type, float]] = [
        {type(each): costs.of(each, k, method) for each in (Forward(0), Backward(0), Update(1))}
        for k in range(1, K + 1)
    ]
    free, mail, spans = [0.0] * K, Mail(), list[Span]()
    awake = list(range(K, 0, -1))  # stages that may be able to go on
    while awake or any(ahead):
        awake = awake or _pass_barrier(ahead, programs, free)
        if not awake:
            raise UserError(f"{method.name} at K={K}: its programs wait for each other; no stage can go on")
        here = awake.pop() - 1
        while (step := ahead[here]) is not None and not isinstance(operation := step.operation, Barrier):
            when = mail.take(step)
            if when is None:
                break
            start = max(free[here], when)
            end = free[here] = start + busy[here].get(type(operation), 0.0)
            if step.sends:
                awake.append(step.sends)
                mail.send(step, end + costs.under_way(step.k, step.sends, method))
            repeated = replayed[here] if isinstance(operation, Backward) else 0.0
            spans.append(Span(step.k, operation, start, end, step.version, repeated))
            ahead[here] = next(programs[here], None)
    return spans


def _pass_barrier(ahead: list[Step | None], programs: Sequence[Iterator[Step]], free: list[float]) -> list[int]:
    """Let all stages pass the barrier that they have reached, if all have: which these are. Those that are through with
    their program are past it."""
    waiting = [step.k for step in ahead if step is not None]
    if not all(isinstance(step.operation, Barrier) for step in ahead if step is not None):
        return []
    latest = max(free)
    for k in waiting:
        ahead[k - 1] = next(programs[k - 1], None)
        free[k - 1] = latest
    return waiting[::-1]


def period(method: Method, costs: Costs) -> float:
    """Seconds a batch in steady state: of the stage that is slowest, from a batch after the fill to one much later."""
    K = costs.K
    if method.order:  # batches may be skipped or repeated: what the slowest stage takes for many
        many = 40 * K
        return max(span.end for span in timeline(method, many, costs)) / many / method.workers
    fill = method.fill(K)
    first = 4 * K + 4 * method.M + fill
    last = first + method.M * (8 + -(-4 * K // method.M))  # whole windows, or updates would be counted unevenly
    ends: dict[tuple[int, int], float] = {}
    for span in timeline(method, last + 4 * K + fill, costs):
        if isinstance(span.operation, Backward):
            place = span.k, span.operation.t // method.m
            ends[place] = max(span.end, ends.get(place, 0.0))
    slowest = max(ends[k, last - 1] - ends[k, first - 1] for k in range(1, K + 1))
    return slowest / (last - first) / method.workers


def speed_up(method: Method, costs: Costs, *, batches: int | None = None) -> float:
    """How much faster than back-propagation on one worker: in steady state, or for so many batches with fill and drain.

    >>> from offbeat.methods import ADL, DDG
    >>> round(speed_up(ADL(M=4), balanced(4)), 2), round(speed_up(DDG(), balanced(4)), 2)
    (4.0, 2.0)
    """
    if batches is None:
        return costs.alone / period(method, costs)
    return batches * costs.alone / max(span.end for span in timeline(method, batches, costs))
