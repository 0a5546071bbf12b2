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
from offbeat.engines.deferred_tensor import DeferredTensor
from offbeat.engines.simulate import Simulate
from offbeat.engines.stage_streams import StageStream, many_queues
from offbeat.graphs.capture import captures
from offbeat.graphs.launch_queue import LaunchQueue
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

    def __init__(self, K: int, device: torch.device, *, sleeps: int | None = None, together: int | None = None) -> None:
        super().__init__(K)
        self.device, self.sleeps, self.together = device, sleeps, together
        many_queues(device)
        self.stage_stream = StageStream(device)
        self.launch_queue = LaunchQueue()

    def make_launch_queue(self, method: Method) -> LaunchQueue | None:
        """Where the stages of a method put their work; nowhere if they are not to be recorded."""
        if method.why_not_capturable() is not None:
            return None
        if not captures(self.device):  # only captured work gives its results before it has run
            self.launch_queue = LaunchQueue()
        elif any(method.lag(k, self.K) for k in self.here):
            room = min((method.unused(k, self.K) for k in self.here if k > 1), default=2)
            self.launch_queue = Ticks(self.K, room, self.device, sleeps=self.sleeps)
        else:
            turns = min(self.together or method.M, together(method, self.K))  # the rings have no room for more
            self.launch_queue = Windows(turns, self.device, sleeps=self.sleeps)
        return self.launch_queue

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        """Messages stay where they were made, in a slot of the sender's ring, which is not used again too soon."""
        return Entrance()

    def run(self, work: list[Iterator[bool]]) -> None:
        """One turn of every stage, or what is left of all programs."""
        with self.stage_stream.here():  # which waits for the batch
            super().run(work)
            self.launch_queue.tick()

    def beside(self, k: int) -> AbstractContextManager[object]:
        return self.stage_stream.between()

    def settle(self) -> None:
        with self.stage_stream.between():
            self.launch_queue.flush()

    def later(self, tensor: Tensor, k: int) -> Tensor:
        """A copy of what stage k is making, for a caller who does not wait."""
        if not self.launch_queue.defers:
            return tensor.detach().clone()
        copy = torch.empty_like(tensor)
        if self.stage_stream.stream is not None:
            copy.record_stream(self.stage_stream.stream)
        with self.stage_stream.here():  # where it may be launched at once
            self.launch_queue.later(k - 1, lambda: copy.copy_(tensor))
        return DeferredTensor.of(copy, self.settle)
