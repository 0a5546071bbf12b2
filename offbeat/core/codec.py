"""Nested values as data: containers, plain values and tensors, encoded as JSON that refers to tensors, and decoded.

In the JSON a container is a tagged list, so that its type and the types of its keys are kept; a reader can name nothing
but the tags below:

    {"a": (1, nan), 2: x}    ["dict", [["a", ["tuple", [1, ["float", "nan"]]]], [2, ["tensor", REFERENCE]]]]

The caller decides what REFERENCE is and where the tensor's bytes are: messages number their tensors
(core/links/wire.py), checkpoints name them (checkpoint/tree.py). Checkpoints store this JSON, so it must not change.
Decoding trusts nothing: what `encode` cannot have returned raises ValueError.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from offbeat.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_DEPTH = 100
PLAIN = (bool, int, float, str)
INFINITE = (float("inf"), float("-inf"))
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
TAGS = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}
ALLOWED = "tensors, numbers, text, and lists, tuples and dicts of them"
Path = tuple[object, ...]


def encode(value: Any, refer: Callable[[Tensor, Path], list[Any]], *, purpose: str, path: Path = ()) -> Any:
    """The value as JSON; UserError where it holds something that cannot be encoded.

    refer: returns the reference to a tensor, one or two JSON values; it is called in the order of the value.
    purpose: what the value cannot do if it cannot be encoded, for the error ("cross stages").

    >>> encode({"lr": 0.1, 2: (True, None)}, lambda tensor, path: [], purpose="be saved")
    ['dict', [['lr', 0.1], [2, ['tuple', [True, None]]]]]
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if len(path) > MAX_DEPTH:
        raise UserError(f"the value{at(path[:8])} cannot {purpose}: it contains itself, or has over {MAX_DEPTH} levels")
    tag = TAGS.get(kind)
    if tag in SEQUENCES:
        return [tag, [encode(item, refer, purpose=purpose, path=(*path, index)) for index, item in enumerate(value)]]
    if tag in MAPPINGS:
        for key in value:
            if type(key) not in (str, int):
                raise UserError(f"the key {key!r}{at(path)} cannot {purpose}: use keys of type str or int")
        return [tag, [[key, encode(item, refer, purpose=purpose, path=(*path, key))] for key, item in value.items()]]
    import torch

    if isinstance(value, torch.Tensor):
        return ["tensor", *refer(value, path)]
    if isinstance(value, float | int | str):  # of a subclass, such as numpy.float64: as the plain type
        value = float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else "".join(value)
        return ["float", repr(value)] if value in INFINITE or value != value else value
    if kind is torch.Size:
        return ["size", list(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise UserError(f"a {kind.__name__}{at(path)} cannot {purpose}: use {ALLOWED}")


def decode(plain: Any, resolve: Callable[..., Any], *, depth: int = 0) -> Any:
    """The value again; ValueError where `encode` cannot have returned this.

    resolve: returns the tensor of a reference, whose values are its arguments; called in the order of the value.

    >>> decode(["dict", [["lr", 0.1], [2, ["tuple", [True, None]]]]], lambda reference: None)
    {'lr': 0.1, 2: (True, None)}
    """
    if not isinstance(plain, list):
        if plain is None or type(plain) in PLAIN:
            return plain
        raise ValueError(f"{type(plain).__name__} is not a plain value: expected null, a boolean, a number or a string")
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    tag, content = plain[:2] if len(plain) == 2 else (None, None)
    if len(plain) in (2, 3) and plain[0] == "tensor":
        return resolve(*plain[1:])
    if isinstance(tag, str) and isinstance(content, list):
        if tag in SEQUENCES:
            return SEQUENCES[tag](decode(item, resolve, depth=depth + 1) for item in content)
        if tag in MAPPINGS:
            return MAPPINGS[tag]({key: decode(item, resolve, depth=depth + 1) for key, item in _pairs(content)})
    return _constant(tag, content, plain)


def _constant(tag: Any, content: Any, plain: list[Any]) -> Any:
    """A value that is a word of torch, or a float that JSON cannot express."""
    import torch

    if tag == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "dtype" and isinstance(content, str):
        return dtype_named(content)
    try:
        if tag == "size" and isinstance(content, list):
            return torch.Size(content)
        if tag == "device" and isinstance(content, str):
            return torch.device(content)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{content!r:.40} is not a {tag}") from error
    raise ValueError(f"{plain!r:.40} is not an encoded value")


def _pairs(content: list[Any]) -> Iterator[tuple[str | int, Any]]:
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise ValueError(f"{pair!r:.40} is not a pair of a key (a string or an integer) and a value")
        yield pair[0], pair[1]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name, "float32" for example."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.40} is not a dtype of this version of torch")
    return dtype


def at(path: Path) -> str:
    """A path for an error message.

    >>> at(("optimizer", "weight", 0)), at(())
    (' at optimizer/weight/0', '')
    """
    return f" at {'/'.join(map(str, path))}" if path else ""
