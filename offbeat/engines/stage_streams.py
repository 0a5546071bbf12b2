"""A CUDA stream for the work of stages, beside the stream of the caller; without a GPU it does nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def many_queues(device: torch.device) -> None:
    """Before anything runs on a GPU: give independent streams hardware queues of their own."""
    if device.type == "cuda" and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share eight queues


class StageStream:
    """The stream of recorded work, which must not be the default one and does not wait for the caller's later work."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # With its index: without one, torch looks for all kinds of devices in every call.
        self.index = (torch.cuda.current_device() if device.index is None else device.index) if on_gpu else None
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.asked = torch.cuda.Event() if on_gpu else None  # on the caller's stream

    @contextmanager
    def here(self) -> Iterator[torch.cuda.Stream | None]:
        """Work on this stream, after what the caller has launched so far; yields the caller's stream."""
        if self.stream is None or self.asked is None:
            yield None
            return
        device, caller = torch.cuda.current_device(), torch.cuda.current_stream(self.index)
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
        """The same, and before what the caller launches next."""
        with self.here() as caller:
            yield
        if caller is not None and self.stream is not None:
            caller.wait_stream(self.stream)
