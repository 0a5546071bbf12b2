"""State as data: nested values, taken apart into named tensors and JSON (core/codec.py), and put together again.

Tensors are stored in row-major order, each once and under the path of its first place. A reference to a tensor is its
name, followed by its layout where that differs from the one stored: strides, elements from a 64-byte boundary to the
first one (`begin`), the shape of an expanded tensor, and the dtype of one that is stored as bytes:

    {"weight": x, "momentum": y.T}    ["dict", [["weight", ["tensor", "weight"]],
                                                ["momentum", ["tensor", "momentum", {"stride": [1, 4], "begin": 0}]]]]

Tensors whose elements overlap other than by expansion come back contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint.files import CheckpointDamaged
from offbeat.core import codec
from offbeat.core.layout import Layout, laid_out, layout_of, memory_size, row_major, unexpanded
from offbeat.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 1 << 40  # bytes of one tensor's memory, gaps included
NATIVE = {  # torch's names of the types that a file holds as such; others are stored as bytes
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


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a tree, row-major on the CPU, and the rest as JSON.

    >>> flatten({"lr": 0.1, 2: (True, None)})[1]
    ['dict', [['lr', 0.1], [2, ['tuple', [True, None]]]]]
    """
    store = _Store()
    plain = codec.encode(tree, store.refer, purpose="be stored in a checkpoint")
    return store.tensors, plain


def unflatten(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """The tree again, its tensors in new memory; the same tensor in two places is one.

    >>> unflatten({}, flatten({"lr": 0.1, 2: (True, None)})[1])
    {'lr': 0.1, 2: (True, None)}
    """
    restored: dict[str, Tensor] = {}

    def resolve(name: Any, layout: Any = None) -> Tensor:
        if name not in restored:
            restored[name] = _restored(tensors, name, {} if layout is None else layout)
        return restored[name]

    return _decoded(plain, resolve)


def references(plain: Any) -> list[str]:
    """Names of the tensors that a tree refers to; CheckpointDamaged where it is not a tree."""
    names: list[str] = []
    _decoded(plain, lambda name, layout=None: names.append(str(name)))
    return names


def _decoded(plain: Any, resolve: Any) -> Any:
    try:
        return codec.decode(plain, resolve)
    except (ValueError, TypeError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"the JSON is not the tree of a checkpoint ({first_line(error)})") from error


class _Store:
    """The tensors of a tree by name, and the references to them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[Any, list[Any]] = {}  # references by device, address, dtype, shape and strides

    def refer(self, tensor: Tensor, path: codec.Path) -> list[Any]:
        import torch

        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{type(tensor).__name__} ({tensor.dtype}, {tensor.layout}, {tensor.device}){codec.at(path)}"
            raise UserError(f"the {what} cannot be stored in a checkpoint: use a plain dense tensor")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or memory not in self.known:
            self.known[memory] = self._add(tensor, self._name(path))
        return self.known[memory]

    def _add(self, tensor: Tensor, name: str) -> list[Any]:
        import torch

        layout, facts = layout_of(tensor), {}
        if layout is None or layout == Layout(0, row_major(tensor.shape)):
            values = tensor
        else:
            facts = {"stride": list(layout.strides), "begin": layout.offset}
            values = unexpanded(tensor, layout.strides)
        stored = values.to("cpu", memory_format=torch.contiguous_format).contiguous()
        stored = stored.as_strided(stored.shape, row_major(stored.shape))  # dimensions of length 1 may have any stride
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in NATIVE:
            facts = {"dtype": dtype, "shape": list(tensor.shape), **facts}
            stored = stored.reshape(-1).view(torch.uint8)
        elif stored.shape != tensor.shape:
            facts = {"shape": list(tensor.shape), **facts}
        self.tensors[name] = stored
        return [name, facts] if facts else [name]

    def _name(self, path: codec.Path) -> str:
        name = joined = "/".join(map(str, path)) or "tensor"
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{joined}#{number}"
        return name


def _restored(tensors: Mapping[str, Tensor], name: str, facts: Mapping[str, Any]) -> Tensor:
    """The tensor of that name in its own layout, which is checked before memory is allocated for it."""
    try:
        stored = tensors[name]
        shape = list(facts.get("shape", stored.shape))
        layout = Layout(facts.get("begin", 0), tuple(facts.get("stride", row_major(shape))))
        dtype = codec.dtype_named(facts["dtype"]) if "dtype" in facts else stored.dtype
        if not all(type(number) is int and number >= 0 for number in (*shape, *layout.strides, layout.offset)):
            raise ValueError(f"shape {shape}, strides {layout.strides}, begin {layout.offset}")
        if (size := memory_size(shape, layout) * dtype.itemsize) > LARGEST:
            raise ValueError(f"{size} bytes of memory, at most {LARGEST} are allowed")
        values = stored if dtype == stored.dtype else stored.clone().view(dtype)
        return laid_out(values, shape, layout)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"the tensor {name} does not fit its description ({first_line(error)})") from error
