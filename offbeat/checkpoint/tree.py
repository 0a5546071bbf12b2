"""State as data: a tree of containers, plain values and tensors, taken apart into tensors and JSON, and put together.

In the JSON a container is a tagged list, so that types and the kind of a key survive; a file can name nothing but the
tags listed here:

    {"a": (1, nan), 2: x}    ["dict", [["a", ["tuple", [1, ["float", "nan"]]]], [2, ["tensor", "2"]]]]

Tensors are kept in row-major order. Where memory was laid out differently the reference says how: strides, elements
from a 64-byte boundary to the first one (kernels sum in another order there), and the full shape of expanded tensors.
Tensors whose elements overlap in other ways come back contiguous.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint.files import CheckpointDamaged
from offbeat.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 64  # bytes
DEEPEST = 100
LARGEST = 1 << 40  # bytes of one tensor's memory, gaps included
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
TAGS = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}
NATIVE = {  # torch's names of the types that a file holds as such; others go as bytes
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
Path = tuple[object, ...]


def flatten(tree: Any, *, copy: bool = False) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a tree, row-major on the CPU, and the rest as JSON.

    copy: in memory of their own, so that training may go on while they are written.

    >>> flatten({"lr": 0.1, 2: (True, None)})[1]
    ['dict', [['lr', 0.1], [2, ['tuple', [True, None]]]]]
    """
    taker = _Taker(copy)
    return taker.tensors, taker.take(tree, ())


def unflatten(tensors: Mapping[str, Tensor], plain: Any, *, device: torch.device | str | None = None) -> Any:
    """The tree again, its tensors in new memory; the same tensor in two places is one.

    >>> unflatten({}, flatten({"lr": 0.1, 2: (True, None)})[1])
    {'lr': 0.1, 2: (True, None)}
    """
    return _Maker(tensors, device).make(plain, 0)


def references(plain: Any, depth: int = 0) -> Iterator[str]:
    """Names of the tensors that a tree refers to; CheckpointDamaged where it is no tree."""
    if not isinstance(plain, list):
        return
    tag, value = _tagged(plain, depth)
    if tag == "tensor":
        yield str(value)
    elif tag in SEQUENCES:
        for item in value:
            yield from references(item, depth + 1)
    elif tag in MAPPINGS:
        for _, item in _pairs(value):
            yield from references(item, depth + 1)


class _Taker:
    """Takes a tree apart."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[Any, list[Any]] = {}  # references to memory that was seen

    def take(self, value: Any, path: Path) -> Any:
        import torch

        if len(path) > DEEPEST:
            raise UserError(f"the state at {_told(path[:8])} is nested too deep, or holds itself")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if value - value == 0 else ["float", repr(value)]
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if type(value) is torch.Size:
            return ["size", list(value)]
        if type(value) in SEQUENCES.values():
            return [TAGS[type(value)], [self.take(item, (*path, at)) for at, item in enumerate(value)]]
        if type(value) in MAPPINGS.values():
            for key in value:
                if type(key) not in (str, int):
                    raise UserError(f"the key {key!r} at {_told(path)} cannot be kept in a checkpoint: use str or int")
            return [TAGS[type(value)], [[key, self.take(item, (*path, key))] for key, item in value.items()]]
        raise UserError(
            f"a {type(value).__name__} at {_told(path)} cannot be kept in a checkpoint: use tensors, numbers, text, "
            "and lists, tuples and dicts of them"
        )

    def tensor(self, value: Tensor, path: Path) -> list[Any]:
        import torch

        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            what = f"{type(value).__name__} ({value.dtype}, {value.layout}, {value.device})"
            raise UserError(f"the {what} at {_told(path)} cannot be kept in a checkpoint: use a plain dense tensor")
        value = value.detach().resolve_conj().resolve_neg()
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and memory in self.known:
            return self.known[memory]
        name = self.name(path)
        laid = _layout(value)
        single = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in laid["stride"])] if laid else value
        kept = single.to("cpu", copy=self.copy, memory_format=torch.contiguous_format).contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in NATIVE:
            laid = {"dtype": dtype, "shape": list(value.shape), **laid}
            kept = kept.reshape(-1).view(torch.uint8)
        elif laid and kept.shape != value.shape:
            laid = {"shape": list(value.shape), **laid}
        self.tensors[name] = kept
        self.known[memory] = ["tensor", name, laid] if laid else ["tensor", name]
        return self.known[memory]

    def name(self, path: Path) -> str:
        name = plain = "/".join(str(key) for key in path) or "tensor"
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        return name


def _layout(value: Tensor) -> dict[str, Any]:
    """Strides and beginning, where they are not those of a new row-major tensor or cannot be kept."""
    begin, rest = divmod(value.data_ptr() % ALIGNMENT, value.element_size()) if value.numel() else (0, 0)
    begin = 0 if rest else begin
    if list(value.stride()) == _row_major(value.shape) and not begin:
        return {}
    span = 1
    for step, length in sorted(zip(value.stride(), value.shape, strict=True)):
        if step and length > 1:
            if step < span:
                return {}  # elements overlap
            span += (length - 1) * step
    return {"stride": list(value.stride()), "begin": begin}


def _row_major(shape: tuple[int, ...] | list[int]) -> list[int]:
    return [prod(max(1, length) for length in shape[at + 1 :]) for at in range(len(shape))]


class _Maker:
    """Puts a tree together; believes nothing."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str | None) -> None:
        self.tensors, self.device = tensors, device
        self.made: dict[str, Tensor] = {}

    def make(self, plain: Any, depth: int) -> Any:
        if not isinstance(plain, list):
            if plain is None or type(plain) in (bool, int, float, str):
                return plain
            raise CheckpointDamaged(f"a {type(plain).__name__} where a value should be")
        tag, value = _tagged(plain, depth)
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.make(item, depth + 1) for item in value)
        if tag in MAPPINGS:
            made = MAPPINGS[tag]()
            for key, item in _pairs(value):
                made[key] = self.make(item, depth + 1)
            return made
        if tag == "tensor":
            if value not in self.made:
                self.made[value] = self.tensor(value, plain[2] if len(plain) == 3 else {})
            return self.made[value]
        return self.word(tag, value)

    def word(self, tag: str, value: Any) -> Any:
        import torch

        try:
            if tag == "float" and value in ("nan", "inf", "-inf"):
                return float(value)
            if tag == "size":
                return torch.Size(value)
            if tag == "device":
                return torch.device(value)
            if tag == "dtype" and isinstance(getattr(torch, value), torch.dtype):
                return getattr(torch, value)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise CheckpointDamaged(f"no {tag} is called {value!r}") from error
        raise CheckpointDamaged(f"no {tag} is called {value!r}")

    def tensor(self, name: str, laid: Any) -> Tensor:
        import torch

        try:
            kept = self.tensors[name]
            shape = list(laid.get("shape", kept.shape))
            stride, begin = laid.get("stride", _row_major(shape)), laid.get("begin", 0)
            dtype = self.word("dtype", laid["dtype"]) if "dtype" in laid else kept.dtype
            if not all(type(number) is int and number >= 0 for number in (*shape, *stride, begin)):
                raise ValueError("negative or broken numbers")
            steps = list(zip(shape, stride, strict=True))
            span = 1 + sum((length - 1) * step for length, step in steps) if prod(shape) else 0
            if (begin + span) * dtype.itemsize > LARGEST:
                raise ValueError(f"{begin + span} elements of memory")
            single = [1 if step == 0 and length else length for length, step in steps]
            memory = torch.empty(begin + span, dtype=dtype, device=self.device)
            if dtype != kept.dtype:
                kept = kept.clone().view(dtype)
            memory.as_strided(single, stride, begin).copy_(kept.reshape(single))
            return memory.as_strided(shape, stride, begin)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointDamaged(f"the tensor {name} does not fit its description ({error})") from error


def _tagged(plain: list[Any], depth: int) -> tuple[str, Any]:
    known = len(plain) in (2, 3) and isinstance(plain[0], str) and depth <= DEEPEST
    if known and (len(plain) == 2 or plain[0] == "tensor"):
        tag, value = plain[:2]
        if tag in TAGS.values() and isinstance(value, list):
            return tag, value
        if tag in ("tensor", "float", "dtype", "device") and isinstance(value, str):
            return tag, value
        if tag == "size" and isinstance(value, list):
            return tag, value
    begins = plain[0] if plain and isinstance(plain[0], str) else "a list"
    raise CheckpointDamaged(f"no tree of ours has a {begins[:20]!r} of that form, {depth} levels deep")


def _pairs(value: list[Any]) -> Iterator[tuple[str | int, Any]]:
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise CheckpointDamaged("no dict of ours has anything but pairs, of which the first is a text or a number")
        yield pair[0], pair[1]


def _told(path: Path) -> str:
    return "/".join(str(key) for key in path) or "the top"
