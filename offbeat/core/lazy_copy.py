"""Copies that cost nothing until they are written."""

from __future__ import annotations

import torch
from torch import Tensor


def lazy_copy(tensor: Tensor) -> Tensor:
    """A copy that shares the memory of the tensor until one of the two is written (copy-on-write).

    On a GPU it is copied at once: torch makes such a late copy on the default stream, on which no stage computes.
    Only for memory that torch has allocated, as that of links and of `Engine.take`: torch 2.13 crashes where a copy of
    a tensor from torch.load is written.

    >>> one = torch.zeros(2)
    >>> other = lazy_copy(one)
    >>> one.add_(1).tolist(), other.tolist()
    ([1.0, 1.0], [0.0, 0.0])
    """
    if tensor.device.type != "cpu" or not hasattr(torch, "_lazy_clone"):
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:  # memory of another library or process
        return tensor.clone()
