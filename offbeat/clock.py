"""The clock: the programs of all stages in lock-step ticks, without tensors.

A message sent in one tick can be used in the next. A stage runs at most one local iteration per tick, or the part of it
for which messages have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offbeat.interpreter import Messages, Step
from offbeat.method import Method
from offbeat.ops import Backward, Barrier, Forward, Operation, Update


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one stage in one tick.

    version     of the weights: those that a forward uses, those of the forward of a backward's batch, or those that an
                update makes
    staleness   of the gradient of a backward, in updates
    """

    tick: int
    k: int
    operation: Operation
    version: int
    staleness: int = 0

    def __str__(self) -> str:
        if isinstance(self.operation, Update):
            return f"U->v{self.version}"
        if not isinstance(self.operation, Forward | Backward):
            return str(self.operation)
        late = f" (LoS {self.staleness})" if self.staleness else ""
        return f"{self.operation}@v{self.version}{late}"


def ticks(method: Method, K: int, batches: Iterable[int]) -> Iterator[list[Event]]:
    """The events of each tick until every stage has drained. Barriers take no time and are left out."""
    indices = list(batches)
    programs = [method.steps(k, K, indices) for k in range(1, K + 1)]
    waiting = [_iteration(program) for program in programs]
    messages, tick = Messages(), 0
    while any(steps is not None for steps in waiting):
        events: list[Event] = []
        for steps in waiting:
            while steps and messages.receive(steps[0], tick) is not None:
                step = steps.popleft()
                messages.send(step, tick + 1)
                if not isinstance(step.operation, Barrier):
                    version = step.forwarded if isinstance(step.operation, Backward) else step.version
                    events.append(Event(tick, step.k, step.operation, version, step.staleness))
        if not events and deque() not in waiting:
            raise RuntimeError(f"{method.name}, K={K}: the programs of its stages wait for each other")
        waiting = [
            _iteration(program) if steps == deque() else steps for steps, program in zip(waiting, programs, strict=True)
        ]
        yield events
        tick += 1


def _iteration(program: Iterator[tuple[Step, ...]]) -> deque[Step] | None:
    """The steps of the next local iteration; None after the last."""
    iteration = next(program, None)
    return None if iteration is None else deque(iteration)


def draw(method: Method, K: int, batches: Iterable[int]) -> str:
    """The events as a table of text, one row per tick and one column per stage.

    >>> from offbeat.methods import ADL
    >>> print(draw(ADL(M=2), 2, range(3)))
    tick | stage 1             | stage 2
    0    | F0@v0               | -
    1    | F1@v0               | F0@v0 B0@v0
    2    | F2@v0 B0@v0         | F1@v0 B1@v0 U->v1
    3    | B1@v0 U->v1         | F2@v1 B2@v1
    4    | B2@v0 (LoS 1) U->v2 | U->v2
    """
    rows = [["tick", *(f"stage {k}" for k in range(1, K + 1))]]
    for tick, events in enumerate(ticks(method, K, batches)):
        cells = [" ".join(str(event) for event in events if event.k == k) for k in range(1, K + 1)]
        rows.append([str(tick), *(cell or "-" for cell in cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(K + 1)]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
