"""Engine `streams`: all K stages in this process, at once on one GPU.

The host goes through the programs as `simulate` does, but only asks for the work; what is recorded is launched a tick
at a time, a branch for each stage, which the device runs on streams of its own (graphs/ticks.py). Numbers depend on the
order within each stage alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from offbeat.core.links import Link
from offbeat.core.links.local import Entrance
from offbeat.engines.deferred_tensor import Later
from offbeat.engines.simulate import Simulate
from offbeat.engines.stage_streams import Aside, many_queues
from offbeat.graphs.capture import captures
from offbeat.graphs.launch_queue import Deck
from offbeat.graphs.ring import together
from offbeat.graphs.ticks import Ticks
from offbeat.graphs.windows import Windows
from offbeat.method import Method


class Streams(Simulate):
    """All stages here, at once. `sleeps` lets them sleep at random, which must change no number.

    `together` turns of a method without lag are launched at once, by default as many as keep all stages busy. On a
    device that has no streams the stages run one after the other; nothing else is different.
    """

    records = True

    def __init__(
        self, K: int, device: torch.device, *, sleeps: int | None = None, together: int | None = None
    ) -> None:
        super().__init__(K)
        self.device, self.sleeps, self.together = device, sleeps, together
        many_queues(device)
        self.aside = Aside(device)
        self.deck = Deck()

    def make_deck(self, method: Method) -> Deck | None:
        """Where the stages of a method put their work; nowhere if they are not to be recorded."""
        if method.not_alike() is not None:
            return None
        if not captures(self.device):  # only captured work gives its results before it has run
            self.deck = Deck()
        elif any(method.lag(k, self.K) for k in self.here):
            room = min((method.unused(k, self.K) for k in self.here if k > 1), default=2)
            self.deck = Ticks(self.K, room, self.device, sleeps=self.sleeps)
        else:
            turns = min(self.together or method.M, together(method, self.K))  # the rings have no room for more
            self.deck = Windows(turns, self.device, sleeps=self.sleeps)
        return self.deck

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        """Messages stay where they were made, in a slot of the sender's ring, which is not used again too soon."""
        return Entrance()

    def run(self, work: list[Iterator[bool]]) -> None:
        """One turn of every stage, or what is left of all programs."""
        with self.aside.here():  # which waits for the batch
            super().run(work)
            self.deck.tick()

    def beside(self, k: int) -> AbstractContextManager[object]:
        return self.aside.between()

    def settle(self) -> None:
        with self.aside.between():
            self.deck.flush()

    def later(self, tensor: Tensor, k: int) -> Tensor:
        """A copy of what stage k is making, for a caller who does not wait."""
        if not self.deck.defers:
            return tensor.detach().clone()
        copy = torch.empty_like(tensor)
        if self.aside.stream is not None:
            copy.record_stream(self.aside.stream)
        with self.aside.here():  # where it may be launched at once
            self.deck.later(k - 1, lambda: copy.copy_(tensor))
        return Later.of(copy, self.settle)
