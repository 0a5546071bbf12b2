"""The safetensors format: a header that says where each tensor's bytes are, then the bytes.

    8 bytes header length | header (JSON) | tensor | tensor ...

Written here rather than by the safetensors package, so that bytes are hashed as they go, a full disk is an OSError, and
what is read was checked in memory. Both read each other's files.
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
class Entry:
    """One tensor: its type, shape and place in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file with these types and shapes, in this order."""
    described: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * ITEM_SIZE[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def entries(raw: bytes | bytearray | memoryview, size: int) -> dict[str, Entry]:
    """The tensors of a file of that size which begins with these bytes; ValueError where the two do not agree."""
    length = int.from_bytes(raw[:8], "little")
    if size < 8 or not 0 < length <= min(size - 8, HEADER_LIMIT) or len(raw) < 8 + length:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    try:
        described = json.loads(bytes(raw[8 : 8 + length]))
        described.pop(METADATA, None)
        found = {name: _entry(facts, 8 + length) for name, facts in described.items()}
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a header of safetensors ({first_line(error)})") from error
    position = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ValueError(f"{name} does not begin where the one before it ends")
        position = entry.end
    if position != size:
        raise ValueError(f"its tensors end at {position}, the file at {size}")
    return found


def _entry(facts: Mapping[str, Any], base: int) -> Entry:
    dtype, shape, (start, end) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    if not whole or dtype not in ITEM_SIZE or end - start != prod(shape) * ITEM_SIZE[dtype]:
        raise ValueError(f"{dtype} of shape {shape} does not fit {start} to {end}")
    return Entry(dtype, shape, base + start, base + end)
