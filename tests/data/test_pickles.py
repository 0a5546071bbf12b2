"""The restricted unpickler: every honest CIFAR pickle loads, nothing else is ever called."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

import numpy as np
import pytest

from offbeat.data.pickles import load_plain
from offbeat.errors import UserError

DATA = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)


def written_by_python_2(data: np.ndarray, labels: list[int], *, core: str = "numpy.core") -> bytes:
    """The opcodes of the published files: protocol 2, Python 2 strings, numpy 1."""
    integer = lambda number: b"J" + struct.pack("<i", number)  # noqa: E731
    text = lambda string: b"U" + bytes([len(string)]) + string.encode()  # noqa: E731
    array = f"c{core}.multiarray\n_reconstruct\ncnumpy\nndarray\n".encode() + b"K\x00\x85" + text("b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNN" + integer(-1) * 2 + b"K\x00tb"
    )
    shape = integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
    content = b"T" + struct.pack("<i", data.nbytes) + data.tobytes()
    array += b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + text("batch_label") + text("fake") + text("labels") + numbers + text("data") + array + b"u."


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_a_published_pickle_loads(core: str) -> None:
    content = load_plain(written_by_python_2(DATA, [1, 2, 3, 4, 5], core=core), where="data_batch_1")
    assert np.array_equal(content["data"], DATA)
    assert content["labels"] == [1, 2, 3, 4, 5]
    assert content["batch_label"] == "fake"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("key", ["data", b"data"])
def test_a_pickle_written_again_by_python_3_loads(protocol: int, key: str | bytes) -> None:
    for array in (DATA, np.asfortranarray(DATA)):
        content = load_plain(pickle.dumps({key: array}, protocol=protocol), where="x")
        assert np.array_equal(content["data"], DATA)


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("call", [(os.mkdir, "bad"), (eval, "1"), (np.load, "x"), (getattr, 1, "real"), (np.ones, 3)])
def test_a_malicious_pickle_is_refused_and_not_run(
    protocol: int, call: tuple[Any, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = pickle.dumps({"data": Calls(*call)}, protocol=protocol)
    with pytest.raises(UserError, match=r"x names .*, which is not loaded: fetch"):
        load_plain(raw, where="x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.zeros(3), np.zeros(2, dtype="V4"), np.array(["a"])])
@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_of_anything_but_bytes_is_refused(array: np.ndarray, protocol: int) -> None:
    with pytest.raises(UserError):
        load_plain(pickle.dumps({"data": array}, protocol=protocol), where="x")


@pytest.mark.parametrize("raw", [b"", b"no pickle", pickle.dumps({"a": DATA})[:-20], b"\x80\x02cos\nsystem\n"])
def test_a_damaged_pickle_is_a_user_error_in_one_line(raw: bytes) -> None:
    with pytest.raises(UserError, match=r"^x ") as caught:
        load_plain(raw, where="x")
    assert "\n" not in str(caught.value)


def test_a_pickle_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="holds a list"):
        load_plain(pickle.dumps([1]), where="x")
