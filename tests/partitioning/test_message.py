"""Values that cross a cut: their encoded form, which checkpoints store, and what the next stage makes of it."""

from __future__ import annotations

import torch
from trees import same

from offbeat.core.links import Message
from offbeat.core.links.local import LocalLink
from offbeat.core.links.wire import pack, unpack
from offbeat.partitioning.message import decode, encode

CPU = torch.device("cpu")


def values() -> tuple:
    x, meta = torch.arange(60.0).reshape(5, 12), torch.device("meta")
    nested = {"one": [x, 2.5], "expanded": x[:, :1].expand(5, 3)}
    return x, x[:, 3:5], nested, torch.float16, meta, torch.Size([2, 3]), "layout 0 1", None, ("layout", 7)


def test_the_form_that_checkpoints_store_with_batches_in_flight_stays():
    x, sliced, *_ = given = values()
    sent = encode(given)
    assert sent[0] is x
    assert sent[1][0] == "layout 3 12 1"
    assert sent[1][1] is sliced
    assert sent[2]["one"] == ["=0", 2.5]
    assert sent[2]["expanded"][0] == "layout 0 12 0"
    assert sent[3:] == ("dtype float16", "device", "size 2 3", "text layout 0 1", None, ("text layout", 7))


def test_every_link_carries_values_that_the_next_stage_restores():
    given = values()
    link = LocalLink(1)
    link.send(Message(0, encode(given)))
    for received in (link.receive(), unpack(pack(Message(0, encode(given))))):
        restored = decode(received.content, CPU)
        assert same(restored, (*given[:4], CPU, *given[5:]))
        assert restored[2]["one"][0] is restored[0]
        assert restored[1].data_ptr() % 64 == given[1].data_ptr() % 64


def test_gradients_pass_unchanged_through_a_restored_layout():
    x = torch.arange(60.0).reshape(5, 12)
    leaf = x[:, 3:5].contiguous().requires_grad_()
    restored = decode((encode(x[:, 3:5])[0], leaf), CPU)
    weights = torch.randn(5, 2)
    (restored * weights).sum().backward()
    assert torch.equal(leaf.grad, weights)
