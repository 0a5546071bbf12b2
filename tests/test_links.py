"""Messages: whatever a stage may send arrives with the same bits in the same layout, everywhere alike."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UserError
from offbeat.links import Message
from offbeat.links.local import LocalLink
from offbeat.links.wire import ALIGNMENT, DTYPES, MalformedMessage, pack, unpack


def layouts() -> dict[str, torch.Tensor]:
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "contiguous": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "permuted": x.permute(3, 0, 2, 1),
        "sliced": x[:, 1:, ::2],
        "expanded": x[:, :1, :1].expand(2, 6, 4, 5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "column": torch.ones(4, 1),
    }


@pytest.mark.parametrize("name", layouts())
def test_dense_layouts_keep_their_strides_and_all_values_their_bits(name):
    tensor = layouts()[name]
    received = unpack(pack(Message(7, tensor))).content
    assert torch.equal(received, tensor)
    assert received.dtype == tensor.dtype
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert received.stride() == (tensor if dense else tensor.contiguous()).stride()
    assert received.data_ptr() % ALIGNMENT == 0 or not received.numel()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_type_of_number_travels(dtype):
    tensor = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    received = unpack(pack(Message(0, tensor))).content
    assert received.dtype == dtype
    assert torch.equal(received, tensor)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=5),
    st.integers(0, 5).map(lambda n: torch.arange(n)),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=8,
)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(content=trees, t=st.integers(-1, 2**40), kind=st.sampled_from(["batch", "epoch"]))
def test_every_tree_of_plain_containers_travels(content, t, kind):
    received = unpack(pack(Message(t, content, kind)))
    assert (received.t, received.kind) == (t, kind)
    assert same(content, received.content)


@given(data=st.data())
def test_damaged_messages_are_refused_or_harmless(data):
    buffer = pack(Message(1, {"a": torch.ones(3, 4), "b": (torch.zeros(2), None)}))
    damaged = buffer[: data.draw(st.integers(0, buffer.numel()))].clone()
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged.numel():
            damaged[data.draw(st.integers(0, damaged.numel() - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        unpack(damaged)


def test_what_cannot_travel_is_refused_with_a_hint():
    with pytest.raises(UserError, match="a set cannot cross stages"):
        pack(Message(0, {1, 2}))
    with pytest.raises(UserError, match="dense, plain type"):
        pack(Message(0, torch.ones(2, 2).to_sparse()))


def test_a_link_holds_its_own_copy_and_its_bound():
    link = LocalLink(2)
    tensor = torch.ones(3)
    link.send(Message(0, tensor))
    tensor.zero_()
    assert link.ready()
    assert torch.equal(link.peek().content, torch.ones(3))
    assert torch.equal(link.receive().content, torch.ones(3))
    assert not link.ready()
    link.send(Message(1))
    link.send(Message(2))
    with pytest.raises(AssertionError):
        link.send(Message(3))
