"""State as data: whatever a stage holds comes back with the same types, bits and memory layout, without pickle."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from torch import nn
from trees import nested_values, same

from offbeat.checkpoint import CheckpointDamaged, flatten, unflatten
from offbeat.errors import UserError


def there_and_back(tree):
    tensors, plain = flatten(tree)
    return unflatten(tensors, json.loads(json.dumps(plain, allow_nan=False)))


@given(tree=nested_values)
def test_every_tree_is_restored_as_it_was(tree):
    assert same(there_and_back(tree), tree)


def test_the_json_of_a_checkpoint_stays_that_of_format_1():
    x = torch.arange(12.0).reshape(3, 4)
    tree = {
        "a": (1, math.nan, -math.inf, True, None, "text"),
        2: OrderedDict(b=[torch.float16, torch.device("cuda", 1), torch.Size([2, 3])]),
        "c": Counter({30: 1}),
        "plain": x,
        "again": x,
        "transposed": x.T,
        "sliced": x[1:, 1:],
        "expanded": x[:, :1].expand(3, 5),
        "complex": torch.ones(2, 1, dtype=torch.complex64),
    }
    tensors, plain = flatten(tree)
    assert plain == [
        "dict",
        [
            ["a", ["tuple", [1, ["float", "nan"], ["float", "-inf"], True, None, "text"]]],
            [2, ["ordered", [["b", ["list", [["dtype", "float16"], ["device", "cuda:1"], ["size", [2, 3]]]]]]]],
            ["c", ["counter", [[30, 1]]]],
            ["plain", ["tensor", "plain"]],
            ["again", ["tensor", "plain"]],
            ["transposed", ["tensor", "transposed", {"stride": [1, 4], "begin": 0}]],
            ["sliced", ["tensor", "sliced", {"stride": [4, 1], "begin": 5}]],
            ["expanded", ["tensor", "expanded", {"shape": [3, 5], "stride": [4, 0], "begin": 0}]],
            ["complex", ["tensor", "complex", {"dtype": "complex64", "shape": [2, 1]}]],
        ],
    ]
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert shapes == {
        "plain": (torch.float32, (3, 4)),
        "transposed": (torch.float32, (4, 3)),
        "sliced": (torch.float32, (2, 3)),
        "expanded": (torch.float32, (3, 1)),
        "complex": (torch.uint8, (16,)),
    }


def test_a_counter_stays_one():
    back = there_and_back({"milestones": Counter({30: 1, 60: 2})})["milestones"]
    assert type(back) is Counter
    assert back == {30: 1, 60: 2}


DTYPES = [
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
    torch.float8_e4m3fn,
    torch.uint16,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 5), (1,)], ids=str)
def test_every_type_and_shape_keeps_its_bits(dtype, shape):
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    x = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(there_and_back(x), x)


def layouts() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 4, 5)
    return {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "permuted": x.permute(3, 0, 2, 1),
        "sliced": x[:, 1:, ::2],
        "expanded": x[:, :1, :1].expand(2, 6, 4, 5),
        "scalar, expanded": torch.tensor(2.0).expand(3, 3),
        "one element, expanded": torch.tensor(2.0).expand(1),
        "one complex element, expanded": torch.ones((), dtype=torch.complex64).expand(1),
        "channels last, one channel": torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
        "length one, odd stride": torch.randn(3, 4).as_strided((3, 1, 4), (4, 7, 1)),
        "off the boundary": torch.randn(20)[1:],
        "complex, transposed": torch.randn(3, 4, dtype=torch.complex128).T,
        "eight bits, transposed": torch.randn(3, 4).to(torch.float8_e5m2).T,
        "empty, permuted": torch.empty(3, 0, 4).permute(2, 1, 0),
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("name", layouts())
def test_memory_layout_is_restored_exactly(name):
    x = layouts()[name]
    back = there_and_back(x)
    assert same(back, x.resolve_conj())
    if x.numel() and name != "conjugate":
        assert back.data_ptr() % 64 == x.data_ptr() % 64


def test_elements_that_overlap_come_back_contiguous():
    x = torch.arange(6.0).unfold(0, 3, 1)
    back = there_and_back(x)
    assert torch.equal(back, x)
    assert back.is_contiguous()


def test_one_tensor_in_two_places_is_stored_once_and_restored_as_one():
    x, y = nn.Parameter(torch.randn(3, 4)), torch.zeros(3, 4)
    tensors, plain = flatten({"a": x, "b": [x.data], "c": x.T, "d": y})
    assert set(tensors) == {"a", "c", "d"}
    back = unflatten(tensors, plain)
    assert back["a"] is back["b"][0]
    assert back["a"].data_ptr() != back["d"].data_ptr()
    assert type(back["a"]) is torch.Tensor
    assert not back["a"].requires_grad


def test_names_that_look_alike_stay_apart():
    tree = {
        "a/b": torch.ones(1),
        "a": {"b": torch.ones(2)},
        1: torch.ones(3),
        "1": torch.ones(4),
        "__metadata__": torch.ones(5),
        "": torch.ones(6),
    }
    assert same(there_and_back(tree), tree)


def test_restored_tensors_are_in_memory_of_their_own():
    x = torch.ones(4)
    back = there_and_back(x)
    back.zero_()
    assert torch.equal(x, torch.ones(4))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"optimizer": {"w": {"step": {1, 2}}}}, "a set at optimizer/w/step"),
        ({"a": [lambda: 0]}, "a function at a/0"),
        ({"a": {(1, 2): 3}}, r"the key \(1, 2\) at a"),
        ({"a": {True: 3}}, "the key True at a"),
        ({"x": torch.eye(2).to_sparse()}, "torch.sparse_coo.* at x"),
        ({"x": torch.empty(2, device="meta")}, "meta.* at x"),
        (object(), "a object cannot be stored"),
        ({"b": b"bytes"}, "a bytes at b"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(tree, words):
    with pytest.raises(UserError, match=words):
        flatten(tree)


def test_a_tree_that_holds_itself_is_refused():
    tree: list = []
    tree.append(tree)
    with pytest.raises(UserError, match="contains itself"):
        flatten(tree)


@pytest.mark.parametrize(
    "plain",
    [
        ["object", "os.system"],
        ["dtype", "load"],
        ["dtype", "nothing"],
        ["dtype", "__doc__"],
        ["device", "moon"],
        ["float", "1e999"],
        ["tensor", "missing"],
        ["tensor", "x", {"stride": [-1]}],
        ["tensor", "x", {"shape": [9]}],
        ["tensor", "x", {"stride": [1 << 60]}],
        ["tensor", "x", {"dtype": "float64"}],
        ["tensor", "x", 7],
        ["tensor"],
        ["dict", [["a"]]],
        ["dict", [[None, 1]]],
        ["dict", {"a": 1}],
        ["tuple", 3],
        [],
        {"a": 1},
        ["size", ["a"]],
        ["tensor", "x", {"begin": "a"}],
        ["tensor", "x", {"stride": [1, 1]}],
        [["list", []], []],
    ],
    ids=str,
)
def test_json_that_no_tree_gives_is_refused(plain):
    with pytest.raises(CheckpointDamaged):
        unflatten({"x": torch.zeros(3)}, plain)


def test_a_deep_nest_is_refused_and_not_a_crash():
    plain: list = ["list", []]
    for _ in range(5000):
        plain = ["list", [plain]]
    with pytest.raises(CheckpointDamaged):
        unflatten({}, plain)
