"""The recorded work of all stages on one device, so arranged that the host asks for a whole turn with a single call.

Stages put recorded pieces on their tapes instead of launching them; a tape is closed when the stage has done its turn.
Where a stage uses nothing from its neighbours that they make in the same turn of the clock, the tapes of one tick are
branches of one graph, which the device runs at the same time:

    tick      0    1    2    3    4             stage k is k-1 turns behind the first, so that the activations which
    stage 1   0    1    2    3    4   ...       it forwards, and with a lag of 2(K-k) also the gradients which it
    stage 2        0    1    2    3             backwards, were made one tick before
    stage 3             0    1    2

With a smaller lag a gradient would come too late for that. Then all stages do the same turn in one tick, and each
forward waits for the one below; only backwards and updates overlap. Without any lag there is nothing that could, and
everything is launched in order.

Whatever cannot wait flushes first. Between two turns (a look at the weights) the stages catch up with the first in a
few more ticks; within one (an eager batch) all that was asked for is launched in the order in which it was asked for,
which is that of a simulation.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

from offbeat.stage import joining
from offbeat.stage.recorded import Recorded, captures, recording

AHEAD = 8  # ticks by which the host may be ahead of the device
MOST = 1024  # different ticks that are joined
NAPS = (10_000, 1_000_000)  # cycles
Action = Callable[[], object]


@dataclass(eq=False)
class Tape:
    """What one stage has asked for in one turn: things to do first, recorded pieces, things to do after them."""

    turn: int
    actions: list[tuple[int, Action]] = field(default_factory=list)  # each with its place in the order of all
    pieces: list[tuple[int, Recorded]] = field(default_factory=list)
    after: list[tuple[int, Action]] = field(default_factory=list)
    reads: int | None = None  # which piece is the first to use what the stage below has made
    made: int | None = None  # which piece makes what the stage above uses


class Deck:
    """The tapes of stages with those lags; `sleeps` lets them sleep at random, which must change no number.

    Where nothing is captured, work is done when it is asked for, since only captured work gives its results before it
    has run.
    """

    def __init__(self, lags: Sequence[int], device: torch.device, *, sleeps: int | None = None) -> None:
        self.defers = captures(device)
        self.device = device
        K, room = len(lags), min((below - above for below, above in pairwise(lags)), default=2)
        self.in_order, self.chained = room < 1, room < 2
        self.behind = [0 if self.chained else rank for rank in range(K)]
        self.turn = self.order = 0
        self.done: set[int] = set()  # stages that have done this turn
        self.open = [Tape(0) for _ in range(K)]
        self.closed: list[deque[Tape]] = [deque() for _ in range(K)]
        self.joined: dict[tuple[int, ...], tuple[Any, Callable[[], None] | None]] = {}
        self.ahead: deque[tuple[torch.cuda.Event, Any]] = deque()  # ticks asked for, and what they work on
        self.spare: list[torch.cuda.Event] = []
        self.sleeps = None if sleeps is None else random.Random(sleeps)
        self.naps: list[Recorded] = []

    # ---- what stages ask for

    def put(self, rank: int, piece: Recorded, *, reads: bool = False, makes: bool = False) -> None:
        """Recorded work: the next on the tape of that stage."""
        tape = self.open[rank]
        if reads:
            tape.reads = len(tape.pieces)
        if makes:
            tape.made = len(tape.pieces)
        self._ask(tape.pieces, piece)

    def first(self, rank: int, action: Action) -> None:
        """Work ahead of all pieces of this turn, which must not mind."""
        self._ask(self.open[rank].actions, action)

    def after(self, rank: int, action: Action) -> None:
        """Work behind all pieces of this turn, and ahead of the next."""
        self._ask(self.open[rank].after, action)

    def _ask(self, where: list[Any], action: Action) -> None:
        if not self.defers:
            action()
            return
        self.order += 1
        where.append((self.order, action))

    def close(self, rank: int) -> None:
        """That stage has done its turn."""
        if not self.defers:
            return
        tape = self.open[rank]
        self.closed[rank].append(tape)
        self.open[rank] = Tape(self.turn + 1, actions=tape.after)
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
        work: list[tuple[int, Action]] = []
        for tape in chain(*self.closed, self.open):
            work += tape.actions + tape.pieces + tape.after
            tape.actions, tape.pieces, tape.after, tape.reads, tape.made = [], [], [], None, None
        for queue in self.closed:
            queue.clear()
        if not work:
            return
        for _, action in sorted(work, key=lambda one: one[0]):
            action()
        self._keep_up(work)

    # ---- launching

    def tick(self) -> None:
        """All stages have done their turn: launch what is due by now."""
        if not self.defers:
            return
        due = [queue.popleft() if queue and queue[0].turn <= self.turn - behind else None
               for queue, behind in zip(self.closed, self.behind, strict=True)]  # fmt: skip
        self.turn += 1
        self.done.clear()
        for tape in self.open:
            tape.turn = self.turn
        tapes = [tape for tape in due if tape is not None]
        for tape in tapes:
            for _, action in tape.actions:
                action()
        if any(tape.pieces for tape in tapes):
            self._launch([tape for tape in tapes if tape.pieces])
        if tapes:
            self._keep_up(tapes)

    def _launch(self, tapes: list[Tape]) -> None:
        branches = [[piece for _, piece in tape.pieces] for tape in tapes]
        if self.sleeps:
            branches = [[*self._nap(), *branch] for branch in branches]
        key = tuple(map(id, chain(*branches)))
        known = self.joined.get(key)
        if known is None:
            known = self.joined[key] = branches, None  # which also keeps them, so that none gets the id of another
            again = bool(self.sleeps)
        else:
            again = known[1] is None and len(self.joined) < MOST
        if again:
            together = joining.join([[piece.graph for piece in branch if piece.graph] for branch in branches],
                                    self._waits(tapes))  # fmt: skip
            known = self.joined[key] = branches, together
        if known[1] is not None:
            known[1]()
        else:
            for piece in chain(*branches):
                piece()

    def _waits(self, tapes: list[Tape]) -> list[tuple[int, int, int, int]]:
        """(branch, piece) that waits, (branch, piece) for which it does."""
        if not self.chained:
            return []
        nap = int(bool(self.sleeps))
        return [(here, above.reads + nap, here - 1, below.made + nap)
                for here, (below, above) in enumerate(pairwise(tapes), start=1)
                if above.reads is not None and below.made is not None]  # fmt: skip

    def _nap(self) -> list[Recorded]:
        assert self.sleeps
        if not self.naps:
            with recording(self.device):
                self.naps = [Recorded(partial(torch.cuda._sleep, nap), device=self.device) for nap in (1, *NAPS)]
        return [self.sleeps.choice(self.naps)]

    def _keep_up(self, work: Any) -> None:
        """Hold what was launched until it is done; do not get too far ahead of the device."""
        event = self.spare.pop() if self.spare else torch.cuda.Event(blocking=True)
        event.record()
        self.ahead.append((event, work))
        while len(self.ahead) > AHEAD:
            self.ahead[0][0].synchronize()
            self.spare.append(self.ahead.popleft()[0])

    def forget(self) -> None:
        """Drop what was joined, since it will not come again."""
        self.flush()
        self.joined.clear()
