"""Launch queues, where stages put recorded work. A plain one launches it at once. Others defer it, so that the host
launches the work of all stages on one device with a single call: ticks.py, and windows.py for methods without lag.

Whatever cannot wait (an eager batch, reading the weights) flushes first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.graphs import join as joining
from offbeat.graphs.capture import Recorded, recording

AHEAD = 8  # ticks by which the host may be ahead of the device, rounded up to whole intervals
EVENT_INTERVAL = 4  # ticks between two events, which show how far the device is
MOST_JOINED = 1024  # different ticks that are joined
NAPS = (10_000, 1_000_000)  # cycles
Action = Callable[[], object]
Values = dict[Tensor, float]  # what to write to tensors on the device
Kind = Literal["forward", "backward", "update", "other"]


class RecordedOperation:
    """An operation of a stage as recorded pieces that run one after the other; the same object every time it recurs.

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
    """Launches all work at once."""

    defers = False  # whether work may be launched later than it is put here

    def put(self, rank: int, operation: RecordedOperation) -> None:
        """Queue the next recorded operation of that stage."""
        operation()

    def first(self, rank: int, action: Action) -> None:
        """Work that may be done before all recorded operations of this turn."""
        action()

    def write_before_update(self, rank: int, values: Values) -> None:
        """Write values after all recorded operations of this turn, and before that stage's next update; to tensors that
        none of the updates which are launched at once with that one reads."""
        write(values)

    def write_before_turn(self, rank: int, values: Values) -> None:
        """Write values after all recorded operations of this turn, and before those of that stage's next turn; to
        tensors that nothing which is launched at once with that one reads."""
        write(values)

    def rate_places(self, M: int, *, predicts: bool) -> int:
        """Places for the learning rates of a stage, used in turn by its updates, one every M turns, so that these can
        be launched at once; `predicts`: the turns after an update read the rates of the next one, too."""
        return 1

    def later(self, rank: int, action: Action) -> None:
        """Between two turns: work after all recorded operations of the last one, which that stage has closed."""
        action()

    def pause(self) -> None:
        """A stage waits for a message from another one."""

    def close(self, rank: int) -> None:
        """That stage has done all operations of its turn."""

    def tick(self) -> None:
        """All stages have done all operations of their turn."""

    def flush(self) -> None:
        """Launch all queued work."""

    def forget(self) -> None:
        """Launch all queued work; what was recorded so far will not recur."""


class Deferring(LaunchQueue):
    """A launch queue that defers captured work, whose results have an address before it has run, and launches it
    together. `sleeps` lets the device sleep at random, which must change no result.
    """

    defers = True

    def __init__(self, device: torch.device, *, sleeps: int | None = None) -> None:
        self.device = device
        self.joined: dict[tuple[RecordedOperation, ...], Callable[[], None] | None] = {}
        self.launched: list[Any] = []  # what the ticks since the last event work on
        self.ticks = 0  # since the last event
        self.ahead: deque[tuple[torch.cuda.Event, Any]] = deque()  # events not waited for, with what precedes them
        self.spare: list[torch.cuda.Event] = []
        self.sleeps = None if sleeps is None else random.Random(sleeps)
        self.naps: list[RecordedOperation] = []

    def _launch_operations(
        self, operations: tuple[RecordedOperation, ...], nodes: Callable[[], joining.Nodes] | None
    ) -> None:
        """As one graph where they recur and it is known what waits for what, else one after the other."""
        together = self.joined.get(operations)
        if together is None and nodes is not None:
            again = operations in self.joined or bool(self.sleeps)
            if len(self.joined) >= MOST_JOINED:
                del self.joined[next(iter(self.joined))]
            self.joined[operations] = together = joining.join(nodes()) if again else None
        if together is not None:
            together()
        else:
            for operation in operations:
                operation()

    def _nap(self) -> RecordedOperation:
        assert self.sleeps
        if not self.naps:
            with recording(self.device):
                self.naps = [
                    RecordedOperation(Recorded(partial(torch.cuda._sleep, nap), device=self.device))
                    for nap in (1, *NAPS)
                ]
        return self.sleeps.choice(self.naps)

    def _keep_up(self, work: Any, turns: int = 1) -> None:
        """Hold what was launched until it is done; do not get too far ahead of the device."""
        self.launched.append(work)
        self.ticks += turns
        if self.ticks < EVENT_INTERVAL:
            return
        self.ticks = 0
        event = self.spare.pop() if self.spare else torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(torch.cuda.current_device()))  # with an index, which takes less time
        self.ahead.append((event, self.launched))
        self.launched = []
        while len(self.ahead) > AHEAD // EVENT_INTERVAL:
            self.ahead[0][0].synchronize()
            self.spare.append(self.ahead.popleft()[0])

    def forget(self) -> None:
        """Also drop the joined graphs."""
        self.flush()
        self.joined.clear()


def write(values: Values) -> None:
    """Write values to tensors, on a GPU with two kernels for all of them."""
    places = list(values)
    torch._foreach_zero_(places)
    torch._foreach_add_(places, list(values.values()))


def add_operation(nodes: joining.Nodes, operation: RecordedOperation, waits: list[int]) -> list[int]:
    """Add the pieces of an operation, the first of which waits for those nodes; the node that its successors wait
    for."""
    for piece in operation.pieces:
        if piece.graph:
            nodes.append((piece.graph, waits))
            waits = [len(nodes) - 1]
    return waits
