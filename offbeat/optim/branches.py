"""Parts of an optimizer step that do not depend on each other, as branches of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

Aside = Callable[[], AbstractContextManager[None]]


@contextmanager
def branches(device: torch.device) -> Iterator[Aside]:
    """A function whose contexts are computed beside the work that follows them, until the end of the block.

    While a CUDA graph is captured they are a branch of it, which begins where the block does if they come first.
    Elsewhere everything is computed in its order, with the same results.

    >>> with branches(torch.device("cpu")) as aside:
    ...     with aside():
    ...         print("first")
    ...     print("second")
    first
    second
    """
    if device.type != "cuda":
        yield nullcontext
        return
    stream = _stream(torch.cuda.current_device() if device.index is None else device.index)
    if not torch.cuda.is_current_stream_capturing():
        yield nullcontext
        return
    stream.wait_stream(torch.cuda.current_stream())
    try:
        yield lambda: torch.cuda.stream(stream)
    finally:
        torch.cuda.current_stream().wait_stream(stream)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Of a device, for captures, of which there is one at a time; made by the first step, before any of them."""
    return torch.cuda.Stream(device)
