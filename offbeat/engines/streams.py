"""Engine `streams`: all K stages in this process, a stream of one GPU each, so that they compute at the same time.

The host goes through the programs as `simulate` does, but only asks for the work; the device does it as soon as what it
needs is there. In every turn (one local iteration of every stage) a stream waits

    for each message      until the sender's stream is through with the turn in which it was sent (links/streams.py)
    before its first work until both neighbours are through with the turn before the last one (stage/ring.py), so that
                          nobody writes where a neighbour still reads

and for nothing else. Numbers depend on the order within each stream alone.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from offbeat.engines.simulate import Simulate
from offbeat.links import Link
from offbeat.links.streams import Later, News, StreamLink
from offbeat.stage.ring import BEHIND

AHEAD = 8  # turns by which the host may be ahead of the device


class Streams(Simulate):
    """All stages here, at once. `sleeps` lets streams sleep at random, which must change no number.

    On a device that has no streams the stages run one after the other; nothing else is different.
    """

    records = True

    def __init__(self, K: int, device: torch.device, *, sleeps: int | None = None) -> None:
        super().__init__(K)
        self.device = device
        self.sleeps = None if sleeps is None else random.Random(sleeps)
        on_gpu = device.type == "cuda"
        if on_gpu and not torch.cuda.is_initialized():
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share eight queues
        self.streams = [torch.cuda.Stream(device) for _ in self.here] if on_gpu else []
        self.through: deque[list[torch.cuda.Event]] = deque(maxlen=BEHIND)  # of the last turns, a stage each
        self.ahead: deque[tuple[list[torch.cuda.Event], list[Any]]] = deque()  # turns asked for, and what they read
        self.news = News(device)
        self.apart = False  # whether the stages have work that the caller's stream has not waited for

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        return StreamLink(self.news)

    def run(self, work: list[Iterator[bool]]) -> None:
        """One turn of every stage, or what is left of all programs."""
        if not self.streams:
            super().run(work)
            return
        caller = torch.cuda.current_stream(self.device)
        try:
            self._begin(caller)
            self._turn(work)
        finally:
            self.news.event = self.news.stream = None
            torch.cuda.set_stream(caller)
        while len(self.ahead) > AHEAD:
            for event in self.ahead[0][0]:
                event.synchronize()
            self.ahead.popleft()

    def _turn(self, work: list[Iterator[bool]]) -> None:
        through = [torch.cuda.Event(blocking=True) for _ in work]
        unfinished = deque(enumerate(work))
        stuck = 0
        while unfinished:
            here, generator = unfinished.popleft()
            self.news.stream, self.news.event = self.streams[here], through[here]  # it will have launched what it sends
            torch.cuda.set_stream(self.streams[here])
            for progress in generator:
                stuck = 0 if progress else stuck + 1
                if not progress:
                    unfinished.append((here, generator))
                    break
            else:
                stuck = 0
            through[here].record(self.streams[here])
            if unfinished and unfinished[-1][1] is generator:
                through[here] = torch.cuda.Event(blocking=True)
            if stuck > len(unfinished):
                raise RuntimeError("no stage can go on: the programs wait for each other")
        self.through.append(through)
        self.ahead.append((through, self.news.taken()))

    def _begin(self, caller: torch.cuda.Stream) -> None:
        """Let every stream wait for what it must not overtake."""
        self.news.waited.clear()
        if not self.apart:
            for stream in self.streams:
                stream.wait_stream(caller)
        elif len(self.through) == BEHIND:
            # The stage below has by then gone further: every turn begins with its message, of the same turn.
            for stream, event in zip(self.streams, self.through[0][1:], strict=False):
                stream.wait_event(event)
                self.news.waited[event] = stream
        if self.sleeps:
            for stream in self.streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.sleeps.choice((0, 0, 10_000, 1_000_000)))
        self.apart = True

    @contextmanager
    def _on(self, here: int) -> Iterator[None]:
        with torch.cuda.stream(self.streams[here]) if self.streams else nullcontext():
            yield

    def later(self, tensor: Tensor, k: int) -> Tensor:
        """A copy of what stage k is making, for a caller who does not wait."""
        with self._on(k - 1):
            copy = tensor.detach().clone()
            return Later.of(copy) if self.streams else copy

    @contextmanager
    def beside(self, k: int) -> Iterator[None]:
        if not self.streams:
            yield
            return
        here, there = torch.cuda.current_stream(self.device), self.streams[k - 1]
        there.wait_stream(here)
        with torch.cuda.stream(there):
            yield
        here.wait_stream(there)

    def settle(self) -> None:
        if self.streams and self.apart:
            here = torch.cuda.current_stream(self.device)
            for stream in self.streams:
                here.wait_stream(stream)
        self.through.clear()
        self.apart = False
