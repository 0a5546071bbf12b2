"""The timeline: the programs of all stages with durations, and the time per batch that follows from them.

A stage runs its operations in the order of its program, each as soon as the previous one has ended and its message has
arrived; sending takes no time of the stage. How much of a link's latency a method hides follows from its program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np

from offbeat.critical_cycle import EventArrays, PeriodicEvent, Places, longest_period
from offbeat.errors import UserError
from offbeat.interpreter import Messages, Step, steady_state
from offbeat.method import Method
from offbeat.ops import LESSON, Backward, Barrier, Forward, Operation, Teach, Update

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
    """The spans of all stages for a number of batches, with fill and drain, in the order of each stage's program.

    >>> from offbeat.methods import ADL
    >>> stage_1 = [span for span in timeline(ADL(M=1), 4, Costs([1, 1], [2, 2])) if span.k == 1]
    >>> print(" ".join(f"{span.operation}@v{span.version}" for span in stage_1))
    F0@v0 F1@v0 F2@v0 B0@v0 U@v1 F3@v1 B1@v0 U@v2 B2@v0 U@v3 B3@v1 U@v4
    """
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
    return _long_run(method, costs) / method.M / method.workers


def bounds(method: Method, costs: Costs) -> tuple[float, float]:
    """The least and the most that `period` can be: both are the period unless it takes long to find.

    >>> from offbeat.methods import ADL
    >>> bounds(ADL(M=4), Costs([1, 1], [2, 2])), bounds(ADL(M=4), Costs([1, 1], [2, 2], [1, 1]))
    ((3.0, 3.0), (3.25, 3.25))
    """
    loops = None if method.free_running or method.order else _loops(method, costs)
    if loops is None:
        seconds = period(method, costs)
        return seconds, seconds
    return loops.least / method.workers, loops.most / method.workers


def longer_than(method: Method, costs: Costs, seconds: float) -> bool:
    """Whether `period` is longer, which takes less time to find than the period itself."""
    if method.free_running or method.order:
        return period(method, costs) > seconds
    window = seconds * method.M * method.workers
    loops = _loops(method, costs)
    if loops is not None and (loops.least * method.M > window or loops.most * method.M <= window):
        return loops.least * method.M > window
    return _long_run(method, costs, within=window) > window


def _long_run(method: Method, costs: Costs, *, within: float | None = None) -> float:
    """Seconds per M batches; `within` as for `longest_period`."""
    loops = _loops(method, costs)
    if loops is not None and loops.least == loops.most:
        return loops.least * method.M
    events = _lagged_events(method, costs) or _drained_events(method, costs) or _sequences(method, costs)
    seconds = longest_period(events, within=within, least=loops.least * method.M if loops else 0.0)
    if seconds is None:
        raise UserError(f"{method.name} with K={costs.K}: the programs of its stages wait for each other")
    return seconds


class _Loops(NamedTuple):
    """Bounds of the seconds per batch."""

    least: float
    most: float


def _loops(method: Method, costs: Costs) -> _Loops | None:
    """What the slowest loop of dependencies says about stages that run `ops.lagged`; None for other programs, and where
    stages wait for each other without end.

    A batch goes up by its forwards and down by its backwards. So the only loops go up from a stage j to a stage k >= j
    and down again; then stage j takes the next batch, lag_j - lag_k + 1 after that one. With a local loss j = k.

    In a schedule some places along a loop meet more updates and others fewer; on average it is one per M batches, so
    that the period is at least that of a loop with as much of an update. It is the same if M = 1 or if updates take no
    time. With windows by count all stages update after the same batch, with aligned ones in the same local iteration.
    No path comes back to an earlier one, since lags do not increase from stage to stage, so that at most one of these
    updates is on it: the period is at most that of the slowest loop without updates, and the longest update per M
    batches.
    """
    if (lags := _plain_lags(method, costs)) is None:
        return None
    K, M = costs.K, method.M
    kinds = [_kinds(method, costs, k) for k in range(1, K + 1)]
    forward, backward, update = (np.array([each[kind][0] for each in kinds]) for kind in (Forward, Backward, Update))
    if method.feedback != "above":
        slowest = float((forward + backward + update / M).max())
        return _Loops(slowest, slowest)
    up, down = (np.array([each[kind][2] for each in kinds]) for kind in (Forward, Backward))
    ends = np.cumsum(forward + backward + up + np.append(0.0, down[:-1]))  # of a batch up to stage k and down to 1
    begins = ends - forward - backward
    slowest, most, found = -math.inf, -math.inf, (0, 0)
    for j in range(K):
        batches = lags[j] - lags[j:] + 1
        if batches.min() <= 0:
            return None
        seconds = ends[j:] - begins[j]
        most = max(most, float((seconds / batches).max()))
        seconds = (seconds + update[j] / M) / batches
        k = int(seconds.argmax())
        if seconds[k] > slowest:
            slowest, found = float(seconds[k]), (j, j + k)
    j, k = found
    parts = [*forward[j : k + 1], *backward[j : k + 1], *up[j + 1 : k + 1], *down[j:k], update[j] / M]
    slowest = math.fsum(parts) / int(lags[j] - lags[k] + 1)
    if M == 1 or not update.any():
        return _Loops(slowest, slowest)
    most += float(update.max()) / M
    bound = method.window == "count" or most > slowest  # of aligned windows it is never taken for the period
    return _Loops(slowest, most if bound else math.inf)


def _plain_lags(method: Method, costs: Costs) -> Places | None:
    """The lags of stages that run `ops.lagged` alone; None for other programs."""
    lags = [method.plain_lag(k, costs.K) for k in range(1, costs.K + 1)]
    if None in lags or method.barrier or method.feedback == "synthesiser" or costs.exclusive:
        return None
    return np.array(lags, np.intp)


def _busy(method: Method, costs: Costs) -> Iterator[float]:
    """Seconds per batch in which each stage computes, and each exclusive link transfers, with one forward per batch."""
    for k in range(1, costs.K + 1):
        seconds, _, _ = _durations(costs, k, method)
        yield sum(seconds.values())
        if costs.exclusive and k < costs.K:
            yield costs.transfer_seconds(k, k + 1, method)


def _sequences(method: Method, costs: Costs) -> list[list[PeriodicEvent]]:
    """The operations of all stages in steady state, where a stage repeats its program every M batches; then the
    transfers of exclusive links, and the stages that reach a barrier.

    The period of an operation is that of its batch; of an update or a barrier that of its local iteration.
    """
    K, M, size = costs.K, method.M, method.M * method.m
    found: list[list[PeriodicEvent]] = []
    transfers: defaultdict[tuple[int, int], list[PeriodicEvent]] = defaultdict(list)
    for k in range(1, K + 1):
        kinds = _kinds(method, costs, k)
        stage: list[PeriodicEvent] = []
        first = steady_state(method, k, K).fill + LESSON
        for iteration, operations in enumerate(islice(method.program(k, K, count()), first, first + M), start=first):
            for operation in operations:
                kind = type(operation)
                seconds, source, waits, target = kinds[kind]
                if kind is Update or kind is Barrier:
                    number, place = divmod(iteration, M)
                else:
                    number, place = divmod(operation.t, size)  # type: ignore[union-attr]
                message: Hashable = None if source is None else (source, k, place)
                if kind is Barrier:
                    stage.append(PeriodicEvent((k, "reaches", place), 0.0, number))
                    message = K, "waits", place
                name: Hashable = (k, kind, place) if target is None else (k, target, place)
                if target and costs.exclusive:
                    name = k, kind, place
                    transferred = costs.transfer_seconds(k, target, method)
                    transfers[k, target].append(PeriodicEvent((k, target, place), transferred, number, name))
                stage.append(PeriodicEvent(name, seconds, number, message, waits))
        found.append(stage)
    found += transfers.values()
    if method.barrier:
        found.append(
            [
                PeriodicEvent((k, "waits", place), 0.0, waits_for=(k, "reaches", place))
                for place in range(M)
                for k in range(1, K + 1)
            ]
        )
    return found


def _lagged_events(method: Method, costs: Costs) -> EventArrays | None:
    """The same for stages that run `ops.lagged` alone, computed for M batches at once; None for other programs.

    Local iteration i is the forward of batch i and the backward of batch i - lag, and in one of M iterations an update.
    """
    if (lags := _plain_lags(method, costs)) is None:
        return None
    K, M = costs.K, method.M
    begins = np.array([[steady_state(method, k, K).fill + LESSON] for k in range(1, K + 1)])
    lag, turn, size = lags[:, None], np.arange(M), 2 * M + 1  # [stage, turn], and [stage, event]
    update = ((lag if method.window == "count" else 0) - begins - 1) % M  # the turn that it follows
    kinds = [_kinds(method, costs, k) for k in range(1, K + 1)]
    seconds, delay = np.zeros((2, K, size))
    period, source = np.zeros((K, size), np.intp), np.full((K, size), -1)
    stage = np.arange(K)[:, None]
    for second, (kind, batch) in enumerate(((Forward, begins + turn), (Backward, begins + turn - lag))):
        taken, sender, waits = (np.array([[each[kind][n] or 0] for each in kinds]) for n in range(3))
        row = sender - 1  # -1 without a message
        sent = (batch - batch[row[:, 0], :1]) % M  # in that turn
        event = 2 * turn + second + (turn > update)
        period[stage, event] = batch // M
        seconds[stage, event], delay[stage, event] = taken, waits
        there = row * size + 2 * sent + second + (sent > update[row[:, 0]])
        source[stage, event] = np.where(row >= 0, there, -1)
    event = 2 * update + 2
    seconds[stage, event] = [[each[Update][0]] for each in kinds]
    period[stage, event] = (begins + update) // M
    return EventArrays([size] * K, seconds.reshape(-1), period.reshape(-1), source.reshape(-1), delay.reshape(-1))


def _drained_events(method: Method, costs: Costs) -> EventArrays | None:
    """The same for stages that run all backwards of a window before its update: `ops.fill_drain` with m micro-batches,
    or `ops.pipelined` with M batches; None for other programs."""
    K, n = costs.K, method.M * method.m
    if method.drained(1, K) is None or costs.exclusive:
        return None
    kinds = [_kinds(method, costs, k) for k in range(1, K + 1)]
    batch, ahead, size = np.arange(n), np.arange(K)[::-1, None], 2 * n + 1
    if method.pipelined:
        forwards = batch + np.maximum(batch - ahead, 0)
        backwards = batch + np.minimum(batch + ahead, n - 1) + 1
    else:
        forwards, backwards = np.tile([batch, 2 * n - 1 - batch], (K, 1, 1)).swapaxes(0, 1)
    seconds, delay = np.zeros((2, K, size))
    source = np.full((K, size), -1)
    for kind, events in ((Forward, forwards), (Backward, backwards)):
        for row, (taken, sender, waits, _) in enumerate(each[kind] for each in kinds):
            seconds[row, events[row]], delay[row, events[row]] = taken, waits
            if sender is not None:
                source[row, events[row]] = (sender - 1) * size + events[sender - 1]
    seconds[:, -1] = [each[Update][0] for each in kinds]
    period = np.full(K * size, LESSON)
    return EventArrays([size] * K, seconds.reshape(-1), period, source.reshape(-1), delay.reshape(-1))


def _kinds(method: Method, costs: Costs, k: int) -> dict[type, tuple[float, int | None, float, int | None]]:
    """Of each kind of operation of stage k: its seconds, the stage whose message it uses, the seconds after the end of
    sending (or of an exclusive transfer) that this takes, and the stage that it sends to."""
    found = {}
    for operation in (Forward(0), Backward(0), Update(1), Barrier(), Teach(0)):
        source, target = method.receives(operation, k, costs.K), method.sends(operation, k, costs.K)
        if not source or source > costs.K:  # the data, or a kind of operation that this stage does not have
            source = None
        waits = 0.0
        if source:
            waits = costs.latency if costs.exclusive else costs.message_seconds(source, k, method)
        found[type(operation)] = costs.of(operation, k, method), source, waits, target
    return found


def speed_up(method: Method, costs: Costs, *, batches: int | None = None) -> float:
    """Speed-up over back-propagation on one worker: in steady state, or for a number of batches with fill and drain.

    >>> from offbeat.methods import ADL, DDG
    >>> round(speed_up(ADL(M=4), balanced(4)), 2), round(speed_up(DDG(), balanced(4)), 2)
    (4.0, 2.0)
    """
    if batches is None:
        return costs.alone / period(method, costs)
    return batches * costs.alone / max(span.end for span in timeline(method, batches, costs))
