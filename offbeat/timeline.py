"""The timeline: the programs of all stages with durations, and the time per batch that follows from them.

A stage runs its operations in the order of its program, each as soon as the previous one has ended and its message has
arrived; sending takes no time of the stage. How much of a link's latency a method hides follows from its program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, pairwise
from typing import NamedTuple

from offbeat.critical_cycle import Dependency, longest_period
from offbeat.errors import UserError
from offbeat.interpreter import Messages, Step, steady_state
from offbeat.method import Method
from offbeat.ops import LESSON, Backward, Barrier, Forward, Operation, Update

MOST_TURNS = 100_000  # largest number of local iterations in a trace, which is held in memory


@dataclass(frozen=True)
class Costs:
    """Seconds per batch of each stage, and seconds that messages take.

    up[k-1] and down[k-1] belong to the boundary between stages k and k+1: up for activations, down for gradients; a
    micro-batch takes its share. `latency` is added to every message, whatever its size. With `exclusive` links, one
    message at a time is transferred in each direction of a boundary, in the order of sending.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float] = ()
    up: Sequence[float] = field(default=())
    down: Sequence[float] = field(default=())
    latency: float = 0.0
    exclusive: bool = False
    baseline: float | None = None  # seconds per batch of BP on one worker, if workers differ

    @property
    def K(self) -> int:  # noqa: N802
        return len(self.forward)

    @property
    def alone(self) -> float:
        """Seconds per batch of back-propagation on one worker, the fastest one."""
        return self.baseline or sum(self.forward) + sum(self.backward) + sum(self.update)

    def of(self, operation: Operation, k: int, method: Method) -> float:
        """Seconds that the operation takes in stage k."""
        if isinstance(operation, Forward):
            return self.forward[k - 1] / method.m
        if isinstance(operation, Backward):
            return self.backward[k - 1] / method.m + self.replayed(k, method)
        return self.update[k - 1] if isinstance(operation, Update) and self.update else 0.0

    def replayed(self, k: int, method: Method) -> float:
        """Seconds at the start of a backward in which stage k repeats the forward."""
        return self.forward[k - 1] / method.m if method.replays(k, self.K) else 0.0

    def message_seconds(self, source: int, target: int, method: Method) -> float:
        """Seconds that a message between two stages takes, where it does not wait for others."""
        return self.transfer_seconds(source, target, method) + self.latency

    def transfer_seconds(self, source: int, target: int, method: Method) -> float:
        """The same without the latency."""
        times = self.up if target > source else self.down
        return times[min(source, target) - 1] / method.m if times else 0.0


def balanced(K: int, *, forward: float = 1.0, backward: float = 2.0) -> Costs:
    """Costs of K equal stages without communication, by default with a backward of two forwards."""
    return Costs([forward] * K, [backward] * K)


class Span(NamedTuple):
    """One operation of one stage, with its start and end in seconds.

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
    """The spans of all stages for a number of batches, with fill and drain, in the order of each stage's program."""
    K = costs.K
    programs = [chain.from_iterable(method.steps(k, K, range(batches))) for k in range(1, K + 1)]
    ahead = [next(program, None) for program in programs]
    durations = [_durations(costs, k, method) for k in range(1, K + 1)]
    free, messages, spans = [0.0] * K, Messages(), list[Span]()
    transferred: defaultdict[tuple[int, int], float] = defaultdict(float)  # when a link has transferred all messages
    ready = list(range(K, 0, -1))  # stages that may be able to continue
    while ready or any(ahead):
        ready = ready or _pass_barrier(ahead, programs, free)
        if not ready:
            raise UserError(f"{method.name} with K={K}: the programs of its stages wait for each other")
        k = ready.pop()
        program, step, now = programs[k - 1], ahead[k - 1], free[k - 1]
        seconds, delays, replayed = durations[k - 1]
        while step is not None and (kind := type(step.operation)) is not Barrier:
            arrived = messages.receive(step)
            if arrived is None:
                break
            start = arrived if arrived > now else now
            now = start + seconds.get(kind, 0.0)
            if step.sends is not None:
                arrives = now + delays[step.sends]
                if costs.exclusive:
                    waits = max(0.0, transferred[k, step.sends] - now)
                    arrives += waits
                    transferred[k, step.sends] = arrives - costs.latency
                messages.send(step, arrives)
                ready.append(step.sends)
            spans.append(Span(k, step.operation, start, now, step.version, replayed if kind is Backward else 0.0))
            step = next(program, None)
        ahead[k - 1], free[k - 1] = step, now
    return spans


def _durations(costs: Costs, k: int, method: Method) -> tuple[dict[type, float], dict[int, float], float]:
    """Seconds of stage k by kind of operation, seconds of a message by target, and those that a backward replays."""
    seconds = {type(each): costs.of(each, k, method) for each in (Forward(0), Backward(0), Update(1))}
    targets = {each: costs.message_seconds(k, each, method) for each in (k - 1, k + 1) if 1 <= each <= costs.K}
    return seconds, targets, costs.replayed(k, method)


def _pass_barrier(ahead: list[Step | None], programs: Sequence[Iterator[Step]], free: list[float]) -> list[int]:
    """If all stages that have not finished their program are at a barrier, let them pass it, and return them."""
    waiting = [step.k for step in ahead if step is not None]
    if not all(isinstance(step.operation, Barrier) for step in ahead if step is not None):
        return []
    latest = max(free)
    for k in waiting:
        ahead[k - 1] = next(programs[k - 1], None)
        free[k - 1] = latest
    return waiting[::-1]


def period(method: Method, costs: Costs) -> float:
    """Seconds per batch in steady state, of the slowest stage."""
    K = costs.K
    if method.free_running:
        return max(_busy(method, costs)) / method.workers
    if method.order:  # batches may be skipped or repeated: the mean over many batches
        many = 40 * K
        return max(span.end for span in timeline(method, many, costs)) / many / method.workers
    seconds = longest_period(_dependencies(method, costs))
    if seconds is None:
        raise UserError(f"{method.name} with K={K}: the programs of its stages wait for each other")
    return seconds / method.M / method.workers


def _busy(method: Method, costs: Costs) -> Iterator[float]:
    """Seconds per batch in which each stage computes, and each exclusive link transfers, with one forward per batch."""
    for k in range(1, costs.K + 1):
        seconds, _, _ = _durations(costs, k, method)
        yield sum(seconds.values())
        if costs.exclusive and k < costs.K:
            yield costs.transfer_seconds(k, k + 1, method)


def _dependencies(method: Method, costs: Costs) -> dict[Hashable, list[Dependency]]:
    """What the end of every operation waits for in steady state, where a stage repeats its program every M batches.

    The period of an operation is that of its batch; of an update or a barrier that of its local iteration.
    """
    K, M, size = costs.K, method.M, method.M * method.m
    waits_for: defaultdict[Hashable, list[Dependency]] = defaultdict(list)
    sent: dict[tuple[int, int, int], Hashable] = {}  # (from, to, batch within the period) -> event that sends it
    transfers: defaultdict[tuple[int, int], list[tuple[Hashable, int]]] = defaultdict(list)  # link -> event, period
    received: list[tuple[Hashable, tuple[int, int, int], float]] = []  # event, message, seconds from sending to its end
    for k in range(1, K + 1):
        seconds, _, _ = _durations(costs, k, method)
        first = steady_state(method, k, K).fill + LESSON
        order: list[tuple[Hashable, int, float]] = []  # event, its period, seconds that it takes
        for iteration, operations in enumerate(islice(method.program(k, K, count()), first, first + M), start=first):
            for operation in operations:
                kind, own = type(operation), seconds.get(type(operation), 0.0)
                if isinstance(operation, Update | Barrier):
                    number, place = divmod(iteration, M)
                else:
                    number, place = divmod(operation.t, size)
                event: Hashable = (0 if kind is Barrier else k, kind, place)  # a barrier is one event of all stages
                order.append((event, number, own))
                if target := method.sends(operation, k, K):
                    sent[k, target, place] = event
                    if costs.exclusive:
                        transfer: Hashable = ("transfer", k, target, place)
                        waits_for[transfer].append(Dependency(event, costs.transfer_seconds(k, target, method), 0))
                        transfers[k, target].append((transfer, number))
                        sent[k, target, place] = transfer
                if source := method.receives(operation, k, K):
                    ahead = costs.latency if costs.exclusive else costs.message_seconds(source, k, method)
                    received.append((event, (source, k, place), ahead + own))
        start, number, own = order[0]
        for (before, earlier, _), (after, later, taken) in pairwise([*order, (start, number + 1, own)]):
            waits_for[after].append(Dependency(before, taken, later - earlier))
    for (source, target), each in transfers.items():
        first_transfer, number = each[0]
        for (event, earlier), (later_event, later) in pairwise([*each, (first_transfer, number + 1)]):
            seconds_each = costs.transfer_seconds(source, target, method)
            waits_for[later_event].append(Dependency(event, seconds_each, later - earlier))
    for after, message, taken in received:
        waits_for[after].append(Dependency(sent[message], taken, 0))
    return waits_for


def speed_up(method: Method, costs: Costs, *, batches: int | None = None) -> float:
    """Speed-up over back-propagation on one worker: in steady state, or for a number of batches with fill and drain.

    >>> from offbeat.methods import ADL, DDG
    >>> round(speed_up(ADL(M=4), balanced(4)), 2), round(speed_up(DDG(), balanced(4)), 2)
    (4.0, 2.0)
    """
    if batches is None:
        return costs.alone / period(method, costs)
    return batches * costs.alone / max(span.end for span in timeline(method, batches, costs))
