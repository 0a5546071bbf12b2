"""Operations of one stage, and functions that build programs from them.

A program is the order of operations of one stage: an iterator of *local iterations*, each a tuple of the operations
that follow from one entering batch. It consumes batch indices lazily, one per iteration; after the last one it drains.
Because operations are grouped by iteration, `step()` can stop after an iteration without requesting the next batch.

    >>> stage_2_of_3 = lagged(range(4), lag=2, M=2)
    >>> print(" | ".join(" ".join(map(str, iteration)) for iteration in stage_2_of_3))
    F0 | F1 | F2 B0 | F3 B1 U | B2 | B3 U
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

WindowRule = Literal["count", "aligned"]
LESSON = 2  # ticks until the next stage has sent the gradient of an output


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of batch t: receive its input from the previous stage, or read it from the buffer; send its
    output to the next stage, or compute the loss."""

    t: int
    buffered: bool = False  # whether the input is in the buffer, where an earlier Take has put it

    def __str__(self) -> str:
        return f"F{self.t}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of batch t: receive the gradient of its output from the next stage, add the gradients of the
    parameters to the open window, send the gradient of its input to the previous stage."""

    t: int

    def __str__(self) -> str:
        return f"B{self.t}"


@dataclass(frozen=True, slots=True)
class Update:
    """Close the window: apply the sum of its gradients divided by `over`. Without gradients nothing is applied."""

    over: int

    def __str__(self) -> str:
        return "U"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every stage has reached its barrier. It affects timing only, not results."""

    def __str__(self) -> str:
        return "|"


@dataclass(frozen=True, slots=True)
class Teach:
    """Train the synthesiser of the stage with the gradient that the next stage has sent for batch t."""

    t: int

    def __str__(self) -> str:
        return f"T{self.t}"


@dataclass(frozen=True, slots=True)
class Take:
    """Receive batch t from the previous stage into the buffer from which later forwards read."""

    t: int

    def __str__(self) -> str:
        return f"+{self.t}"


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove batch t from the buffer."""

    t: int

    def __str__(self) -> str:
        return f"-{self.t}"


# All stages have the same operations, some turns apart; making one takes longer than finding it.
_forward = lru_cache(maxsize=1024)(Forward)
_backward = lru_cache(maxsize=1024)(Backward)
_update = lru_cache(maxsize=1024)(Update)

Operation = Forward | Backward | Update | Barrier | Teach | Take | Drop
Iteration = tuple[Operation, ...]
Program = Iterator[Iteration]


def lagged(batches: Iterable[int], *, lag: int, M: int = 1, window: WindowRule = "count") -> Program:
    """Forward t, backward t-lag, then the update if one is due; drain after the last batch.

    A lag of 0 gives back-propagation, K-k the schedules of the 1F1B family, 2(K-k) those of ADL.

    window "count"     an update after every M gradients, so that update s of every stage applies batches Ms..Ms+M-1
    window "aligned"   an update after the forward of every M-th batch, divided by M even if the window has fewer than M
                       gradients, as in the paper's formulas; windows have fewer while the stage fills

    In both cases the last update, at the end of the drain, applies the mean of the gradients that are left.
    """
    in_flight: deque[int] = deque()
    idle = lag  # iterations until the first backward
    gradients = 0  # in the open window
    t = -1
    entering = iter(batches)
    while (batch := next(entering, None)) is not None or in_flight or gradients:
        operations: list[Operation] = []
        if batch is None:
            t += 1
        else:
            t = batch
            operations.append(_forward(t))
            in_flight.append(t)
        if idle:
            idle -= 1
        elif in_flight:
            operations.append(_backward(in_flight.popleft()))
            gradients += 1
        ended = batch is None and not in_flight
        due = gradients == M if window == "count" else (t + 1) % M == 0
        if due or (ended and gradients):
            operations.append(_update(gradients if ended else M))
            gradients = 0
        yield tuple(operations)


def locked(program: Program) -> Program:
    """The program with a barrier after the forward of every local iteration that has one.

    A backward then starts only when the batch of its iteration has passed forward through all stages, as in papers with
    a forward lock: an iteration takes the forwards of all stages in sequence, then the slowest backward. The drain has
    no forwards and differs in length between stages; it has no barriers, so every stage has one barrier per batch.
    """
    for iteration in program:
        forwards = sum(isinstance(operation, Forward) for operation in iteration)
        yield (*iteration[:forwards], Barrier(), *iteration[forwards:]) if forwards else iteration


def taught(program: Program, *, after: int) -> Program:
    """The program with a `Teach` at the end of each local iteration, for the batch of `after` iterations before.

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


def pipelined(program: Program, *, ahead: int) -> Program:
    """The program of a method without lag, in which the batches of a window do not wait for each other: a backward runs
    after `ahead` more forwards of its window, or after the last. Updates stay where they are.

    Between two updates the weights are the same, and forwards and backwards keep their orders, so results are equal
    bit for bit. With ahead=K-k stage k holds at most K-k+1 batches.

    >>> [" ".join(map(str, iteration)) for iteration in pipelined(lagged(range(7), lag=0, M=4), ahead=1)]
    ['F0', 'F1 B0', 'F2 B1', 'F3 B2 B3 U', 'F4', 'F5 B4', 'F6 B5', 'B6 U']
    """
    waiting: deque[Operation] = deque()
    for iteration in program:
        waiting.extend(operation for operation in iteration if type(operation) is Backward)
        updates = tuple(operation for operation in iteration if type(operation) is Update)
        ready = len(waiting) if updates else max(0, len(waiting) - ahead)
        forwards = (operation for operation in iteration if type(operation) is Forward)
        yield (*forwards, *(waiting.popleft() for _ in range(ready)), *updates)


def fill_drain(batches: Iterable[int], *, m: int) -> Program:
    """Split each batch into m micro-batches: all forwards, all backwards in reverse order, then one update.

    Operations index micro-batches; batch t has tm..tm+m-1. Backwards run in reverse order, so that the memory of the
    last forward is freed first. Gradients are summed with weights by size, so the update divides by 1.

    >>> [" ".join(map(str, iteration)) for iteration in fill_drain(range(2), m=2)]
    ['F0 F1 B1 B0 U', 'F2 F3 B3 B2 U']
    """
    for t in batches:
        micro = range(t * m, (t + 1) * m)
        yield (*map(Forward, micro), *map(Backward, reversed(micro)), Update(1))
