"""The recorded work of all stages on one device, so arranged that the host asks for a whole turn with a single call.

Stages put recorded pieces on their tapes instead of launching them; a tape is closed when the stage has done its turn.
Where a stage uses nothing from its neighbours that they make in the same turn of the clock, the tapes of one tick are
branches of one graph, which the device runs at the same time:

    tick      0    1    2    3    4             stage k is k-1 turns behind the first, so that the activations which
    stage 1   0    1    2    3    4   ...       it forwards, and with a lag of 2(K-k) also the gradients which it
    stage 2        0    1    2    3             backwards, were made one tick before
    stage 3             0    1    2

With a smaller lag a gradient would come too late for that. Then all stages do the same turn in one tick, and each
forward waits for the one below; only backwards and updates overlap. Where a gradient is used in the turn in which it is
made, everything is launched in order; but see windows.py for methods without any lag.

Whatever cannot wait flushes first. Between two turns (a look at the weights) the stages catch up with the first in a
few more ticks; within one (an eager batch) all that was asked for is launched in the order in which it was asked for,
which is that of a simulation.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.launch_queue import Action, Deferring, Row, add_row


class Tape:
    """What one stage has asked for in one turn: things to do first, recorded work, things to do after it."""

    __slots__ = ("actions", "after", "rows", "turn")

    def __init__(self, turn: int, actions: list[Action]) -> None:
        self.turn, self.actions = turn, actions
        self.rows: list[Row] = []
        self.after: list[Action] = []


class Ticks(Deferring):
    """The tapes of K stages, whose gradients are used at least `room` turns after they were made."""

    def __init__(self, K: int, room: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(device, sleeps=sleeps)
        self.in_order, self.chained = room < 1, room < 2
        self.behind = [0 if self.chained else rank for rank in range(K)]
        self.turn = 0
        self.done: set[int] = set()  # stages that have done this turn
        self.open = [Tape(0, []) for _ in range(K)]
        self.closed: list[deque[Tape]] = [deque() for _ in range(K)]

    # ---- what stages ask for

    def put(self, rank: int, row: Row) -> None:
        self.open[rank].rows.append(row)

    def first(self, rank: int, action: Action) -> None:
        self.open[rank].actions.append(action)

    def after(self, rank: int, action: Action) -> None:
        self.open[rank].after.append(action)

    def later(self, rank: int, action: Action) -> None:
        self.first(rank, action)

    def pause(self) -> None:
        self.flush()

    def close(self, rank: int) -> None:
        tape = self.open[rank]
        self.closed[rank].append(tape)
        self.open[rank] = Tape(self.turn + 1, tape.after)
        tape.after = []
        if self.in_order or rank in self.done:  # several in one: what is left of a program
            self.flush()
        self.done.add(rank)

    def flush(self) -> None:
        while not self.done and any(self.closed):
            self.tick()
        work: list[Action] = []
        for tape in sorted(chain(*self.closed, self.open), key=lambda tape: tape.turn):  # and by stages, as they were
            work += tape.actions + tape.rows + tape.after
            tape.actions, tape.rows, tape.after = [], [], []
        for queue in self.closed:
            queue.clear()
        if not work:
            return
        for action in work:
            action()
        self._keep_up(work)

    # ---- launching

    def tick(self) -> None:
        """Launch what is due by now."""
        tapes = [
            queue.popleft()
            for queue, behind in zip(self.closed, self.behind, strict=True)
            if queue and queue[0].turn <= self.turn - behind
        ]
        self.turn += 1
        self.done.clear()
        for tape in self.open:
            tape.turn = self.turn
        for tape in tapes:
            for action in tape.actions:
                action()
        branches = [tape.rows for tape in tapes if tape.rows]
        if branches:
            self._launch(branches)
        if tapes:
            self._keep_up(tapes)

    def _launch(self, branches: list[list[Row]]) -> None:
        if self.sleeps:
            branches = [[self._nap(), *branch] for branch in branches]
        complete = len(branches) == len(self.open)  # else it will hardly come again
        self._launch_rows(tuple(chain.from_iterable(branches)), partial(self._nodes, branches) if complete else None)

    def _nodes(self, branches: list[list[Row]]) -> joining.Nodes:
        """Those of a branch wait for each other, and in a chain forwards for the ones of the stage below."""
        nodes: joining.Nodes = []
        below: list[int] = []
        for branch in branches:
            before: list[int] = []
            forwarded = below
            for row in branch:
                waits = below if self.chained and row.kind == "forward" else []
                before = add_row(nodes, row, [*before, *waits])
                forwarded = before if row.kind == "forward" else forwarded
            below = forwarded
        return nodes
