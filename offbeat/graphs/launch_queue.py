"""Launch queues, where stages put recorded work. A plain one launches it at once. Others keep it, so that the host
launches the work of all stages on one device with a single call: ticks.py, and windows.py for methods without lag.

Whatever cannot wait (an eager batch, a look at the weights) flushes first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from offbeat.graphs import join as joining
from offbeat.graphs.capture import Recorded, recording

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


class LaunchQueue:
    """All that stages ask for is done at once."""

    defers = False  # whether what is asked for may wait

    def put(self, rank: int, row: Row) -> None:
        """Recorded work: the next of that stage."""
        row()

    def first(self, rank: int, action: Action) -> None:
        """Work ahead of all that is recorded of this turn, which must not mind."""
        action()

    def after(self, rank: int, action: Action) -> None:
        """Work behind all that is recorded of this turn, and ahead of the next."""
        action()

    def later(self, rank: int, action: Action) -> None:
        """Between two turns: work behind all that was recorded of the last one, which that stage has closed."""
        action()

    def pause(self) -> None:
        """A stage waits for a message from another one."""

    def close(self, rank: int) -> None:
        """That stage has done its turn."""

    def tick(self) -> None:
        """All stages have done their turn."""

    def flush(self) -> None:
        """Launch all that was asked for."""

    def forget(self) -> None:
        """What was recorded so far will not come again."""


class Deferring(LaunchQueue):
    """A launch queue that keeps captured work, which gives its results before it has run, and launches it together.

    `sleeps` lets it sleep at random, which must change no number. Those who keep it say how: `put`, `first`, `after`,
    `later`, `flush` and `tick`.
    """

    defers = True

    def __init__(self, device: torch.device, *, sleeps: int | None = None) -> None:
        self.device = device
        self.joined: dict[tuple[Row, ...], Callable[[], None] | None] = {}
        self.asked: list[Any] = []  # what the ticks since the last look work on
        self.unseen = 0  # ticks since the last look
        self.ahead: deque[tuple[torch.cuda.Event, Any]] = deque()  # the same up to a look that is not done
        self.spare: list[torch.cuda.Event] = []
        self.sleeps = None if sleeps is None else random.Random(sleeps)
        self.naps: list[Row] = []

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
