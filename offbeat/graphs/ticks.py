"""The recorded work of all stages on one device, arranged so that the host launches a whole turn with a single call.

A stage queues recorded operations instead of launching them, and closes its turn when it has done all of them. Where a
stage uses nothing that its neighbours make in the same tick of the clock, the turns of one tick are branches of one
graph, which the device runs at the same time:

    tick      0    1    2    3    4             stage k is k-1 turns after the first, so that the activations which
    stage 1   0    1    2    3    4   ...       it forwards, and with a lag of 2(K-k) also the gradients which it
    stage 2        0    1    2    3             backwards, were made one tick before
    stage 3             0    1    2

With a smaller lag a gradient would be too late for that. Then all stages do the same turn in one tick, and each
forward waits for the one below: only backwards and updates overlap. So several ticks are launched at once, in which no
stage waits for more than it uses:

    stage 1   F0 B U F1 B U F2 B U F3 B U               four ticks of one launch
    stage 2      F0 B U F1 B U F2 B U F3 B U
    stage 3         F0 B U F1 B U F2 B U F3 B U

Where a gradient is used in the turn in which it is made, everything is launched in order; but see windows.py for
methods without any lag.

Whatever cannot wait flushes first. Between two turns (to read the weights) the stages catch up with the first in a few
more ticks; within one (for an eager batch) all queued work is launched in the order in which it was queued, which is
that of a simulation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from itertools import chain

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.launch_queue import Action, Deferring, RecordedOperation, Values, add_operation, write


class StageTurn:
    """What one stage has queued in one turn.

    ordered         actions after all work of earlier turns
    actions         to do before the operations
    operations      recorded ones, in order
    values          to write after the operations, and before the next update or turn of the stage
    """

    __slots__ = ("actions", "operations", "ordered", "turn", "values")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.ordered: list[Action] = []
        self.actions: list[Action] = []
        self.operations: list[RecordedOperation] = []
        self.values: Values = {}

    def updates(self) -> bool:
        """Whether an update is queued."""
        return any(operation.kind == "update" for operation in reversed(self.operations))  # mostly the last

    def empty(self) -> list[Action]:
        """All of it, in order, which is then no longer queued."""
        work: list[Action] = [*self.ordered, *self.actions, *self.operations]
        if self.values:
            work.append(partial(write, self.values))
        self.ordered, self.actions, self.operations, self.values = [], [], [], {}
        return work


class Ticks(Deferring):
    """The queued turns of K stages, whose gradients are used at least `room` turns after they were made.

    together        ticks that are launched at once, where forwards wait for those below
    pending         whole ticks that wait for others, fewer than that
    reads           actions to do after them
    values          to write by stage, before its next update and after all earlier ones
    every_turn      stages that read them before their next update, in any turn
    """

    def __init__(
        self, K: int, room: int, device: torch.device, *, together: int = 1, sleeps: int | None = None
    ) -> None:
        super().__init__(device, sleeps=sleeps)
        self.in_order, self.chained = room < 1, room < 2
        self.together = together if room == 1 else 1
        self.delays = [0 if self.chained else rank for rank in range(K)]  # in turns after the first stage
        self.turn = 0
        self.done: set[int] = set()  # stages that have done this turn
        self.open = [StageTurn(0) for _ in range(K)]
        self.closed: list[deque[StageTurn]] = [deque() for _ in range(K)]
        self.pending: list[list[StageTurn]] = []
        self.reads: list[Action] = []
        self.values: dict[int, Values] = {}
        self.every_turn: set[int] = set()

    # ---- queueing

    def put(self, rank: int, operation: RecordedOperation) -> None:
        self.open[rank].operations.append(operation)

    def first(self, rank: int, action: Action) -> None:
        self.open[rank].actions.append(action)

    def write_before_update(self, rank: int, values: Values) -> None:
        self.open[rank].values |= values

    def write_before_turn(self, rank: int, values: Values) -> None:
        self.write_before_update(rank, values)
        self.every_turn.add(rank)

    def rate_places(self, M: int, *, predicts: bool) -> int:
        """As many as updates are launched at once. Predictions read a rate up to M - 1 turns before its update, which
        may be in the launch of as many earlier updates: with twice as many places, none of these has the same one."""
        updates = -(-self.together // M)
        return 2 * updates if predicts and self.together > 1 else updates

    def later(self, rank: int, action: Action) -> None:
        if self.together == 1:
            self.open[rank].ordered.append(action)
        elif self.pending:
            self.reads.append(action)
        else:
            action()

    def pause(self) -> None:
        self.flush()

    def close(self, rank: int) -> None:
        self.closed[rank].append(self.open[rank])
        self.open[rank] = StageTurn(self.turn + 1)
        if self.in_order or rank in self.done:  # several in one: the rest of a program
            self.flush()
        self.done.add(rank)

    def flush(self) -> None:
        while not self.done and any(self.closed):
            self.tick()
        self._launch_pending()
        work: list[Action] = [partial(write, values) for values in self.values.values()]
        self.values.clear()
        for queued in sorted(chain(*self.closed, self.open), key=lambda one: one.turn):  # a stable sort: then by stage
            work += queued.empty()
        for turns in self.closed:
            turns.clear()
        if not work:
            return
        for action in work:
            action()
        self._keep_up(work)

    # ---- launching

    def tick(self) -> None:
        """Launch what is due by now, or hold it until enough ticks can be launched at once."""
        due = [
            (rank, turns.popleft())
            for rank, (turns, delay) in enumerate(zip(self.closed, self.delays, strict=True))
            if turns and turns[0].turn <= self.turn - delay
        ]
        begins = self.turn % self.together == 0
        self.turn += 1
        self.done.clear()
        for queued in self.open:
            queued.turn = self.turn
        if not due:
            return
        if self.pending and any(queued.ordered for _, queued in due):
            self._launch_pending()
        self._do_actions(due)
        whole = len(due) == len(self.open) and all(queued.operations for _, queued in due)  # others hardly recur
        turns_due = [queued for _, queued in due]
        if whole and (self.pending or begins):
            self.pending.append(turns_due)
            if len(self.pending) == self.together:
                self._launch_pending()
        else:
            self._launch_pending()
            self._launch([turns_due], whole=whole)
        for rank, queued in due:
            if queued.values:
                self.values.setdefault(rank, {}).update(queued.values)

    def _do_actions(self, due: list[tuple[int, StageTurn]]) -> None:
        values: Values = {}
        for rank, queued in due if self.values else ():
            if rank in self.values and (rank in self.every_turn or queued.updates()):
                values |= self.values.pop(rank)  # which nothing that is pending reads
        if values:
            write(values)
        for _, queued in due:
            for action in (*queued.ordered, *queued.actions):
                action()

    def _launch_pending(self) -> None:
        """The ticks that are pending, as one graph where they are as many as are usually launched."""
        if not self.pending:
            return
        pending, reads = self.pending, self.reads
        self.pending, self.reads = [], []
        for ticks in [pending] if len(pending) == self.together else [[tick] for tick in pending]:
            self._launch(ticks, whole=True)
        for action in reads:
            action()

    def _launch(self, ticks: list[list[StageTurn]], *, whole: bool) -> None:
        branches = [[queued.operations for queued in tick if queued.operations] for tick in ticks]
        if self.sleeps:
            branches = [[[self._nap(), *branch] for branch in tick] for tick in branches]
        operations = tuple(chain.from_iterable(chain.from_iterable(branches)))
        if operations:
            self._launch_operations(operations, partial(self._nodes, branches) if whole else None)
        self._keep_up(ticks, len(ticks))

    def _nodes(self, ticks: list[list[list[RecordedOperation]]]) -> joining.Nodes:
        """What waits for what, in ticks of the branches of all stages.

        The operations of a branch wait for each other, and for those of the same stage in the tick before. In a chain,
        forwards also wait for the stage below, and backwards for the stage above in the tick before. So a slot with
        room for lag + MAX_LEAD batches is written again only after its readers: the backward of a batch follows its
        forward above, which reads the output, and the forward below that follows the backward that reads the gradient.
        """
        nodes: joining.Nodes = []
        last: dict[tuple[int, int], list[int]] = defaultdict(list)  # nodes that end a tick of a stage
        forwarded, backwarded = last.copy(), last.copy()  # and those that end its last forward and backward in it
        for tick, branches in enumerate(ticks):
            for rank, branch in enumerate(branches):
                before = last[tick - 1, rank]
                for operation in branch:
                    if self.chained and operation.kind == "forward":
                        before = before + (forwarded[tick, rank - 1] or last[tick - 1, rank - 1])
                    elif self.chained and operation.kind == "backward":
                        before = before + backwarded[tick - 1, rank + 1]
                    before = add_operation(nodes, operation, before)
                    if operation.kind == "forward":
                        forwarded[tick, rank] = before
                    elif operation.kind == "backward":
                        backwarded[tick, rank] = before
                last[tick, rank] = before
        return nodes
