"""The form of a message: one flat buffer with a checked header, raw tensor bytes behind it.

    length | header length | CRC of the header | sum of all behind this | header (JSON) | tensor | tensor ...
    (8 bytes each, zeros between the parts)

Links within a process copy tensors into the same layout (`copied`), because layout is part of the numbers: BatchNorm on
channels-last or convolution on a transposed input give other bits. Dense layouts keep their strides, all others (such
as expanded gradients) become contiguous, and each tensor starts on a 64-byte boundary as torch allocates them.
The header is data, never code, and nothing in it is believed: whatever is not the very message that was packed (a
damaged byte, a length beyond the limits, a shape that does not fit its bytes) is refused before memory is taken for it.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from math import prod
from typing import Any

import torch
from torch import Tensor

from offbeat.core.links import Message
from offbeat.errors import UserError, first_line

ALIGNMENT = 64
WORD = 8
COLUMNS = 64  # of the table that is summed
PREFIX = 4 * WORD
LIMIT = 1 << 34  # bytes of a message
HEADER_LIMIT = 1 << 26
DIMENSIONS = 64  # as many as torch can iterate over
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class MalformedMessage(UserError):
    """Bytes that no link of ours sent."""


def pack(message: Message) -> Tensor:
    """The message as one uint8 tensor."""
    tensors: list[Tensor] = []
    header: dict[str, Any] = {"t": message.t, "kind": message.kind, "tree": _skeleton(message.content, tensors)}
    entries, end = _places(tensors)
    header["tensors"] = entries
    text = json.dumps(header, separators=(",", ":")).encode()
    base = _up(PREFIX + len(text), ALIGNMENT)
    total = base + _up(end, WORD)
    if total > LIMIT or len(text) > HEADER_LIMIT:
        raise UserError(f"a message of {total:,} bytes ({len(text):,} of them header) is too long: use smaller batches")
    buffer = torch.empty(total, dtype=torch.uint8)
    buffer[PREFIX : PREFIX + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    written = PREFIX + len(text)
    for tensor, (dtype, shape, strides, start) in zip(tensors, entries, strict=True):
        buffer[written : base + start].zero_()
        written = base + start + tensor.numel() * tensor.element_size()
        if tensor.numel():
            buffer[base + start : written].view(DTYPES[dtype]).as_strided(shape, strides).copy_(tensor)
    buffer[written:].zero_()
    prefix = torch.tensor([total, len(text), zlib.crc32(text), _sum(buffer)])
    buffer[:PREFIX].view(torch.int64).copy_(prefix)
    return buffer


def parted(message: Message, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The message as a header and one flat buffer on that device, where it holds tensors, which no sum protects."""
    tensors: list[Tensor] = []
    tree = _skeleton(message.content, tensors)
    entries, end = _places(tensors)
    text = json.dumps({"tree": tree, "tensors": entries, "bytes": end}, separators=(",", ":"))
    header = pack(Message(message.t, text, message.kind))
    if not end:
        return header, None
    payload = torch.empty(end, dtype=torch.uint8, device=device)
    for tensor, (dtype, shape, strides, start) in zip(tensors, entries, strict=True):
        if tensor.numel():
            part = payload[start : start + tensor.numel() * tensor.element_size()]
            part.view(DTYPES[dtype]).as_strided(shape, strides).copy_(tensor)
    return header, payload


def described(header: Tensor) -> int:
    """Bytes of the payload that belongs to a header."""
    try:
        count = json.loads(unpack(header).content)["bytes"]
        if type(count) is not int or not 0 <= count <= LIMIT:
            raise ValueError(f"a payload of {count} bytes")
    except (ValueError, LookupError, TypeError) as error:
        raise MalformedMessage(f"malformed message: {first_line(error)}") from error
    return count


def whole(header: Tensor, payload: Tensor | None) -> Message:
    """The message of a header and its payload; its tensors are views of that."""
    message = unpack(header)
    try:
        told = json.loads(message.content)
        flat = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        return Message(message.t, _content(told["tree"], _tensors(flat, 0, told["tensors"])), message.kind)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise MalformedMessage(f"malformed message: {first_line(error)}") from error


def _places(tensors: list[Tensor]) -> tuple[list[tuple[str, list[int], list[int], int]], int]:
    """Type, shape, strides and place of each tensor behind each other, and the end of the last."""
    entries: list[tuple[str, list[int], list[int], int]] = []
    end = 0
    for tensor in tensors:
        start = _up(end, ALIGNMENT)
        end = start + tensor.numel() * tensor.element_size()
        entries.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _strides(tensor), start))
    return entries, end


def size(buffer: Tensor) -> int:
    """Length of the message whose first bytes are in the buffer."""
    total = int(buffer[:WORD].view(torch.int64)) if buffer.numel() >= WORD else 0
    if not PREFIX < total <= LIMIT:
        raise MalformedMessage(f"malformed message: {total} bytes announced, from {PREFIX + 1} to {LIMIT} are allowed")
    return total


def unpack(buffer: Tensor) -> Message:
    """The message in a buffer; its tensors are views of it."""
    try:
        if size(buffer) != buffer.numel() or buffer.numel() % WORD:
            raise ValueError(f"{size(buffer)} bytes announced, {buffer.numel()} there")
        _, length, checksum, whole = buffer[:PREFIX].view(torch.int64).tolist()
        if not 0 < length <= min(buffer.numel() - PREFIX, HEADER_LIMIT):
            raise ValueError(f"a header of {length} bytes in a message of {buffer.numel()}")
        text = bytes(buffer[PREFIX : PREFIX + length].numpy())
        if zlib.crc32(text) != checksum or _sum(buffer) != whole:
            raise ValueError("its bytes are not those that were sent")
        header = json.loads(text)
        if type(header["t"]) is not int or type(header["kind"]) is not str:
            raise ValueError("no batch index or no kind")
        tensors = _tensors(buffer, _up(PREFIX + length, ALIGNMENT), header["tensors"])
        return Message(header["t"], _content(header["tree"], tensors), header["kind"])
    except MalformedMessage:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise MalformedMessage(f"malformed message: {first_line(error)}") from error


def copied(message: Message) -> Message:
    """The message as the far end of a link sees it, without leaving the tensors' device."""
    tensors: list[Tensor] = []
    tree = _skeleton(message.content, tensors)
    return Message(message.t, _content(tree, [copied_tensor(tensor) for tensor in tensors]), message.kind)


def copied_tensor(tensor: Tensor) -> Tensor:
    """A tensor as the far end of a link sees it."""
    return torch.empty_strided(tensor.shape, _strides(tensor), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def _sum(buffer: Tensor) -> int:
    """A sum that no damaged, lost or exchanged byte behind the prefix leaves as it was, at a fraction of a copy's time.

    The words form a table; the CRC is that of the sums of its rows and columns, and of the rest. (A CRC of it all would
    take longer than some stages.)
    """
    words = buffer[PREFIX:].view(torch.int64)
    rest = words.numel() % COLUMNS
    table = words[: words.numel() - rest].view(-1, COLUMNS)
    check = zlib.crc32(words[words.numel() - rest :].numpy().data)
    for sums in (table.sum(0), table.sum(1)) if len(table) else ():
        check = zlib.crc32(sums.numpy().data, check)
    return check


def _tensors(buffer: Tensor, base: int, entries: list[Any]) -> list[Tensor]:
    """Views of the payload: in order, apart from each other, of dense layouts."""
    tensors, end = [], base
    for dtype, shape, strides, start in entries:
        kind = DTYPES[dtype]
        whole = all(type(number) is int and 0 <= number <= LIMIT for number in (*shape, *strides, start))
        if not whole or len(shape) > DIMENSIONS:
            raise ValueError(f"shape {shape}, strides {strides}, start {start}")
        count = prod(shape)
        begin, before = base + start, end
        end = begin + count * kind.itemsize
        if begin < before or start % ALIGNMENT or end > buffer.numel():
            raise ValueError(f"a tensor of {count} elements from {begin} to {end} of {buffer.numel()} bytes")
        if not count:
            tensors.append(torch.empty(shape, dtype=kind))
            continue
        if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) != count:
            raise ValueError(f"a tensor of shape {shape} and strides {strides} does not fit its bytes")
        view = buffer[begin:end].view(kind).as_strided(shape, strides)
        if not torch.ops.aten.is_non_overlapping_and_dense(view):
            raise ValueError(f"a tensor of shape {shape} and strides {strides} overlaps itself")
        tensors.append(view)
    return tensors


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
    if skeleton is None or isinstance(skeleton, bool | int | float | str):
        return skeleton
    tag, value = skeleton
    if tag == "tensor" and type(value) is int and 0 <= value < len(tensors):
        return tensors[value]
    if tag == "dict" and isinstance(value, list) and all(isinstance(key, str | int) for key, _ in value):
        return {key: _content(item, tensors) for key, item in value}
    if tag in ("list", "tuple") and isinstance(value, list):
        items = [_content(item, tensors) for item in value]
        return tuple(items) if tag == "tuple" else items
    raise ValueError(f"a {str(tag)[:20]} in its content")
