"""The values that cross a cut, in a form that every engine carries and from which the next stage restores them exactly.

Tensors, numbers, None and containers of those are sent as they are. A link makes tensors dense and gives each place one
of its own that requires gradients if the sent one does; what else a stage must know
to compute what the unsplit model does is sent as text:

    "=2"                      the tensor at place 2 itself: one tensor under two names stays one, so that its gradient
                              is summed in the order of the unsplit model
    ("layout 3 12 1", x)      x had strides 12, 1 and started 3 elements after a 64-byte boundary, as a slice does:
                              the order of sums, and `contiguous`, depend on it
    "dtype float32"           a torch.dtype
    "device"                  a torch.device: the receiver's own
    "size 2 3"                a torch.Size
    "text ..."                a string

Checkpoints store this form with the batches in flight: it must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.codec import dtype_named
from offbeat.core.layout import Layout, is_dense, laid_out, layout_of, unexpanded


def encode(content: Any) -> Any:
    """The values as they are sent."""
    seen: dict[int, int] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in seen:
                return f"={seen[id(value)]}"
            seen[id(value)] = len(seen)
            layout = unusual_layout(value)
            return value if layout is None else (" ".join(map(str, ("layout", layout.offset, *layout.strides))), value)
        if isinstance(value, torch.Size):
            return " ".join(map(str, ("size", *value)))
        if isinstance(value, torch.dtype):
            return str(value).replace("torch.", "dtype ")
        if isinstance(value, str):
            return f"text {value}"
        return "device" if isinstance(value, torch.device) else value

    return _each_leaf(content, leaf)


def decode(content: Any, device: torch.device) -> Any:
    """The values that were encoded; `device` is the receiver's own."""
    seen: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            seen.append(value)
            return value
        if _has_layout(value):
            offset, *strides = map(int, value[0].split()[1:])
            seen.append(Relay.apply(value[1], Layout(offset, tuple(strides))))
            return seen[-1]
        return _read(value, device, seen) if isinstance(value, str) else value

    return _each_leaf(content, leaf, is_leaf=_has_layout)


def _has_layout(content: Any) -> bool:
    """Whether this is an encoded tensor with its layout."""
    pair = type(content) in (tuple, list) and len(content) == 2
    return pair and isinstance(content[0], str) and content[0].startswith("layout ")


def _read(text: str, device: torch.device, seen: list[Tensor]) -> Any:
    kind, _, rest = text.partition(" ")
    if kind == "text":
        return rest
    if kind == "device":
        return device
    if kind == "dtype":
        return dtype_named(rest)
    return torch.Size(map(int, rest.split())) if kind == "size" else seen[int(kind.removeprefix("="))]


def unusual_layout(tensor: Tensor) -> Layout | None:
    """The layout of a tensor that a link would change; None where it arrives as it is, or cannot be kept."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    layout = layout_of(tensor)
    return None if layout is not None and not layout.offset and is_dense(tensor) else layout


class Relay(torch.autograd.Function):
    """The same values in another layout; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        return laid_out(unexpanded(x, layout.strides), x.shape, layout, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def duplicate(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, in the same layout."""
    layout = unusual_layout(tensor)
    return tensor.clone() if layout is None else Relay.apply(tensor, layout)


def each_tensor(content: Any, change: Callable[[Tensor], Any]) -> Any:
    """The content with every tensor in it changed."""
    return _each_leaf(content, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def _each_leaf(
    content: Any, change: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] = lambda content: False
) -> Any:
    if is_leaf(content):
        return change(content)
    if type(content) in (tuple, list):
        return type(content)(_each_leaf(item, change, is_leaf=is_leaf) for item in content)
    if type(content) is dict:
        return {key: _each_leaf(item, change, is_leaf=is_leaf) for key, item in content.items()}
    return change(content)
