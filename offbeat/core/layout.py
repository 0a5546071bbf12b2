"""Memory layouts of tensors: which ones are kept when a tensor is copied, sent or stored, and how they are restored.

Layout is part of the numerics: BatchNorm on channels-last and convolution on a transposed input give other bits than on
contiguous ones, and kernels sum in another order from an address off a 64-byte boundary.

    dense     no gaps and no overlaps, in any order of dimensions; starts on a boundary, as torch allocates tensors
    strided   any strides without overlaps, gaps and expanded dimensions (stride 0) included; starts anywhere
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 64  # bytes: boundary on which torch's allocators, and links, start a tensor


class Layout(NamedTuple):
    """Where the elements of a tensor are: elements from a boundary to the first one, and strides."""

    offset: int
    strides: tuple[int, ...]


def layout_of(tensor: Tensor) -> Layout | None:
    """The strided layout of a tensor; None where elements overlap other than by expansion."""
    offset, rest = divmod(tensor.data_ptr() % ALIGNMENT, tensor.element_size()) if tensor.numel() else (0, 0)
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and length > 1:
            if stride < span:
                return None
            span += (length - 1) * stride
    return Layout(0 if rest else offset, tensor.stride())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> row_major([2, 3, 4])
    (12, 4, 1)
    """
    return tuple(prod(max(1, length) for length in shape[at + 1 :]) for at in range(len(shape)))


def memory_size(shape: Sequence[int], layout: Layout) -> int:
    """Elements of memory that a tensor takes, from the boundary to its last element."""
    steps = zip(shape, layout.strides, strict=True)
    return layout.offset + (1 + sum((length - 1) * stride for length, stride in steps) if prod(shape) else 0)


def unexpanded(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor with a single element along dimensions of stride 0."""
    return tensor[tuple(slice(None) if stride else slice(1) for stride in strides)]


def laid_out(
    values: Tensor, shape: Sequence[int], layout: Layout, *, device: torch.device | str | None = None
) -> Tensor:
    """A copy of unexpanded values in new memory of that layout; `shape` is the expanded one."""
    import torch

    memory = torch.empty(memory_size(shape, layout), dtype=values.dtype, device=device)
    single = [length if stride else min(length, 1) for length, stride in zip(shape, layout.strides, strict=True)]
    memory.as_strided(single, layout.strides, layout.offset).copy_(values.reshape(single))
    # a tensor of its own rather than a view: autograd functions must not return views of what they allocate
    return memory.new_empty(0).set_(memory.untyped_storage(), layout.offset, tuple(shape), layout.strides)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps."""
    import torch

    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it is dense, otherwise those of a contiguous tensor."""
    return tensor.stride() if is_dense(tensor) else row_major(tensor.shape)


def dense_copy(tensor: Tensor) -> Tensor:
    """The tensor as the other end of a link receives it, on its own device; a leaf that requires gradients if the
    tensor does."""
    import torch

    copy = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def as_leaf(tensor: Tensor) -> Tensor:
    """The same memory without the graph that it was computed by; requires gradients if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
