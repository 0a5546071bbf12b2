"""The form of a message: one flat buffer with a checked header, raw tensor bytes behind it.

    8 bytes length | 8 bytes header length | header (JSON) | padding | tensor | padding | tensor ...

Every link packs and unpacks this way, also within a process, because memory layout is part of the numbers: BatchNorm on
channels-last or convolution on a transposed input give other bits. Dense layouts keep their strides, all others (such
as expanded gradients) become contiguous, and each tensor starts on a 64-byte boundary as torch allocates them.
The header is data, never code: a stranger's bytes can at worst be refused.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import UserError
from offbeat.links import Message

ALIGNMENT = 64
PREFIX = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class MalformedMessage(RuntimeError):
    """Bytes that no link of ours sent."""


def pack(message: Message) -> Tensor:
    """The message as one uint8 tensor."""
    tensors: list[Tensor] = []
    header: dict[str, Any] = {"t": message.t, "kind": message.kind, "tree": _skeleton(message.content, tensors)}
    entries: list[tuple[str, list[int], list[int], int]] = []
    end = 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + tensor.numel() * tensor.element_size()
        entries.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _strides(tensor), start))
    header["tensors"] = entries
    text = json.dumps(header, separators=(",", ":")).encode()
    base = -(-(PREFIX + len(text)) // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(base + end, dtype=torch.uint8)
    buffer[:PREFIX].view(torch.int64).copy_(torch.tensor([base + end, len(text)]))
    buffer[PREFIX : PREFIX + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for tensor, (dtype, shape, strides, start) in zip(tensors, entries, strict=True):
        if tensor.numel():
            _view(buffer, dtype, shape, strides, base + start).copy_(tensor)
    return buffer


def size(buffer: Tensor) -> int:
    """Length of the message whose first bytes are in the buffer."""
    return int(buffer[:8].view(torch.int64))


def unpack(buffer: Tensor) -> Message:
    """The message in a buffer; its tensors are views of it."""
    try:
        total, length = buffer[:PREFIX].view(torch.int64).tolist()
        if total != buffer.numel() or not 0 < length <= total - PREFIX:
            raise ValueError(f"{total} bytes announced, {buffer.numel()} there")
        header = json.loads(bytes(buffer[PREFIX : PREFIX + length].numpy()))
        base = -(-(PREFIX + length) // ALIGNMENT) * ALIGNMENT
        tensors = [_view(buffer, dtype, shape, strides, base + start)
                   for dtype, shape, strides, start in header["tensors"]]  # fmt: skip
        return Message(header["t"], _content(header["tree"], tensors), header["kind"])
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise MalformedMessage(f"malformed message: {error}") from error


def copied(message: Message) -> Message:
    """The message as the far end of a link sees it, without leaving the tensors' device."""
    tensors: list[Tensor] = []
    tree = _skeleton(message.content, tensors)
    copies = [torch.empty_strided(t.shape, _strides(t), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]
    return Message(message.t, _content(tree, copies), message.kind)


def _view(buffer: Tensor, dtype: str, shape: list[int], strides: list[int], start: int) -> Tensor:
    kind = DTYPES[dtype]
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=kind)
    flat = buffer[start : start + count * kind.itemsize].view(kind)
    if flat.numel() != count or 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) != count:
        raise ValueError(f"a tensor of shape {shape} and strides {strides} does not fit its bytes")
    return flat.as_strided(shape, strides)


def _strides(tensor: Tensor) -> list[int]:
    """The tensor's own strides where they are dense, otherwise those of a contiguous one."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return list(tensor.stride())
    strides, step = [], 1
    for length in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, length)
    return strides[::-1]


def _skeleton(content: Any, tensors: list[Tensor]) -> Any:
    """The content as JSON: containers as tagged lists, a tensor as its number."""
    if isinstance(content, Tensor):
        if str(content.dtype).removeprefix("torch.") not in DTYPES or content.layout is not torch.strided:
            raise UserError(f"a {content.dtype} {content.layout} tensor cannot cross stages: use a dense, plain type")
        tensors.append(content.detach())
        return ["tensor", len(tensors) - 1]
    if content is None or isinstance(content, (bool, int, float, str)):
        return content
    if type(content) in (list, tuple):
        return [type(content).__name__, [_skeleton(item, tensors) for item in content]]
    if type(content) in (dict, OrderedDict) and all(isinstance(key, (str, int)) for key in content):
        return ["dict", [[key, _skeleton(value, tensors)] for key, value in content.items()]]
    raise UserError(
        f"a {type(content).__name__} cannot cross stages: return tensors, or tuples, lists and dicts of them"
    )


def _content(skeleton: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(skeleton, list):
        return skeleton
    tag, value = skeleton
    if tag == "tensor":
        return tensors[value]
    if tag == "dict":
        return {key: _content(item, tensors) for key, item in value}
    items = [_content(item, tensors) for item in value]
    return tuple(items) if tag == "tuple" else items
