"""The format of a message: one flat buffer with a checked header, followed by the bytes of its tensors.

    length | header length | CRC of the header | checksum of all that follows | header (JSON) | tensor | tensor ...
    (8 bytes each; zeros between the parts)

The header holds the batch index, the kind and the content, as core/codec.py encodes it, with the dtype, shape, strides
and position of each tensor, and whether it requires gradients: the receiver computes those gradients and no others.
Between devices the tensors are in a buffer apart (`pack_apart`), on the device.

Tensors arrive dense (core/layout.py): dense layouts keep their strides, all others (such as expanded gradients) become
contiguous, and each tensor starts on a 64-byte boundary. Links within a process copy tensors into the same layouts
(`copied`), so that engines agree bit for bit.
The header is data, never code, and nothing in it is trusted: what differs from the message that was packed (a damaged
byte, a length beyond the limits, a shape that does not fit its bytes) is refused before memory is allocated for it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.core import codec
from offbeat.core.layout import ALIGNMENT, dense_copy, dense_strides, is_dense
from offbeat.core.links import Message
from offbeat.errors import UserError, first_line

WORD = 8
COLUMNS = 64  # of the table that the checksum adds up
PREFIX = 4 * WORD
LIMIT = 1 << 34  # bytes of a message
HEADER_LIMIT = 1 << 26
MAX_DIMENSIONS = 64  # of a tensor in torch
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Place = tuple[str, tuple[int, ...], tuple[int, ...], int]  # dtype, shape and strides of a tensor, its first byte


class MalformedMessage(UserError):
    """Bytes that are not a message as `pack` returns it."""


class Header(NamedTuple):
    """The checked header of a message, and where its payload starts in the buffer."""

    t: int
    kind: str
    tree: Any
    tensors: list[Any]
    apart: int | None  # bytes of the payload, where it is in a buffer apart
    base: int


# ---- packing


def pack(message: Message) -> Tensor:
    """The message as one uint8 tensor on the CPU."""
    return _packed(*_take_apart(message))


def pack_apart(message: Message, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The message as a header on the CPU and its tensors in one buffer on a device; no checksum protects these.

    Where no tensor has any bytes there is no second buffer.
    """
    header, tensors, end = _take_apart(message)
    payload = torch.empty(end, dtype=torch.uint8, device=device) if end else None
    if payload is not None:
        _fill(payload, tensors, header["tensors"])
    return _packed({**header, "apart": end}), payload


def copied(message: Message) -> Message:
    """The message as the other end of a link receives it, its tensors on their own devices."""
    tensors, tree = _encoded(message.content)

    def resolve(index: int, requires_grad: bool = False) -> Tensor:
        return dense_copy(tensors[index]).requires_grad_(requires_grad)

    return message._replace(content=codec.decode(tree, resolve))


def _take_apart(message: Message) -> tuple[dict[str, Any], list[Tensor], int]:
    """The header, the tensors, and the bytes that they take."""
    tensors, tree = _encoded(message.content)
    places: list[Place] = []
    end = 0
    for tensor in tensors:
        start = _up(end, ALIGNMENT)
        end = start + tensor.nbytes
        places.append((NAMES[tensor.dtype], tensor.shape, dense_strides(tensor), start))
    return {"t": message.t, "kind": message.kind, "tree": tree, "tensors": places}, tensors, end


def _encoded(content: Any) -> tuple[list[Tensor], Any]:
    tensors: list[Tensor] = []

    def refer(tensor: Tensor, path: codec.Path) -> list[Any]:
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
            what = f"a {tensor.dtype} {tensor.layout} tensor{codec.at(path)}"
            raise UserError(f"{what} cannot cross stages: use a dense tensor of one of the types {', '.join(DTYPES)}")
        tensors.append(tensor.detach())
        return [len(tensors) - 1, True] if tensor.requires_grad else [len(tensors) - 1]

    return tensors, codec.encode(content, refer, purpose="cross stages")


def _packed(header: dict[str, Any], tensors: list[Tensor] | None = None, end: int = 0) -> Tensor:
    """The buffer of a header and, where given, the tensors that it describes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    base = _up(PREFIX + len(text), ALIGNMENT)
    total = base + _up(end, WORD)
    if total > LIMIT or len(text) > HEADER_LIMIT:
        raise UserError(
            f"a message of {total:,} bytes ({len(text):,} of them header) is too long: at most {LIMIT:,} "
            f"({HEADER_LIMIT:,} of header) can be sent; use smaller batches"
        )
    head = struct.pack("<qqqq", total, len(text), zlib.crc32(text), 0) + text
    buffer = torch.empty(total, dtype=torch.uint8)
    buffer[:base] = torch.frombuffer(bytearray(head.ljust(base, b"\0")), dtype=torch.uint8)
    if tensors is not None:
        _fill(buffer[base:], tensors, header["tensors"])
    buffer[PREFIX - WORD : PREFIX].view(torch.int64).fill_(_checksum(buffer))
    return buffer


def _fill(payload: Tensor, tensors: list[Tensor], places: list[Place]) -> None:
    written = 0
    for tensor, (_, shape, strides, start) in zip(tensors, places, strict=True):
        if written < start:
            payload[written:start].zero_()
        written = start + tensor.nbytes
        if written > start:
            payload[start:written].view(tensor.dtype).as_strided(shape, strides).copy_(tensor)
    if written < len(payload):
        payload[written:].zero_()


def _up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def _checksum(buffer: Tensor) -> int:
    """A checksum that any damaged, lost or exchanged byte after the prefix changes, in a fraction of a copy's time.

    The words form a table; the result is the CRC of the sums of its rows and columns, and of the remaining words. (A
    CRC of all bytes would take longer than some stages.)
    """
    words = buffer[PREFIX:].view(torch.int64)
    rest = words.numel() % COLUMNS
    table = words[: words.numel() - rest].view(-1, COLUMNS)
    check = zlib.crc32(words[words.numel() - rest :].numpy().data)
    for sums in (table.sum(0), table.sum(1)) if len(table) else ():
        check = zlib.crc32(sums.numpy().data, check)
    return check


# ---- unpacking


@contextmanager
def _untrusted() -> Iterator[None]:
    """Around all that reads what came over the network: any error becomes a MalformedMessage in one line."""
    try:
        yield
    except MalformedMessage:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise MalformedMessage(f"malformed message: {first_line(error)}") from error


def size(buffer: Tensor) -> int:
    """Length of the message whose first bytes are in the buffer."""
    total = int(buffer[:WORD].view(torch.int64)) if buffer.numel() >= WORD else 0
    if not PREFIX < total <= LIMIT:
        raise MalformedMessage(f"malformed message: {total} bytes announced, from {PREFIX + 1} to {LIMIT} are allowed")
    return total


def read_header(buffer: Tensor) -> Header:
    """The header of the message in a buffer, every byte of which was checked."""
    with _untrusted():
        return _header(buffer)


def _header(buffer: Tensor) -> Header:
    if buffer.numel() < PREFIX or buffer.numel() % WORD:
        raise ValueError(f"{buffer.numel()} bytes received")
    total, length, crc, checksum = buffer[:PREFIX].view(torch.int64).tolist()
    if total != buffer.numel():
        raise ValueError(f"{total} bytes announced, {buffer.numel()} received")
    if not 0 < length <= min(total - PREFIX, HEADER_LIMIT):
        raise ValueError(f"a header of {length} bytes in a message of {total}")
    text = bytes(buffer[PREFIX : PREFIX + length].numpy())
    if zlib.crc32(text) != crc or _checksum(buffer) != checksum:
        raise ValueError("its bytes are not those that were sent")
    header = json.loads(text)
    apart = header.get("apart")
    if type(header["t"]) is not int or type(header["kind"]) is not str:
        raise ValueError("no batch index or no kind")
    if "apart" in header and (type(apart) is not int or not 0 <= apart <= LIMIT):
        raise ValueError(f"a payload of {apart!r:.40} bytes")
    base = _up(PREFIX + length, ALIGNMENT)
    return Header(header["t"], header["kind"], header["tree"], header["tensors"], apart, base)


def unpack(buffer: Tensor, payload: Tensor | None = None) -> Message:
    """The message in a buffer, or in a header and the payload apart; its tensors are views of these."""
    with _untrusted():
        header = _header(buffer)
        if header.apart is None:
            tensors = _views(buffer, header.base, header.tensors)
        else:
            tensors = _views(buffer[:0] if payload is None else payload, 0, header.tensors)

        def resolve(index: Any, requires_grad: Any = False) -> Tensor:
            if type(index) is not int or not 0 <= index < len(tensors) or type(requires_grad) is not bool:
                raise ValueError(f"tensor {index!r:.40} of {len(tensors)}, requires_grad {requires_grad!r:.40}")
            return tensors[index].requires_grad_(requires_grad)

        return Message(header.t, codec.decode(header.tree, resolve), header.kind)


def _views(buffer: Tensor, base: int, places: list[Any]) -> list[Tensor]:
    """Views of the payload: in order, apart from each other, of dense layouts."""
    tensors, end = [], base
    for name, shape, strides, start in places:
        dtype = DTYPES[name]
        valid = all(type(number) is int and 0 <= number <= LIMIT for number in (*shape, *strides, start))
        if not valid or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"shape {shape}, strides {strides}, start {start}")
        count = prod(shape)
        begin, before = base + start, end
        end = begin + count * dtype.itemsize
        if begin < before or start % ALIGNMENT or end > buffer.numel():
            raise ValueError(f"a tensor of {count} elements from {begin} to {end} of {buffer.numel()} bytes")
        if not count:
            tensors.append(torch.empty(shape, dtype=dtype, device=buffer.device))
            continue
        if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) != count:
            raise ValueError(f"a tensor of shape {shape} and strides {strides} does not fit its bytes")
        view = buffer[begin:end].view(dtype).as_strided(shape, strides)
        if not is_dense(view):
            raise ValueError(f"a tensor of shape {shape} and strides {strides} overlaps itself")
        tensors.append(view)
    return tensors
