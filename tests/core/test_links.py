"""Messages: whatever a stage may send arrives with the same bits in the same layout, everywhere alike."""

from __future__ import annotations

import json
import random
import resource
import struct
import subprocess
import sys
import zlib
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from preloaded import PYTHON
from trees import nested_values, same

from offbeat.core.layout import ALIGNMENT
from offbeat.core.links import Message
from offbeat.core.links.distributed import REASON_LIMIT
from offbeat.core.links.local import LocalLink
from offbeat.core.links.wire import (
    DTYPES,
    LIMIT,
    PREFIX,
    MalformedMessage,
    _checksum,
    pack,
    pack_apart,
    read_header,
    size,
    unpack,
)
from offbeat.errors import UserError


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


@given(content=nested_values, t=st.integers(-1, 2**40), kind=st.sampled_from(["batch", "epoch"]))
def test_every_nested_value_arrives_alike_over_every_link(content, t, kind):
    message = Message(t, content, kind)
    link = LocalLink(1)
    link.send(message)
    for received in (unpack(pack(message)), unpack(*pack_apart(message, torch.device("cpu"))), link.receive()):
        assert (received.t, received.kind) == (t, kind)
        assert same(content, received.content)


def test_numbers_and_text_of_other_libraries_arrive_as_plain_ones_over_every_link():
    message = Message(0, [np.float64(0.5), np.float64("inf"), IntEnum("Colour", "RED").RED, np.str_("text")])
    link = LocalLink(1)
    link.send(message)
    for received in (unpack(pack(message)), link.receive()):
        assert same(received.content, [0.5, float("inf"), 1, "text"])


# ---- strangers


def test_every_link_marks_the_tensors_that_require_gradients_as_leaves():
    x = torch.ones(2, 3, requires_grad=True)
    message = Message(0, {"made": (2 * x).t(), "given": torch.ones(2), "index": torch.arange(3)})
    link = LocalLink(1)
    link.send(message)
    for received in (unpack(pack(message)), unpack(*pack_apart(message, torch.device("cpu"))), link.receive()):
        assert {name: tensor.requires_grad for name, tensor in received.content.items()} == {
            "made": True,
            "given": False,
            "index": False,
        }
        assert received.content["made"].is_leaf
        assert torch.equal(received.content["made"], 2 * x.t())


def samples() -> list[Message]:
    return [
        Message(1, {"a": torch.randn(3, 4), "b": (torch.zeros(2), None), 7: "text"}),
        Message(2**40, (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.arange(2))),
        Message(0, [1.5, True, [torch.empty(0, 4), torch.tensor(3, dtype=torch.bfloat16)]]),
        Message(-1, kind="close"),
        Message(3, torch.randn(700)),
    ]


def mutated(buffer: torch.Tensor, draw: random.Random) -> torch.Tensor:
    raw = bytearray(buffer.numpy().tobytes())
    kind = draw.choice(["flip", "flip", "flip low", "prefix", "cut", "extend", "zero", "remove", "insert", "swap"])
    at = draw.randrange(len(raw))
    if kind == "flip":
        for _ in range(draw.randrange(1, 5)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == "flip low":
        raw[draw.randrange(min(400, len(raw)))] ^= 1 << draw.randrange(8)
    elif kind == "prefix":
        word = 8 * draw.randrange(4)
        raw[word : word + 8] = draw.choice([draw.randbytes(8), bytes(8), b"\xff" * 8, (1 << 62).to_bytes(8, "little")])
    elif kind == "cut":
        raw = raw[:at]
    elif kind == "extend":
        raw += draw.randbytes(draw.choice([1, 8, 64]))
    elif kind == "zero":
        end = min(len(raw), at + 16)
        raw[at:end] = bytes(end - at)
    elif kind == "remove":
        del raw[at : at + draw.randrange(1, 9)]
    elif kind == "insert":
        raw[at:at] = draw.randbytes(draw.randrange(1, 9))
    else:
        other = draw.randrange(len(raw))
        raw[at], raw[other] = raw[other], raw[at]
    return torch.frombuffer(raw, dtype=torch.uint8).clone() if raw else torch.empty(0, dtype=torch.uint8)


def test_2000_mutated_messages_are_the_same_or_refused():
    draw = random.Random(7)
    refused = 0
    for turn in range(2000):
        message = samples()[turn % len(samples())]
        buffer = pack(message)
        damaged = mutated(buffer, draw)
        if torch.equal(buffer, damaged):
            received = unpack(damaged)
            assert (received.t, received.kind) == (message.t, message.kind)
            assert same(message.content, received.content)
            continue
        with pytest.raises(MalformedMessage, match=r"^malformed message: .+$") as raised:
            unpack(damaged)
        assert "\n" not in str(raised.value)
        refused += 1
    assert refused > 1800


def forged(header: object, payload: bytes = b"", *, text: bytes | None = None, total: int = -1) -> torch.Tensor:
    """A message of a stranger who knows the format and the sums."""
    text = json.dumps(header).encode() if text is None else text
    base = -(-(PREFIX + len(text)) // ALIGNMENT) * ALIGNMENT
    raw = bytearray(base + -(-len(payload) // 8) * 8)
    raw[PREFIX : PREFIX + len(text)] = text
    raw[base : base + len(payload)] = payload
    buffer = torch.frombuffer(raw, dtype=torch.uint8).clone()
    prefix = struct.pack("<qqqq", len(raw) if total == -1 else total, len(text), zlib.crc32(text), _checksum(buffer))
    buffer[:PREFIX] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    return buffer


def header(*tensors: object, tree: object = None, t: object = 1, kind: object = "batch") -> dict:
    return {"t": t, "kind": kind, "tree": tree, "tensors": list(tensors)}


def test_a_well_formed_forgery_is_a_message():
    buffer = forged(header(["float32", [2, 2], [1, 2], 0], tree=["tensor", 0]), struct.pack("<4f", 1, 2, 3, 4))
    assert unpack(buffer).content.tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    "given",
    [
        header(["float32", [1 << 33], [1], 0]),
        header(["float32", [1 << 62, 0], [1, 1], 0]),
        header(["float32", [1 << 70], [1], 0]),
        header(["float32", [-2, -2], [2, 1], 0]),
        header(["float32", [2, 3], [5, 0], 0]),
        header(["float32", [4], [1], -64]),
        header(["float32", [4], [1], 4]),
        header(["float32", [4], [1], 1 << 30]),
        header(["float32", [2], [1], 0], ["float32", [2], [1], 0]),
        header(["float32", [4.0], [1], 0]),
        header(["float32", [True], [1], 0]),
        header(["float32", [2, 2], [2], 0]),
        header(["float32", "44", [1], 0]),
        header(["float32", [1] * 70, [1] * 70, 0]),
        header(["object", [1], [1], 0]),
        header([["float32"], [1], [1], 0]),
        header(["float32", [1], [1]]),
        header(7),
        header(tree=["tensor", 0]),
        header(["float32", [1], [1], 0], tree=["tensor", -1]),
        header(["float32", [1], [1], 0], tree=["tensor", "0"]),
        header(tree=["dict", [[None, 1]]]),
        header(tree=["dict", [[[], 1]]]),
        header(tree=["dict", 5]),
        header(tree=["call", ["os.system"]]),
        header(tree=["list", "abc"]),
        header(tree={"a": 1}),
        header(tree=["dtype", "load"]),
        header(tree=["device", "moon"]),
        header(tree=["size", ["a"]]),
        header(tree=["float", "1e999"]),
        header(["float32", [1], [1], 0], tree=["tensor", 0, {"stride": [1 << 60]}]),
        header(["float32", [1], [1], 0], tree=["tensor", 0, 1]),
        header(["int64", [1], [1], 0], tree=["tensor", 0, True]),
        header(t="1"),
        header(t=None),
        header(t=1.0),
        header(kind=3),
        {"t": 1},
        [],
        None,
        7,
    ],
    ids=lambda given: str(given)[:60],
)
def test_headers_that_lie_with_the_right_sums_are_refused(given):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"^malformed message: .+$") as refused:
        unpack(forged(given, bytes(16)))
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff\xfe", b"{", b'{"t": 1' + b"0" * 5000 + b"}"], ids=len)
def test_headers_that_are_no_json_are_refused(text):
    with pytest.raises(MalformedMessage):
        unpack(forged(None, text=text))


@pytest.mark.parametrize("total", [0, -2, 32, (1 << 34) + 1, 1 << 62, -(1 << 63)])
def test_no_memory_is_taken_for_a_length_beyond_the_limits(total):
    with pytest.raises(MalformedMessage, match="bytes announced"):
        size(forged(header(), total=total))


def test_a_message_may_take_16_gib_and_no_more():
    assert size(forged(header(), total=1 << 34)) == LIMIT == 1 << 34


@pytest.mark.parametrize("count", [-1, (1 << 34) + 1, 1 << 62, 1.0, True, "7", None])
def test_no_memory_is_taken_for_a_payload_beyond_the_limits(count):
    with pytest.raises(MalformedMessage, match="a payload of"):
        read_header(forged(header() | {"apart": count}))


def test_too_long_a_message_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr("offbeat.core.links.wire.LIMIT", 1000)
    with pytest.raises(UserError, match="smaller batches"):
        pack(Message(0, torch.ones(1000)))


def test_too_long_a_header_is_refused_where_it_is_sent_and_received(monkeypatch):
    buffer = pack(Message(0, "x" * 1000))
    monkeypatch.setattr("offbeat.core.links.wire.HEADER_LIMIT", 1000)
    with pytest.raises(UserError, match="smaller batches"):
        pack(Message(0, "x" * 1000))
    with pytest.raises(MalformedMessage, match="a header of"):
        unpack(buffer)


STRANGER = """
import os, resource, sys
import torch
import torch.distributed as dist
from offbeat.errors import StageLost
from offbeat.core.links import Message
from offbeat.core.links.distributed import Receiver
from offbeat.core.links.wire import LIMIT, PREFIX, pack

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sound = pack(Message(1, torch.ones(3)))
announced = sound.clone()
announced[:8].view(torch.int64).fill_(1 << 62)
damaged = sound.clone()
damaged[-1] ^= 1
huge = sound.clone()
huge[:8].view(torch.int64).fill_(LIMIT + 1)
bad = [torch.zeros(5, dtype=torch.uint8), torch.randint(256, (500,), dtype=torch.uint8), announced, damaged, huge,
       torch.full((100,), 255, dtype=torch.uint8), sound[:24].clone()]
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
if rank == 1:
    for tag, buffer in enumerate(bad):
        for each in (*[sound] * 64, buffer):
            dist.isend(each, 0, tag=2 * tag).wait()
    dist.barrier()
    os._exit(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
left = []  # in memory that was used for earlier messages, ahead of each


class Watched(Receiver):
    def _receive(self, buffer, tag):
        left.append(int(buffer[:PREFIX].count_nonzero()))
        return super()._receive(buffer, tag)


for tag in range(len(bad)):
    lost = lambda reason: StageLost("stage 2 is gone: " + reason)
    link = Watched(1, 2 * tag, dist.group.WORLD, capacity=66, lost=lost)
    for _ in range(64):
        assert link.receive().content.tolist() == [1, 1, 1]
    for _ in range(2):  # for ever
        try:
            link.receive()
        except StageLost as error:
            print(error, flush=True)
dist.barrier()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 100_000, grown
assert sum(left) == 0, left  # it could complete a message that is too short
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names the loopback interface")
def test_a_link_refuses_what_no_stage_sends_and_takes_no_memory_for_it(tmp_path):
    command = [PYTHON, "-c", STRANGER, tmp_path / "store"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == 14
    assert all(line.startswith("stage 2 is gone: malformed message: ") for line in printed), printed


# ---- links


def test_what_cannot_travel_is_refused_with_a_hint():
    with pytest.raises(UserError, match="a set cannot cross stages"):
        pack(Message(0, {1, 2}))
    with pytest.raises(
        UserError, match=r"a torch.float32 torch.sparse_coo tensor at mask cannot .* use a dense tensor"
    ):
        pack(Message(0, {"mask": torch.ones(2, 2).to_sparse()}))


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


GOODBYE_BEHIND_A_FULL_LINK = """
import sys, time
import torch, torch.distributed as dist
from offbeat.errors import StageLost
from offbeat.core.links import Message
from offbeat.core.links.distributed import Receiver, Sender

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = dist.new_group(backend="gloo")
if rank == 0:
    sender = Sender(1, 2, group, capacity=2, patient=False, lost=StageLost)
    sent = 0
    try:
        while sent < 100:
            sender.send(Message(sent, torch.ones(3)))
            sent += 1
            time.sleep(0.02)
    except AssertionError:
        assert sender.outbox.full()
    sender.close(sys.argv[3])
    dist.barrier()  # the process lives on: nothing but a goodbye can tell the other one
    sender.thread.join(20)
    print(sent, sender.thread.is_alive(), flush=True)
    dist.barrier()
else:
    receiver = Receiver(0, 2, group, capacity=2, lost=StageLost)
    dist.barrier()  # takes nothing until the link is closed
    got = 0
    try:
        while True:
            assert receiver.receive().t == got
            got += 1
    except StageLost as lost:
        receiver.thread.join(20)
        print(got, receiver.thread.is_alive(), lost, flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("", "it has stopped"),
        ("ü" * 1000, "ü" * REASON_LIMIT),
    ],
    ids=["at the end", "of a failure"],
)
def test_a_link_that_is_closed_while_it_is_full_gives_all_of_it_and_a_goodbye(tmp_path, word, reported):
    both = [
        subprocess.Popen(
            [PYTHON, "-c", GOODBYE_BEHIND_A_FULL_LINK, str(rank), str(tmp_path / "store"), word],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        printed = [process.communicate(timeout=60) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    (sender, _), (receiver, _) = printed
    sent, alive = sender.split()
    assert alive == "False", printed
    assert 2 < int(sent) < 100, "it was full"
    assert receiver.split(maxsplit=2) == [sent, "False", f"{reported}\n"], printed


IN_FLIGHT = """
import random, sys, time
import torch, torch.distributed as dist
from offbeat.errors import StageLost
from offbeat.core.links import Message
from offbeat.core.links.distributed import Receiver, Sender

rank, capacity = int(sys.argv[1]), 4
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = dist.new_group(backend="gloo")
draw = random.Random(1)
lengths = [draw.choice([1, 100, (1 << 16), 3 * (1 << 16), 4 * (1 << 16)]) for _ in range(60)]
if rank == 0:
    sender = Sender(1, 2, group, capacity=capacity, patient=True, lost=StageLost)
    receiver = Receiver(1, 4, group, capacity=capacity, lost=StageLost)
    for t, length in enumerate(lengths):
        sender.send(Message(t, torch.full((length,), t, dtype=torch.uint8)))
    receiver.receive()
    for t in range(2 * capacity):
        sender.send(Message(t, None))
    while not sender.outbox.empty():
        time.sleep(0.01)
    print("sent", flush=True)
    receiver.receive()
    sender.close()
    sender.thread.join(20)
else:
    receiver = Receiver(0, 2, group, capacity=capacity, lost=StageLost)
    sender = Sender(0, 4, group, capacity=capacity, patient=True, lost=StageLost)
    for t, length in enumerate(lengths):
        message = receiver.receive()
        assert (message.t, message.content.numel(), int(message.content.sum())) == (t, length, t * length)
    sender.send(Message(0, None))
    input()  # reads nothing until all was sent
    for t in range(2 * capacity):
        assert receiver.receive().t == t
    sender.send(Message(1, None))
    sender.close()
    sender.thread.join(20)
dist.barrier()
print("done", flush=True)
"""


def test_a_link_has_several_messages_of_any_length_in_flight_and_keeps_their_order(tmp_path):
    """Before the first is read, a link of capacity 4 delivers 4 messages to the inbox and one to its thread. The other
    3 of 8 are delivered to receives that were posted ahead; without these they would stay in the outbox."""
    both = [
        subprocess.Popen(
            [PYTHON, "-c", IN_FLIGHT, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        first, second = both
        assert first.stdout.readline() == "sent\n", first.stderr.read()
        printed = [second.communicate("\n", timeout=60), first.communicate(timeout=60)]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [out for out, _ in printed] == ["done\n"] * 2, printed
