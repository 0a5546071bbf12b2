"""Records the tensor work of one stage, on a stream of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from offbeat.core.random_stream import RandomStream
from offbeat.core.weights import Work
from offbeat.graphs.capture import Recorded, captures, own_stream, recording


class Recorder:
    """Makes recordings of one stage; `random` is its stream, which no recording may draw from."""

    def __init__(self, device: torch.device, random: RandomStream) -> None:
        self.device, self.random, self.stream = device, random, own_stream(device)

    @property
    def captures(self) -> bool:
        """Whether work is captured, so that its autograd graphs are made once and kept for all repetitions."""
        return captures(self.device)

    def recording(self) -> AbstractContextManager[None]:
        """Around several recordings."""
        return recording(self.device, self.stream)

    def record(self, work: Work, pool: Any = None) -> Recorded:
        """The work as a recording; nothing in it may read from the device."""

        def without_random_state() -> None:
            self.random.frozen = True
            try:
                work()
            finally:
                self.random.frozen = False

        return Recorded(without_random_state, device=self.device, pool=pool)

    def new_pool(self) -> Any:
        """Memory for recordings."""
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
