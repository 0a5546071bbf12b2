"""A CUDA stream for the work of stages, beside that of the caller; where there is none, nothing is different."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def many_queues(device: torch.device) -> None:
    """Ahead of anything on a GPU: let streams that have nothing to do with each other not wait for each other."""
    if device.type == "cuda" and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share eight queues


class StageStream:
    """Work that is recorded must not be on the default stream, and need not wait for what its caller does there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.asked = torch.cuda.Event() if on_gpu else None  # on the caller's stream

    @contextmanager
    def here(self) -> Iterator[torch.cuda.Stream | None]:
        """On this stream, behind what the caller has asked for so far; the caller's stream."""
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
    def between(self) -> Iterator[None]:
        """The same, and ahead of what the caller does next."""
        with self.here() as caller:
            yield
        if caller is not None and self.stream is not None:
            caller.wait_stream(self.stream)
