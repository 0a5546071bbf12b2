"""Nested values of all that can be sent and stored, and their equality: types, values, bits and memory layout."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from hypothesis import strategies as st

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3])]),
    st.integers(0, 5).map(lambda n: torch.arange(n)),
)
keys = st.one_of(st.text(max_size=3), st.integers(-5, 5))
nested_values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=10,
)


def bits(x: torch.Tensor) -> bytes:
    row_major = x.detach().clone(memory_format=torch.contiguous_format)
    return bytes(row_major.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""


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
