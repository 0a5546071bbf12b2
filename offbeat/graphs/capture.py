"""Tensor work on fixed memory that is recorded once and repeated: a CUDA graph, or elsewhere the work itself."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from offbeat.graphs import join as joining

MOST_STREAMS = 256  # to record on, per device
_streams: dict[int, deque[torch.cuda.Stream]] = {}  # by device; the newest is the last


def captures(device: torch.device) -> bool:
    """Whether work is captured there, so that its graphs are made once and then repeated."""
    return device.type == "cuda"


class Recorded:
    """`work` reads and writes tensors that stay where they are; calling this does it once more.

    On a GPU its kernels are captured on the current stream, which must not be the default one, and launched all at once
    by every call. Recordings may share the memory of a `pool` if nothing that one of them leaves there is still needed
    when another one runs. Elsewhere a call does the work again, so that everything around recordings can be tested
    without a GPU.
    """

    def __init__(self, work: Callable[[], None], *, device: torch.device, pool: Any = None) -> None:
        self.work = work  # a graph alone would not keep the tensors that it reads and writes
        self.graph = _captured(work, pool) if captures(device) else None
        self.repeat = self.graph.replay if self.graph else work

    def __call__(self) -> None:
        self.repeat()


def _captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph, pool = joining.new_graph(), pool or torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        _abandon(graph, pool)
        raise
    graph.capture_end()
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that has failed, so that allocator and random generators leave capture mode."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream to record on, of MOST_STREAMS that take turns (torch itself has 32); None where there are no streams."""
    if device.type != "cuda":
        return None
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warning is not None:
        set_warning(False)  # gradients of eager batches are made on another stream, for which autograd waits
    number = device.index if device.index is not None else torch.cuda.current_device()
    streams = _streams.setdefault(number, deque())
    if len(streams) < MOST_STREAMS:
        streams.append(joining.new_stream(number) or torch.cuda.Stream(device))
    else:
        streams.rotate(-1)
    return streams[-1]


@contextmanager
def recording(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Around several recordings: no garbage is collected, such as older recordings, in the middle of a capture.

    They are captured on `stream`, or on the current one. Libraries have a workspace for each stream: what is captured
    on one must not run at the same time, what is captured on two may.
    """
    if not captures(device):
        yield
        return
    torch.cuda.synchronize(device)
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream) if stream else nullcontext():
            yield
    finally:
        if stream:
            torch.cuda.current_stream(device).wait_stream(stream)
        if enabled:
            gc.enable()
