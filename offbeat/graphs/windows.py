"""Recorded work of methods without lag: the batches of a window do not wait for each other.

Between two updates the weights stay as they are, so that a stage can forward the next batch before it has backwarded
the last one. What was asked for in several turns is launched at once, as one graph:

    stage 1   F0  F1  F2  F3                          B0  B1  B2  B3  U       turns 0 to 3, K = 3, M = 4
    stage 2       F0  F1  F2  F3              B0  B1  B2  B3  U
    stage 3           F0  F1  F2  F3  B0  B1  B2  B3  U

Each stage does one thing after the other: what precedes its first forward, all forwards, then all else in the order in
which it was asked for, so that sums of gradients are those of one batch after the other, bit for bit. A forward also
waits for the stage below, a backward for the one above. `together` turns need the memory of as many batches (see
ring.py).

What cannot wait (an eager batch, a look at the weights) has everything launched in the order in which it was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.launch_queue import Action, Deferring, Row, add_row


class Windows(Deferring):
    """What stages without lag have asked for, in the order of asking; launched every `together` turns."""

    def __init__(self, together: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(device, sleeps=sleeps)
        self.together = together
        self._empty()

    def _empty(self) -> None:
        self.actions: list[Action] = []  # ahead of all rows
        self.rows: list[tuple[int, Row]] = []  # with the stage of each
        self.behind_all: list[Action] = []
        self.turns = 0  # that are complete
        self.updated = False

    def put(self, rank: int, row: Row) -> None:
        self.rows.append((rank, row))
        self.updated = self.updated or row.kind == "update"

    def first(self, rank: int, action: Action) -> None:
        self.actions.append(action)

    def after(self, rank: int, action: Action) -> None:
        self.behind_all.append(action)

    def later(self, rank: int, action: Action) -> None:
        if self.rows:
            self.after(rank, action)
        else:  # it has been launched
            action()

    def pause(self) -> None:
        """The stage that it waits for is one of these."""

    def flush(self) -> None:
        self._launch_all(whole=False)

    def tick(self) -> None:
        """An update ends a window, so that the next turns are the first of another."""
        self.turns += 1 if self.rows else 0
        if not self.rows or self.turns == self.together or self.updated:
            self._launch_all(whole=self.turns == self.together)

    def _launch_all(self, *, whole: bool) -> None:
        actions, rows, behind, turns = self.actions, self.rows, self.behind_all, max(1, self.turns)
        self._empty()
        if not (actions or rows or behind):
            return
        for action in actions:
            action()
        if self.sleeps:
            rows = [(rank, Row(*self._nap().pieces, *row.pieces, kind=row.kind)) for rank, row in rows]
        self._launch_rows(tuple(row for _, row in rows), partial(self._in_order, rows) if whole else None)
        for action in behind:
            action()
        self._keep_up((actions, rows, behind), turns)

    def _in_order(self, rows: list[tuple[int, Row]]) -> joining.Nodes:
        """What each row waits for, see above."""
        begun: set[int] = set()  # stages that forward
        early: list[tuple[int, Row]] = []
        forwards: list[tuple[int, Row]] = []
        late: list[tuple[int, Row]] = []
        for rank, row in rows:
            if row.kind == "forward" or (row.kind == "backward" and begun):  # some may have been launched already
                begun.add(rank)
            if row.kind == "forward":
                forwards.append((rank, row))
            else:
                (late if rank in begun else early).append((rank, row))
        nodes: joining.Nodes = []
        last: dict[int, list[int]] = defaultdict(list)  # of each stage
        made: dict[tuple[str, int], list[int]] = defaultdict(list)  # its last forward and its last backward
        for rank, row in (*early, *forwards, *late):
            other = rank - 1 if row.kind == "forward" else rank + 1
            before = made[row.kind, other] if row.kind in ("forward", "backward") else []
            last[rank] = made[row.kind, rank] = add_row(nodes, row, [*last[rank], *before])
        return nodes
