"""Engine `streams`: all K stages in this process, at the same time on one GPU.

The host runs the programs as `simulate` does, but only queues the work. Recorded work is launched one tick at a time,
with one branch per stage, which the device runs on streams of its own (graphs/ticks.py). Results depend on the order
within each stage alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.links import Link
from offbeat.core.links.local import Entrance
from offbeat.engines import MakeExecutor, eager
from offbeat.engines.deferred_tensor import DeferredTensor
from offbeat.engines.devices import agreed
from offbeat.engines.simulate import Simulate
from offbeat.engines.stage_streams import StageStream, many_queues
from offbeat.graphs.capture import captures
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.graphs.ring import has_lag, room, together
from offbeat.graphs.ticks import Ticks
from offbeat.graphs.windows import Windows
from offbeat.method import Method


class Streams(Simulate):
    """All stages in this process, at the same time. `sleeps` lets them sleep at random, which must change no result.

    `together` turns are launched at once, by default as many as keep all stages busy. On a device without streams the
    stages run one after the other; nothing else is different.
    """

    on_one_device = True

    def __init__(self, K: int, device: torch.device, *, sleeps: int | None = None, together: int | None = None) -> None:
        super().__init__(K)
        self.device, self.sleeps, self.together = device, sleeps, together
        many_queues(device)
        self.stage_stream = StageStream(device)
        self.launch_queue = LaunchQueue()

    @property
    def defers(self) -> bool:
        return self.launch_queue.defers

    def device_for(self, given: torch.device | None) -> torch.device:
        return agreed(given, self.device)

    def ordered(self, method: Method) -> Method:
        """Windows (graphs/windows.py) run the batches of a window at the same time themselves."""
        return replace(method, pipelined=False)

    def executor_maker(self, method: Method) -> MakeExecutor:
        """Recordings on one launch queue; the stages themselves for a method whose operations cannot be recorded."""
        if method.why_not_capturable() is not None:
            return eager
        self.launch_queue = self._launch_queue(method)
        return partial(RecordedStage, launch_queue=self.launch_queue)

    def _launch_queue(self, method: Method) -> LaunchQueue:
        if not captures(self.device):  # only captured work gives its results before it has run
            return LaunchQueue()
        most = together(method, self.K)  # the rings have no room for more
        if has_lag(method, self.K):
            turns = min(self.together or most, most)
            return Ticks(self.K, room(method, self.K), self.device, together=turns, sleeps=self.sleeps)
        return Windows(min(self.together or method.M, most), self.device, sleeps=self.sleeps)

    def take(self, batch: Any, device: torch.device) -> Any:
        """A copy that is made on the caller's stream without waiting; stages copy it into a slot, on their own."""
        return [
            self._moved(part) if isinstance(part, Tensor) else pytree.tree_map_only(Tensor, self._moved, part)
            for part in batch
        ]

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda or self.device.type != "cuda":
            return tensor.to(self.device, copy=True)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def give(self, loss: Tensor) -> Tensor:
        """A copy of the slot in which the loss is, or will be: whoever reads it first has all work launched."""
        if not self.launch_queue.defers:
            return loss.detach().clone()
        copy = torch.empty_like(loss)
        if self.stage_stream.stream is not None:
            copy.record_stream(self.stage_stream.stream)
        with self.stage_stream.here():  # where it may be launched at once
            self.launch_queue.later(self.K - 1, lambda: copy.copy_(loss))
        return DeferredTensor.of(copy, self.settle)

    def link(
        self,
        channel: str,
        source: int,
        target: int,
        *,
        capacity: int,
        patient: bool = False,
        from_replica: int | None = None,
    ) -> Link | None:
        """Passes references: a message stays in a slot of the sender's ring, which is not reused before it is read."""
        return Entrance()

    def run(self, work: list[Iterator[bool]]) -> None:
        """One turn of every stage, or the rest of all programs."""
        with self.stage_stream.here():  # which waits for the batch
            super().run(work)
            self.launch_queue.tick()

    def stage_context(self) -> AbstractContextManager[object]:
        return self.stage_stream.between()

    def settle(self) -> None:
        with self.stage_stream.between():
            self.launch_queue.flush()
