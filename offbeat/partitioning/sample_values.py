"""Values while a forward runs on a sample: what code that is called as a whole receives, and what it returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.partitioning.program import Ref
from offbeat.partitioning.sizes import TracedSize


@dataclass(eq=False)
class Unresolved:
    """Stands for the result of a function that may be None; only layers and functions called as a whole receive it."""

    ref: Ref
    value: Any


def resolved(content: Any) -> Any:
    """Plain integers and the values themselves, as code that is called as a whole receives them."""
    if isinstance(content, TracedSize):
        return int(content)
    if isinstance(content, Unresolved):
        return content.value
    if isinstance(content, torch.Size):
        return torch.Size([int(item) for item in content])
    if type(content) in (tuple, list):
        return type(content)(resolved(item) for item in content)
    if type(content) is dict:
        return {key: resolved(item) for key, item in content.items()}
    if type(content) is slice:
        return slice(resolved(content.start), resolved(content.stop), resolved(content.step))
    return content


def tensors_in(content: Any) -> list[Tensor]:
    """The tensors of nested containers."""
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor)]


def shares_memory(result: Any, tensor: Tensor) -> bool:
    """Whether a tensor of the result uses the memory of this one."""
    memory = tensor.untyped_storage()._cdata
    return any(leaf.untyped_storage()._cdata == memory for leaf in tensors_in(result))


def is_namedtuple(value: Any) -> bool:
    """Whether it is a tuple with named fields."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def may_return_none(function: Callable[..., Any]) -> bool:
    """Whether its annotation allows None."""
    try:
        returned = typing.get_type_hints(inspect.unwrap(function)).get("return")
    except Exception:  # annotations may name what is not there
        return False
    return returned is type(None) or type(None) in typing.get_args(returned)
