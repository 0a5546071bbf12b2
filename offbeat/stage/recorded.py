"""Tensor work on fixed memory that is recorded once and repeated: a CUDA graph, or elsewhere the work itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorded:
    """`work` reads and writes tensors that stay where they are; calling this does it once more.

    On a GPU its kernels are captured on the current stream, which must not be the default one, and launched all at once
    by every call. Recordings that never run at the same time may share the memory of a `pool`. Elsewhere a call does
    the work again, so that all that surrounds a recording can be tried without a GPU.
    """

    def __init__(self, work: Callable[[], None], *, device: torch.device, pool: Any = None) -> None:
        self.work = work
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
            self.graph = graph

    def __call__(self) -> None:
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()
