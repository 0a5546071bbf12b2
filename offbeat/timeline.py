"""The interpreter with durations and without tensors: when every stage does what, and how long a batch takes.

A stage does its operations in the order of its program, each as soon as it is free and the message has arrived; sends
cost the stage nothing. So what a method hides of a link's latency, and what not, follows from its program alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.ops import Backward, Barrier, Forward, Operation, Take, Teach, Update


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
        forward, backward = self.forward[k - 1], self.backward[k - 1]
        if isinstance(operation, Forward):
            return forward / method.m
        if isinstance(operation, Backward):
            return (backward + (forward if method.replays(k, self.K) else 0.0)) / method.m
        return self.update[k - 1] if isinstance(operation, Update) and self.update else 0.0


def balanced(K: int, *, forward: float = 1.0, backward: float = 2.0) -> Costs:
    """K equal stages without communication, by default with B = 2F."""
    return Costs([forward] * K, [backward] * K)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one stage, from when to when."""

    k: int
    operation: Operation
    start: float
    end: float


def timeline(method: Method, batches: int, costs: Costs) -> list[Span]:
    """The spans of all stages for that many batches, fill and drain included, in the order of each stage's program."""
    K = costs.K
    todo = [[op for iteration in method.program(k, K, range(batches)) for op in iteration] for k in range(1, K + 1)]
    place, free = [0] * K, [0.0] * K
    arrived: dict[tuple[str, int, int], float] = {}  # (direction, stage that receives, batch) -> when
    spans: list[Span] = []
    while any(place[here] < len(todo[here]) for here in range(K)):
        before = list(place)
        for here in range(K):
            k = here + 1
            while place[here] < len(todo[here]):
                operation = todo[here][place[here]]
                if isinstance(operation, Barrier):
                    break
                start = _start(operation, k, K, free[here], arrived, method)
                if start is None:
                    break
                end = start + costs.of(operation, k, method)
                _send(operation, k, K, end, costs, method, arrived)
                spans.append(Span(k, operation, start, end))
                free[here] = end
                place[here] += 1
        if place == before and not _pass_barrier(todo, place, free):
            raise UserError(f"{method.name} at K={K}: its programs wait for each other; no stage can go on")
    return spans


def _start(
    operation: Operation, k: int, K: int, free: float, arrived: dict[tuple[str, int, int], float], method: Method
) -> float | None:
    """When the operation can begin; None while its message is not known to be under way."""
    if isinstance(operation, Forward | Take) and k > 1:
        when = arrived.get(("up", k, operation.t))
    elif isinstance(operation, Teach) or (isinstance(operation, Backward) and method.waits(k, K)):
        when = arrived.get(("down", k, operation.t))
    else:
        return free
    return None if when is None else max(free, when)


def _send(operation: Operation, k: int, K: int, end: float, costs: Costs, method: Method,
          arrived: dict[tuple[str, int, int], float]) -> None:  # fmt: skip
    if isinstance(operation, Forward) and k < K:
        arrived["up", k + 1, operation.t] = end + (costs.up[k - 1] / method.m if costs.up else 0.0)
    elif isinstance(operation, Backward) and k > 1:
        arrived["down", k - 1, operation.t] = end + (costs.down[k - 2] / method.m if costs.down else 0.0)


def _pass_barrier(todo: list[list[Operation]], place: list[int], free: list[float]) -> bool:
    """Let all stages pass the barrier that they have reached; those that are through with their program are past it."""
    waiting = [here for here, at in enumerate(place) if at < len(todo[here])]
    if not all(isinstance(todo[here][place[here]], Barrier) for here in waiting):
        return False
    latest = max(free)
    for here in waiting:
        place[here] += 1
        free[here] = latest
    return True


def period(method: Method, costs: Costs) -> float:
    """Seconds a batch in steady state: of the stage that is slowest, from a batch after the fill to one much later."""
    K = costs.K
    if method.order:  # batches may be skipped or repeated: what the slowest stage takes for many
        many = 40 * K
        return max(span.end for span in timeline(method, many, costs)) / many / method.workers
    lag = max(method.lag(k, K) for k in range(1, K + 1))
    first = 4 * K + 4 * method.M + lag
    last = first + method.M * (8 + -(-4 * K // method.M))  # whole windows, or updates would be counted unevenly
    ends: dict[tuple[int, int], float] = {}
    for span in timeline(method, last + 4 * K + lag, costs):
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
