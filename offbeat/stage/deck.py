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

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import torch

from offbeat.stage import joining
from offbeat.stage.recorded import Recorded, captures, recording

AHEAD = 8  # ticks by which the host may be ahead of the device, and a little more
LOOKS = 4  # ticks from one look at how far the device is to the next
MOST = 1024  # different ticks that are joined
NAPS = (10_000, 1_000_000)  # cycles
Action = Callable[[], object]
Kind = Literal["forward", "backward", "update", "other"]


class Row:
    """Recorded pieces that come one behind the other, time and again: the same row every time, so that it is known.

    A forward reads what the stage below has made, and makes what the stage above uses; a backward the other way round.
    All others read and write what belongs to the stage alone, such as its weights.
    """

    __slots__ = ("kind", "pieces")

    def __init__(self, *pieces: Recorded, kind: Kind = "other") -> None:
        self.pieces, self.kind = pieces, kind

    def __call__(self) -> None:
        for piece in self.pieces:
            piece()


class Tape:
    """What one stage has asked for in one turn: things to do first, recorded work, things to do after it."""

    __slots__ = ("actions", "after", "rows", "turn")

    def __init__(self, turn: int, actions: list[Action]) -> None:
        self.turn, self.actions = turn, actions
        self.rows: list[Row] = []
        self.after: list[Action] = []


class Deck:
    """The tapes of stages with those lags; `sleeps` lets them sleep at random, which must change no number.

    Where nothing is captured, work is done when it is asked for, since only captured work gives its results before it
    has run; `defers` says whether captured work waits for its tick, or is launched when it is asked for, too.
    """

    def __init__(
        self, lags: Sequence[int], device: torch.device, *, sleeps: int | None = None, defers: bool | None = None
    ) -> None:
        self.defers = captures(device) if defers is None else defers
        self.device = device
        K, room = len(lags), min((below - above for below, above in pairwise(lags)), default=2)
        self.in_order, self.chained = room < 1, room < 2
        self.behind = [0 if self.chained else rank for rank in range(K)]
        self.turn = 0
        self.done: set[int] = set()  # stages that have done this turn
        self.open = [Tape(0, []) for _ in range(K)]
        self.closed: list[deque[Tape]] = [deque() for _ in range(K)]
        self.joined: dict[tuple[Row, ...], Callable[[], None] | None] = {}
        self.asked: list[Any] = []  # what the ticks since the last look work on
        self.unseen = 0  # ticks since the last look
        self.ahead: deque[tuple[torch.cuda.Event, Any]] = deque()  # the same up to a look that is not done
        self.spare: list[torch.cuda.Event] = []
        self.sleeps = None if sleeps is None else random.Random(sleeps)
        self.naps: list[Row] = []

    # ---- what stages ask for

    def put(self, rank: int, row: Row) -> None:
        """Recorded work: the next on the tape of that stage."""
        if self.defers:
            self.open[rank].rows.append(row)
        else:
            row()

    def first(self, rank: int, action: Action) -> None:
        """Work ahead of all that is recorded of this turn, which must not mind."""
        if self.defers:
            self.open[rank].actions.append(action)
        else:
            action()

    def after(self, rank: int, action: Action) -> None:
        """Work behind all that is recorded of this turn, and ahead of the next."""
        if self.defers:
            self.open[rank].after.append(action)
        else:
            action()

    def later(self, rank: int, action: Action) -> None:
        """Between two turns: work behind all that was recorded of the last one, which that stage has closed."""
        self.first(rank, action)

    def pause(self) -> None:
        """A stage waits for a message from another one."""
        self.flush()

    def close(self, rank: int) -> None:
        """That stage has done its turn."""
        if not self.defers:
            return
        tape = self.open[rank]
        self.closed[rank].append(tape)
        self.open[rank] = Tape(self.turn + 1, tape.after)
        tape.after = []
        if self.in_order or rank in self.done:  # several in one: what is left of a program
            self.flush()
        self.done.add(rank)

    def flush(self) -> None:
        """Launch all that was asked for."""
        if not self.defers:
            return
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
        """All stages have done their turn: launch what is due by now."""
        if not self.defers:
            return
        tapes = [queue.popleft() for queue, behind in zip(self.closed, self.behind, strict=True)
                 if queue and queue[0].turn <= self.turn - behind]  # fmt: skip
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

    def _launch_rows(self, rows: tuple[Row, ...], nodes: Callable[[], joining.Nodes] | None) -> None:
        """At once where they come again and it is known what waits for what, else one behind the other."""
        together = self.joined.get(rows)
        if together is None and nodes is not None:
            again = rows in self.joined or bool(self.sleeps)
            if len(self.joined) >= MOST:
                del self.joined[next(iter(self.joined))]
            self.joined[rows] = together = joining.join(nodes()) if again else None
        if together is not None:
            together()
        else:
            for row in rows:
                row()

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

    def _nap(self) -> Row:
        assert self.sleeps
        if not self.naps:
            with recording(self.device):
                self.naps = [Row(Recorded(partial(torch.cuda._sleep, nap), device=self.device)) for nap in (1, *NAPS)]
        return self.sleeps.choice(self.naps)

    def _keep_up(self, work: Any, turns: int = 1) -> None:
        """Hold what was launched until it is done; do not get too far ahead of the device."""
        self.asked.append(work)
        self.unseen += turns
        if self.unseen < LOOKS:
            return
        self.unseen = 0
        event = self.spare.pop() if self.spare else torch.cuda.Event(blocking=True)
        event.record()
        self.ahead.append((event, self.asked))
        self.asked = []
        while len(self.ahead) > AHEAD // LOOKS:
            self.ahead[0][0].synchronize()
            self.spare.append(self.ahead.popleft()[0])

    def forget(self) -> None:
        """Drop what was joined, since it will not come again."""
        self.flush()
        self.joined.clear()


def add_row(nodes: joining.Nodes, row: Row, waits: list[int]) -> list[int]:
    """Add the pieces of a row, the first of which waits for those; what waits for the row waits for the result."""
    for piece in row.pieces:
        if piece.graph:
            nodes.append((piece.graph, waits))
            waits = [len(nodes) - 1]
    return waits
