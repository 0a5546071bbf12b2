"""Operations of one stage, and the builders of the programs that order them.

A program is the training method as stage k sees it: pure data, an iterator of *local iterations*, each the tuple of
operations that one entering batch sets off. It consumes batch indices lazily, one an iteration; their end makes it
drain. Grouping by iteration lets `step()` stop at a well-defined cut without asking for a batch that may never come.

    >>> stage_2_of_3 = lagged(range(4), lag=2, M=2)
    >>> print(" | ".join(" ".join(map(str, iteration)) for iteration in stage_2_of_3))
    F0 | F1 | F2 B0 | F3 B1 U | B2 | B3 U
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Window = Literal["count", "aligned"]
LESSON = 2  # ticks until the stage above has reported the gradient of what was sent up


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward batch t: take its input from below, or from the buffer; give its output to the stage above, or to the
    loss."""

    t: int
    buffered: bool = False  # an earlier Take has put it into the buffer

    def __str__(self) -> str:
        return f"F{self.t}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward batch t: take its gradient from above, add to the open window, give the input's gradient below."""

    t: int

    def __str__(self) -> str:
        return f"B{self.t}"


@dataclass(frozen=True, slots=True)
class Update:
    """Close the window: apply the sum of its gradients divided by `over`. A window that holds none applies nothing."""

    over: int

    def __str__(self) -> str:
        return "U"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every stage has come here: orders time, changes no number."""

    def __str__(self) -> str:
        return "|"


@dataclass(frozen=True, slots=True)
class Teach:
    """Compare what was synthesised for batch t with the gradient that the stage above reports for it."""

    t: int

    def __str__(self) -> str:
        return f"T{self.t}"


@dataclass(frozen=True, slots=True)
class Take:
    """Receive batch t from below into the buffer that later forwards draw from."""

    t: int

    def __str__(self) -> str:
        return f"+{self.t}"


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove batch t from the buffer."""

    t: int

    def __str__(self) -> str:
        return f"-{self.t}"


Operation = Forward | Backward | Update | Barrier | Teach | Take | Drop
Iteration = tuple[Operation, ...]
Program = Iterator[Iteration]


def lagged(batches: Iterable[int], *, lag: int, M: int = 1, window: Window = "count") -> Program:
    """Forward t, backward t-lag, then the update if one is due; after the last batch, drain.

    lag 0 is plain back-propagation, K-k the 1F1B family, 2(K-k) the tick family of ADL.

    window "count": an update after M real gradients, so that update s of every stage applies batches Ms..Ms+M-1.
    window "aligned": after the local iterations M-1, 2M-1, ... of the forward index, divided by M whatever the window
    holds (the paper's formulas: nothing or little while the stage fills). Either way what is left at the very end is
    applied as the mean of what it holds.
    """
    in_flight: deque[int] = deque()
    idle = lag  # iterations until the oldest batch in flight has come back
    gradients = 0  # in the open window
    t = -1
    entering = iter(batches)
    while (batch := next(entering, None)) is not None or in_flight or gradients:
        operations: list[Operation] = []
        if batch is None:
            t += 1
        else:
            t = batch
            operations.append(Forward(t))
            in_flight.append(t)
        if idle:
            idle -= 1
        elif in_flight:
            operations.append(Backward(in_flight.popleft()))
            gradients += 1
        ended = batch is None and not in_flight
        due = gradients == M if window == "count" else (t + 1) % M == 0
        if due or (ended and gradients):
            operations.append(Update(gradients if ended else M))
            gradients = 0
        yield tuple(operations)


def locked(program: Program) -> Program:
    """The program with a barrier behind the forward of every local iteration that has one.

    So a backward starts only when its iteration's batch has gone through all stages, as papers with a forward lock have
    it: an iteration takes all forwards one after the other, then the slowest backward. The drain has no forwards, and
    is longer in lower stages: no barrier there, so that every stage meets as many as there are batches.
    """
    for iteration in program:
        forwards = sum(isinstance(operation, Forward) for operation in iteration)
        yield (*iteration[:forwards], Barrier(), *iteration[forwards:]) if forwards else iteration


def taught(program: Program, *, after: int) -> Program:
    """The program with a lesson at the end of each local iteration: on the batch of so many iterations before.

    >>> [" ".join(map(str, iteration)) for iteration in taught(lagged(range(3), lag=0), after=2)]
    ['F0 B0 U', 'F1 B1 U', 'F2 B2 U T0', 'T1', 'T2']
    """
    waiting: deque[int] = deque()
    for iteration in program:
        waiting.extend(operation.t for operation in iteration if isinstance(operation, Backward))
        due = (Teach(waiting.popleft()),) if len(waiting) > after else ()
        yield (*iteration, *due)
    while waiting:
        yield (Teach(waiting.popleft()),)


def fill_drain(batches: Iterable[int], *, m: int) -> Program:
    """Split each batch into m micro-batches: forward them all, backward them all in reverse, then one update.

    Operations index micro-batches, batch t being tm..tm+m-1; backwards run in reverse so that the last forward's
    memory is the first to go. The gradients are summed with weights by size, so the update divides by 1.

    >>> [" ".join(map(str, iteration)) for iteration in fill_drain(range(2), m=2)]
    ['F0 F1 B1 B0 U', 'F2 F3 B3 B2 U']
    """
    for t in batches:
        micro = range(t * m, (t + 1) * m)
        yield (*map(Forward, micro), *map(Backward, reversed(micro)), Update(1))
