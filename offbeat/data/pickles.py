"""Reading the pickles of CIFAR's python format without running code that a pickle may name.

A pickle can name any function and call it. The published files name three of numpy's, to build an array of bytes; these
names resolve to the replacements below, which can build nothing else, and every other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from offbeat.errors import UserError


def load_plain(raw: bytes, *, where: str) -> dict[str, Any]:
    """The pickled dictionary of lists, numbers, strings and byte arrays, its keys as str.

    Written by Python 2 or 3 and any numpy; `where` names the file in errors.

    >>> load_plain(pickle.dumps({b"labels": [3, 1]}), where="data_batch_1")
    {'labels': [3, 1]}
    """
    try:
        # latin1 keeps the bytes of Python 2's strings one to one, array contents among them.
        content = _Plain(io.BytesIO(raw), where).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{where} ({len(raw)} bytes) is not a readable pickle: fetch it again ({error!r})") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} holds a {type(content).__name__}, expected a dictionary: fetch it again")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


class _Plain(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="latin1")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(f"{self.where} names {module}.{name}, which is not loaded: fetch the files of CIFAR again")
        return _ALLOWED[module, name]


def _array(kind: object, shape: object, typecode: object) -> np.ndarray:
    """For numpy's _reconstruct: an empty array, which its own __setstate__ then fills."""
    return np.empty(0, dtype=np.uint8)


def _array_of_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C", *_: object) -> np.ndarray:
    """For numpy's _frombuffer (pickle protocol 5)."""
    if dtype != np.uint8:
        raise ValueError(f"array of {dtype} elements, expected unsigned bytes")
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape, order=order)


def _byte_dtype(name: str | bytes, *_: object) -> np.dtype:
    """For numpy.dtype: unsigned bytes, the only element type of CIFAR; in particular no objects."""
    if name not in ("u1", "|u1", b"u1"):
        raise ValueError(f"array of {name!r} elements, expected unsigned bytes")
    return np.dtype(np.uint8)


def _latin1(text: str, encoding: str) -> bytes:
    """For _codecs.encode, with which Python 3 writes bytes under protocol 2."""
    return text.encode("latin1")


class _ArrayKind:
    """For numpy.ndarray, which is only passed to _reconstruct, never called."""


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _ArrayKind,
    ("numpy", "dtype"): _byte_dtype,
    ("numpy.core.multiarray", "_reconstruct"): _array,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _array,  # numpy 2
    ("numpy.core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,
    ("_codecs", "encode"): _latin1,
}
