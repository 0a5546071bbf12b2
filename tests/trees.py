"""Equality of state: types, values, bits and memory layout."""

from __future__ import annotations

import math

import torch


def bits(x: torch.Tensor) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and list(map(type, a)) == list(map(type, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b
