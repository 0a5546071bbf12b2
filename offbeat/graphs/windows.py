"""Recorded work of methods without lag: the batches of a window do not wait for each other.

Between two updates the weights stay as they are, so that a stage can forward the next batch before it has backwarded
the last one. The operations of several turns are launched at once, as one graph:

    stage 1   F0  F1  F2  F3                          B0  B1  B2  B3  U       turns 0 to 3, K = 3, M = 4
    stage 2       F0  F1  F2  F3              B0  B1  B2  B3  U
    stage 3           F0  F1  F2  F3  B0  B1  B2  B3  U

Each stage does one thing after the other: what precedes its first forward, all forwards, then all else in the order in
which it was queued, so that sums of gradients are those of one batch after the other, bit for bit. A forward also waits
for the stage below, a backward for the one above. `together` turns need the memory of as many batches (see ring.py).

Before what cannot wait (an eager batch, reading the weights) all work is launched in the order in which it was queued.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.launch_queue import Action, Deferring, RecordedOperation, Values, add_operation, write


class Windows(Deferring):
    """The queued operations of stages without lag, in order; launched every `together` turns."""

    def __init__(self, together: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(device, sleeps=sleeps)
        self.together = together
        self._empty()

    def _empty(self) -> None:
        self.actions: list[Action] = []  # before all operations
        self.operations: list[tuple[int, RecordedOperation]] = []  # with the stage of each
        self.after_all: list[Action] = []
        self.values: Values = {}  # to write after all of them
        self.turns = 0  # that are complete
        self.updated = False

    def put(self, rank: int, operation: RecordedOperation) -> None:
        self.operations.append((rank, operation))
        self.updated = self.updated or operation.kind == "update"

    def first(self, rank: int, action: Action) -> None:
        self.actions.append(action)

    def write_before_update(self, rank: int, values: Values) -> None:
        self.values |= values

    def write_before_turn(self, rank: int, values: Values) -> None:
        self.values |= values  # they follow an update, which ends a launch

    def later(self, rank: int, action: Action) -> None:
        if self.operations:
            self.after_all.append(action)
        else:  # all have been launched
            action()

    def pause(self) -> None:
        """The stage that it waits for is in the same queue."""

    def flush(self) -> None:
        self._launch_all(whole=False)

    def tick(self) -> None:
        """An update ends a window, so that the next turns are the first of another."""
        self.turns += 1 if self.operations else 0
        if not self.operations or self.turns == self.together or self.updated:
            self._launch_all(whole=self.turns == self.together)

    def _launch_all(self, *, whole: bool) -> None:
        actions, operations, after, turns = self.actions, self.operations, self.after_all, max(1, self.turns)
        values = self.values
        self._empty()
        if not (actions or operations or after or values):
            return
        for action in actions:
            action()
        if self.sleeps:
            operations = [
                (rank, RecordedOperation(*self._nap().pieces, *operation.pieces, kind=operation.kind))
                for rank, operation in operations
            ]
        self._launch_operations(
            tuple(operation for _, operation in operations), partial(self._in_order, operations) if whole else None
        )
        for action in after:
            action()
        if values:
            write(values)
        self._keep_up((actions, operations, after), turns)

    def _in_order(self, operations: list[tuple[int, RecordedOperation]]) -> joining.Nodes:
        """What each operation waits for, see above."""
        begun: set[int] = set()  # stages that forward
        early: list[tuple[int, RecordedOperation]] = []
        forwards: list[tuple[int, RecordedOperation]] = []
        late: list[tuple[int, RecordedOperation]] = []
        for rank, operation in operations:
            if operation.kind == "forward" or (
                operation.kind == "backward" and begun
            ):  # some may have been launched already
                begun.add(rank)
            if operation.kind == "forward":
                forwards.append((rank, operation))
            else:
                (late if rank in begun else early).append((rank, operation))
        nodes: joining.Nodes = []
        last: dict[int, list[int]] = defaultdict(list)  # of each stage
        made: dict[tuple[str, int], list[int]] = defaultdict(list)  # its last forward and its last backward
        for rank, operation in (*early, *forwards, *late):
            other = rank - 1 if operation.kind == "forward" else rank + 1
            before = made[operation.kind, other] if operation.kind in ("forward", "backward") else []
            last[rank] = made[operation.kind, rank] = add_operation(nodes, operation, [*last[rank], *before])
        return nodes
