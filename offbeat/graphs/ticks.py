"""The recorded work of all stages on one device, arranged so that the host launches a whole turn with a single call.

A stage queues recorded operations instead of launching them, and closes its turn when it has done all of them. Where a
stage uses nothing that its neighbours make in the same tick of the clock, the turns of one tick are branches of one
graph, which the device runs at the same time:

    tick      0    1    2    3    4             stage k is k-1 turns after the first, so that the activations which
    stage 1   0    1    2    3    4   ...       it forwards, and with a lag of 2(K-k) also the gradients which it
    stage 2        0    1    2    3             backwards, were made one tick before
    stage 3             0    1    2

With a smaller lag a gradient would be too late for that. Then all stages do the same turn in one tick, and each
forward waits for the one below; only backwards and updates overlap. Where a gradient is used in the turn in which it is
made, everything is launched in order; but see windows.py for methods without any lag.

Whatever cannot wait flushes first. Between two turns (to read the weights) the stages catch up with the first in a few
more ticks; within one (for an eager batch) all queued work is launched in the order in which it was queued, which is
that of a simulation.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.launch_queue import Action, Deferring, RecordedOperation, add_operation


class StageTurn:
    """What one stage has queued in one turn: actions to do first, recorded operations, actions to do after them."""

    __slots__ = ("actions", "after", "operations", "turn")

    def __init__(self, turn: int, actions: list[Action]) -> None:
        self.turn, self.actions = turn, actions
        self.operations: list[RecordedOperation] = []
        self.after: list[Action] = []


class Ticks(Deferring):
    """The queued turns of K stages, whose gradients are used at least `room` turns after they were made."""

    def __init__(self, K: int, room: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(device, sleeps=sleeps)
        self.in_order, self.chained = room < 1, room < 2
        self.delays = [0 if self.chained else rank for rank in range(K)]  # in turns after the first stage
        self.turn = 0
        self.done: set[int] = set()  # stages that have done this turn
        self.open = [StageTurn(0, []) for _ in range(K)]
        self.closed: list[deque[StageTurn]] = [deque() for _ in range(K)]

    # ---- queueing

    def put(self, rank: int, operation: RecordedOperation) -> None:
        self.open[rank].operations.append(operation)

    def first(self, rank: int, action: Action) -> None:
        self.open[rank].actions.append(action)

    def after(self, rank: int, action: Action) -> None:
        self.open[rank].after.append(action)

    def later(self, rank: int, action: Action) -> None:
        self.first(rank, action)

    def pause(self) -> None:
        self.flush()

    def close(self, rank: int) -> None:
        queued = self.open[rank]
        self.closed[rank].append(queued)
        self.open[rank] = StageTurn(self.turn + 1, queued.after)
        queued.after = []
        if self.in_order or rank in self.done:  # several in one: the rest of a program
            self.flush()
        self.done.add(rank)

    def flush(self) -> None:
        while not self.done and any(self.closed):
            self.tick()
        work: list[Action] = []
        for queued in sorted(chain(*self.closed, self.open), key=lambda one: one.turn):  # a stable sort: then by stage
            work += queued.actions + queued.operations + queued.after
            queued.actions, queued.operations, queued.after = [], [], []
        for turns in self.closed:
            turns.clear()
        if not work:
            return
        for action in work:
            action()
        self._keep_up(work)

    # ---- launching

    def tick(self) -> None:
        """Launch what is due by now."""
        due = [
            turns.popleft()
            for turns, delay in zip(self.closed, self.delays, strict=True)
            if turns and turns[0].turn <= self.turn - delay
        ]
        self.turn += 1
        self.done.clear()
        for queued in self.open:
            queued.turn = self.turn
        for queued in due:
            for action in queued.actions:
                action()
        branches = [queued.operations for queued in due if queued.operations]
        if branches:
            self._launch(branches)
        if due:
            self._keep_up(due)

    def _launch(self, branches: list[list[RecordedOperation]]) -> None:
        if self.sleeps:
            branches = [[self._nap(), *branch] for branch in branches]
        complete = len(branches) == len(self.open)  # others hardly recur
        operations = tuple(chain.from_iterable(branches))
        self._launch_operations(operations, partial(self._nodes, branches) if complete else None)

    def _nodes(self, branches: list[list[RecordedOperation]]) -> joining.Nodes:
        """The operations of a branch wait for each other, and in a chain forwards for those of the stage below."""
        nodes: joining.Nodes = []
        below: list[int] = []
        for branch in branches:
            before: list[int] = []
            forwarded = below
            for operation in branch:
                waits = below if self.chained and operation.kind == "forward" else []
                before = add_operation(nodes, operation, [*before, *waits])
                forwarded = before if operation.kind == "forward" else forwarded
            below = forwarded
        return nodes
