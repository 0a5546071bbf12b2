"""The values that cross a cut, in a form that every link carries and from which the next stage has the very same.

Tensors, numbers, None and containers of those go as they are. The rest is written as text:

    "=2"                      the very tensor at place 2: one tensor under two names stays one, so that its gradient is
                              summed in the order of the unsplit model
    ("layout 3 12 1", x)      x had strides 12, 1 and began 3 elements behind a 64-byte boundary: a slice, say. A link
                              sends it dense, but sums run in an order that depends on it, and `contiguous` too
    "dtype float32"           a torch.dtype
    "device"                  a torch.device: the receiver's own
    "size 2 3"                a torch.Size
    "text ..."                a string
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes: where torch, and links, begin a tensor


def encode(content: Any, seen: dict[int, int] | None = None) -> Any:
    """What a link can carry."""
    seen = {} if seen is None else seen
    if isinstance(content, Tensor):
        if id(content) in seen:
            return f"={seen[id(content)]}"
        seen[id(content)] = len(seen)
        laid = layout(content)
        return content if laid is None else (" ".join(["layout", *map(str, laid)]), content)
    if isinstance(content, torch.Size):
        return " ".join(["size", *map(str, content)])
    if type(content) in (tuple, list):
        return type(content)(encode(item, seen) for item in content)
    if type(content) is dict:
        return {key: encode(item, seen) for key, item in content.items()}
    if isinstance(content, torch.dtype):
        return str(content).replace("torch.", "dtype ")
    if isinstance(content, str):
        return f"text {content}"
    return "device" if isinstance(content, torch.device) else content


def decode(content: Any, device: torch.device, seen: list[Tensor] | None = None) -> Any:
    """What was encoded; `device` is the receiver's own."""
    seen = [] if seen is None else seen
    if isinstance(content, Tensor):
        seen.append(content)
        return content
    if type(content) is dict:
        return {key: decode(item, device, seen) for key, item in content.items()}
    if type(content) in (tuple, list):
        if len(content) == 2 and isinstance(content[0], str) and content[0].startswith("layout "):
            seen.append(Relay.apply(content[1], tuple(map(int, content[0].split()[1:]))))
            return seen[-1]
        return type(content)(decode(item, device, seen) for item in content)
    return _read(content, device, seen) if isinstance(content, str) else content


def _read(text: str, device: torch.device, seen: list[Tensor]) -> Any:
    kind, _, rest = text.partition(" ")
    if kind == "text":
        return rest
    if kind == "device":
        return device
    if kind == "dtype":
        return getattr(torch, rest)
    return torch.Size(map(int, rest.split())) if kind == "size" else seen[int(kind.removeprefix("="))]


def layout(tensor: Tensor) -> tuple[int, ...] | None:
    """Where a tensor begins behind a boundary, and its strides; None where it is as a fresh one would be."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    begin, rest = divmod(tensor.data_ptr() % ALIGNMENT, tensor.element_size())
    if rest or (not begin and torch.ops.aten.is_non_overlapping_and_dense(tensor)):
        return None
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and length > 1:
            if stride < span:
                return None  # elements overlap
            span += (length - 1) * stride
    return begin, *tensor.stride()


class Relay(torch.autograd.Function):
    """The same values laid out as told; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, laid: tuple[int, ...]) -> Tensor:
        begin, *strides = laid
        span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
        memory = x.new_empty(begin + span).untyped_storage()
        # expanded dimensions hold one element
        single = x[tuple(slice(None if stride else 1) for stride in strides)]
        x.new_empty(0).set_(memory, begin, single.shape, strides).copy_(single)
        return x.new_empty(0).set_(memory, begin, x.shape, strides)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def duplicate(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, laid out alike."""
    laid = layout(tensor)
    return tensor.clone() if laid is None else Relay.apply(tensor, laid)


def each_tensor(content: Any, change: Callable[[Tensor], Any]) -> Any:
    """The content with every tensor in it changed."""
    if isinstance(content, Tensor):
        return change(content)
    if type(content) in (tuple, list):
        return type(content)(each_tensor(item, change) for item in content)
    if type(content) is dict:
        return {key: each_tensor(item, change) for key, item in content.items()}
    return content
