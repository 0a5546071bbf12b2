"""The safetensors format: a header with the position of each tensor's bytes, then the bytes.

    8 bytes header length | header (JSON) | tensor | tensor ...

Written here rather than by the safetensors package, so that bytes are hashed while they are written, a full disk raises
OSError, and bytes are used only after they were checked in memory. Each reads the other's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from offbeat.errors import first_line

ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
METADATA = "__metadata__"
HEADER_LIMIT = 100_000_000  # the safetensors package's own


@dataclass(frozen=True)
class StoredTensor:
    """The dtype and shape of one tensor, and its first and last byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with these dtypes and shapes, in this order."""
    described: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * ITEM_SIZE[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(raw: bytes | bytearray | memoryview, size: int) -> dict[str, StoredTensor]:
    """The tensors of a file of `size` bytes, of which `raw` are the first; ValueError where they do not fit."""
    length = int.from_bytes(raw[:8], "little")
    if size < 8 or not 0 < length <= min(size - 8, HEADER_LIMIT) or len(raw) < 8 + length:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    try:
        described = json.loads(bytes(raw[8 : 8 + length]))
        described.pop(METADATA, None)
        found = {name: _stored(facts, 8 + length) for name, facts in described.items()}
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a safetensors header ({first_line(error)})") from error
    position = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start != position:
            raise ValueError(f"{name} does not start where the tensor before it ends")
        position = stored.end
    if position != size:
        raise ValueError(f"its tensors end at byte {position}, the file at byte {size}")
    return found


def _stored(facts: Mapping[str, Any], base: int) -> StoredTensor:
    dtype, shape, (start, end) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
    valid = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    if not valid or dtype not in ITEM_SIZE or end - start != prod(shape) * ITEM_SIZE[dtype]:
        raise ValueError(f"{dtype} of shape {shape} does not fit the bytes {start} to {end}")
    return StoredTensor(dtype, shape, base + start, base + end)
