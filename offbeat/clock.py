"""The interpreter without tensors: which stage does what in which tick, with which weights.

Ticks are lock-step: a message sent in one tick can be used in the next, and a stage does at most one local iteration a
tick, or as much of it as the messages of earlier ticks allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offbeat.method import Method
from offbeat.ops import Backward, Barrier, Forward, Operation, Program, Take, Teach, Update


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one stage in one tick.

    version: of the weights used by a forward, of those that forwarded a backward's batch, or made by an update;
    staleness: of the gradient, in updates, for a backward.
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
    """The events of each tick until every stage has drained."""
    indices = list(batches)
    programs = [method.program(k, K, indices) for k in range(1, K + 1)]
    waiting: list[list[Operation] | None] = [_operations(program) for program in programs]  # None: drained
    version = [0] * K
    forwards = [0] * K
    forwarded_by: list[dict[int, int]] = [{} for _ in range(K)]
    outputs: list[set[int]] = [set() for _ in range(K)]  # batches that stage k has forwarded in an earlier tick
    gradients: list[set[int]] = [set() for _ in range(K)]  # and backwarded
    tick = 0
    while any(operations is not None for operations in waiting):
        events: list[Event] = []
        for k, operations in enumerate(waiting, start=1):
            here = k - 1
            while operations:
                operation = operations[0]
                if isinstance(operation, Forward | Take) and k > 1 and operation.t not in outputs[here - 1]:
                    break
                waits = isinstance(operation, Teach) or (isinstance(operation, Backward) and method.waits(k, K))
                if waits and operation.t not in gradients[here + 1]:  # type: ignore[union-attr]
                    break
                if isinstance(operation, Forward):
                    used = method.version_used(forwards[here], version[here])
                    forwarded_by[here][operation.t] = used
                    forwards[here] += 1
                    events.append(Event(tick, k, operation, used))
                elif isinstance(operation, Backward):
                    used = forwarded_by[here].pop(operation.t)
                    events.append(Event(tick, k, operation, used, version[here] - used))
                elif isinstance(operation, Update):
                    version[here] += 1
                    events.append(Event(tick, k, operation, version[here]))
                elif not isinstance(operation, Barrier):
                    events.append(Event(tick, k, operation, version[here]))
                operations.pop(0)
        if not events and [] not in waiting:
            raise RuntimeError(f"{method.name}, K={K}: no stage can go on; the programs wait for each other")
        for event in events:  # only now may the neighbours see them
            if isinstance(event.operation, Forward):
                outputs[event.k - 1].add(event.operation.t)
            elif isinstance(event.operation, Backward):
                gradients[event.k - 1].add(event.operation.t)
        for here, program in enumerate(programs):
            if waiting[here] == []:
                waiting[here] = _operations(program)
        yield events
        tick += 1


def _operations(program: Program) -> list[Operation] | None:
    iteration = next(program, None)
    return None if iteration is None else list(iteration)


def draw(method: Method, K: int, batches: Iterable[int]) -> str:
    """The trace as text, a row a tick and a column a stage.

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
