"""Engine `streams`: all K stages in this process, at once on one GPU.

The host goes through the programs as `simulate` does, but only asks for the work; what is recorded is launched a tick
at a time, a branch for each stage, which the device runs on streams of its own (stage/deck.py). Numbers depend on the
order within each stage alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offbeat.engines.later import Later
from offbeat.engines.simulate import Simulate
from offbeat.links import Link
from offbeat.links.local import Entrance
from offbeat.method import Method
from offbeat.stage.deck import Deck


class Streams(Simulate):
    """All stages here, at once. `sleeps` lets them sleep at random, which must change no number.

    On a device that has no streams the stages run one after the other; nothing else is different.
    """

    records = True

    def __init__(self, K: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(K)
        self.device, self.sleeps = device, sleeps
        on_gpu = device.type == "cuda"
        if on_gpu and not torch.cuda.is_initialized():
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share eight queues
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.asked = torch.cuda.Event() if on_gpu else None  # on the caller's stream
        self.deck = Deck([0] * K, device)

    def make_deck(self, method: Method) -> Deck:
        """Where the stages of a method put their work."""
        self.deck = Deck([method.lag(k, self.K) for k in self.here], self.device, sleeps=self.sleeps)
        return self.deck

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        """Messages stay where they were made, in a slot of the sender's ring, which is not used again too soon."""
        return Entrance()

    def run(self, work: list[Iterator[bool]]) -> None:
        """One turn of every stage, or what is left of all programs."""
        with self._here():  # which waits for the batch
            super().run(work)
            self.deck.tick()

    @contextmanager
    def _here(self) -> Iterator[torch.cuda.Stream | None]:
        """On the engine's stream, behind what the caller has asked for so far; the caller's stream."""
        if self.stream is None or self.asked is None:
            yield None
            return
        device, caller = torch.cuda.current_device(), torch.cuda.current_stream(self.device)
        self.asked.record(caller)
        self.stream.wait_event(self.asked)
        torch.cuda.set_stream(self.stream)  # and with it the device; torch's own context takes longer, every turn
        try:
            yield caller
        finally:
            torch.cuda.set_stream(caller)
            if device != caller.device_index:
                torch.cuda.set_device(device)

    @contextmanager
    def beside(self, k: int) -> Iterator[None]:
        with self._here() as caller:
            yield
        if caller is not None and self.stream is not None:
            caller.wait_stream(self.stream)

    def settle(self) -> None:
        with self.beside(1):
            self.deck.flush()

    def later(self, tensor: Tensor, k: int) -> Tensor:
        """A copy of what stage k is making, for a caller who does not wait."""
        if not self.deck.defers:
            return tensor.detach().clone()
        copy = torch.empty_like(tensor)
        if self.stream is not None:
            copy.record_stream(self.stream)
        self.deck.first(k - 1, lambda: copy.copy_(tensor))  # in its next turn
        return Later.of(copy, self.settle)
