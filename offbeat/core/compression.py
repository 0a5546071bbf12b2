"""Compressed messages between stages, for slow links.

    exact   tensors as they are
    bf16    floating-point tensors rounded to bfloat16: half the bytes of float32
    int8    floating-point tensors as 8-bit integers with one scale per row: about a quarter

A row is the fewest trailing dimensions that have at least 64 elements, without the first dimension (samples): the
features of a token, or a channel of an image. Its scale is its largest magnitude / 127, and values are rounded to the
nearest integer, so a value is wrong by at most half a scale.

Gradients in int8 have error feedback: what rounding has left out of a message is added to the next one,

    e = g(t) + r,    send q(e),    r = e - q(e)

so that the sum of the messages stays within half a scale of the sum of the gradients. The residual r is a state of the
sending stage and part of its checkpoints. A batch of another shape starts without one, and so does a value whose sum
with r would exceed the largest float.

Encoding and decoding depend on values alone, so all engines agree bit for bit. Integers, targets, evaluation and
reports are sent as they are. A shared weight is sent with the activations, and rounded as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.errors import UserError, unknown

Messages = Literal["exact", "bf16", "int8"]
LEAST_ROW = 64  # elements that share a scale
LEVELS = 127
SCALE_BYTES = 4
KEYS = {"encoding", "codes", "scales", "dtype", "requires_grad"}


def check_messages(messages: str, K: int, *, streams: bool = False) -> Messages:
    """The format of that name, where there are messages; `streams`: whether all of them stay on one GPU."""
    if messages not in get_args(Messages):
        raise unknown("messages", str(messages), get_args(Messages))
    if messages != "exact" and K == 1:
        raise UserError(f"messages={messages!r} with K=1, which sends none: leave it out, or use more stages")
    if messages != "exact" and streams:
        raise UserError(
            f"messages={messages!r} with engine='streams', whose messages stay on one GPU: leave it out, or use "
            "engine='processes' or engine='simulate'"
        )
    return messages  # type: ignore[return-value]


def sent_bytes(size: float, messages: Messages) -> float:
    """The bytes of a message for `size` bytes of float32 values; with int8 at most, where rows are shortest.

    >>> [sent_bytes(1024, messages) for messages in ("exact", "bf16", "int8")]
    [1024, 512.0, 272.0]
    """
    if messages == "exact":
        return size
    return size / 2 if messages == "bf16" else size / 4 + size / 4 / LEAST_ROW * SCALE_BYTES


class Compression:
    """Encodes what one stage sends. `residuals` are those of the error feedback, by place in the message."""

    def __init__(self, messages: Messages = "exact") -> None:
        self.messages = messages
        self.residuals: dict[int, Tensor] = {}

    def activations(self, output: Any) -> Any:
        """The output of a forward, to be sent."""
        if self.messages == "exact":
            return output
        return pytree.tree_map_only(Tensor, lambda tensor: encoded(tensor, self.messages), output)

    def gradients(self, gradients: Sequence[Tensor | None] | None) -> Any:
        """The gradients of a backward, to be sent."""
        if self.messages == "exact" or gradients is None:
            return gradients
        return [None if each is None else self._gradient(place, each) for place, each in enumerate(gradients)]

    def _gradient(self, place: int, gradient: Tensor) -> Any:
        if self.messages != "int8" or not gradient.is_floating_point() or not gradient.numel():
            return encoded(gradient, self.messages)
        wanted = gradient if gradient.dtype == torch.float64 else gradient.float()
        left = self.residuals.get(place)
        if left is not None and left.shape == wanted.shape:
            both = wanted + left
            wanted = torch.where(both.isfinite(), both, wanted)
        sent = encoded(wanted, "int8")
        sent["dtype"] = gradient.dtype
        rest = wanted - decoded(sent).to(wanted.dtype)  # also what its own type has rounded
        self.residuals[place] = rest.nan_to_num_(0.0, 0.0, 0.0)  # a batch that is not finite leaves none
        return sent

    def received(self, content: Any) -> Any:
        """A message of a neighbour that compresses in the same way, with tensors as they were."""
        if self.messages == "exact":
            return content
        return pytree.tree_map(lambda leaf: decoded(leaf) if _is_encoded(leaf) else leaf, content, is_leaf=_is_encoded)

    def save(self) -> dict[str, Any]:
        return {"messages": self.messages, "residuals": [[place, left] for place, left in self.residuals.items()]}

    def load(self, saved: dict[str, Any] | None, device: torch.device, *, drained: bool) -> None:
        """Continue with the residuals that were saved; other messages start without."""
        before = saved["messages"] if saved else "exact"
        if before != self.messages:
            saved = None
        if before != self.messages and not drained:
            raise UserError(
                f"this state has messages={before!r} in flight, this pipeline messages={self.messages!r}: make the "
                "pipeline with the same, or drain() before saving"
            )
        self.residuals = {place: left.to(device) for place, left in saved["residuals"]} if saved else {}


def encoded(tensor: Tensor, messages: Messages) -> Any:
    """A tensor as it is sent: a dict of its codes, or itself where nothing is saved."""
    if messages == "exact" or not tensor.is_floating_point() or not tensor.numel():
        return tensor
    scales = None
    if messages == "bf16":
        if tensor.element_size() <= 2:
            return tensor
        codes = tensor.detach().to(torch.bfloat16)
    else:
        codes, scales = _rounded(tensor.detach())
    return {
        "encoding": messages,
        "codes": codes,
        "scales": scales,
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
    }


def decoded(sent: dict[str, Any]) -> Tensor:
    """The tensor again, a leaf.

    >>> decoded(encoded(torch.tensor([[0.5, -1.27]]), "int8")).tolist() == torch.tensor([[0.5, -1.27]]).tolist()
    True
    """
    codes, scales = sent["codes"], sent["scales"]
    values = codes if scales is None else _restored(codes, scales, sent["dtype"])
    return values.to(sent["dtype"]).requires_grad_(sent["requires_grad"])


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 in the memory layout of the tensor, and the scale of each row."""
    values = tensor if tensor.dtype == torch.float64 else tensor.float()
    largest = values.abs().amax(dim=row_dimensions(values.shape), keepdim=True)
    scales = largest / LEVELS
    short = largest > (LEVELS + 0.5) * scales  # a quotient of subnormal numbers, rounded down too far
    scales = torch.where(short, scales.nextafter(torch.full_like(scales, torch.inf)), scales)
    codes = torch.where(scales > 0, values / scales, 0.0).round_().nan_to_num_(0.0, 0.0, 0.0)
    return codes.clamp_(-LEVELS, LEVELS).to(torch.int8), scales


def _restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that are finite in this dtype; NaN in rows that were not finite."""
    most = torch.finfo(dtype).max  # which a rounded scale or a residual can exceed
    return (codes.to(scales.dtype) * scales).clamp_(-most, most)


def row_dimensions(shape: Sequence[int]) -> list[int]:
    """The dimensions of a row.

    >>> row_dimensions((8, 64, 256)), row_dimensions((8, 512, 8, 8)), row_dimensions((8, 10))
    ([2], [2, 3], [1])
    """
    first = max(len(shape) - 1, 0)
    elements = shape[first] if shape else 1
    while first > 1 and elements < LEAST_ROW:
        first -= 1
        elements *= shape[first]
    return list(range(first, len(shape)))


def _is_encoded(leaf: Any) -> bool:
    return isinstance(leaf, dict) and leaf.keys() == KEYS
