"""Proxies for tensors while torch.fx records a forward, and what torch's functions do with them.

Plain torch.fx computes with tensors that it does not know as inputs, records x += y as a sum, records the forward of a
custom autograd function without its backward, and answers "no" to isinstance(x, Tensor): each would give a program
that silently differs from its model.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from offbeat.partitioning.aliases import CHANGING, DESCRIBING, SEVERAL, VIEW_ATTRIBUTES

FACTORIES = (
    "arange",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)


class Untraceable(Exception):
    """Why a submodule, or the model, cannot be recorded."""


class InPlace(Proxy):
    """A proxy on which x += y and x[i] = y change x."""

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})

    def __getattr__(self, name: str) -> Any:
        return Attribute(self, name)


class Attribute(InPlace, fx.proxy.Attribute):
    """x.T and the like; x.view until it is called."""


def _changes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in CHANGING - {"setitem"}:
    setattr(InPlace, f"__{_name}__", _changes(getattr(operator, _name)))


class Everything(TorchFunctionMode):
    """Records every torch function, also one on tensors that plain fx would compute with."""

    def __init__(self, recorder: fx.Tracer) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, Proxy) for leaf in leaves):
            return Proxy.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        on_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
        if name in DESCRIBING or name == "__get__" or not (on_tensors or name in FACTORIES):
            return func(*args, **(kwargs or {}))
        if is_tensor_method_or_property(func):
            return self.recorder.create_proxy("call_method", name, args, kwargs or {})
        return self.recorder.create_proxy("call_function", func, args, kwargs or {})


@contextmanager
def patched(recorder: fx.Tracer) -> Iterator[None]:
    """torch.arange and the like, custom autograd functions and isinstance know of the recording while this lasts.

    A mode is not enough for them: torch checks the types of sizes before it calls a mode. Like torch.fx's own patches
    of nn.Module these hold for the whole process, but only calls of this thread are recorded.
    """
    apply, thread = torch.autograd.Function.__dict__["apply"], get_ident()

    def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return make(*args, **kwargs)
            return recorder.create_proxy("call_function", make, args, kwargs)

        return call

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return recorded(apply.__get__(None, cls))(*args, **kwargs)

    changes: list[tuple[Any, str, Any]] = [(torch, name, recorded(getattr(torch, name))) for name in FACTORIES]
    changes.append((torch, "is_tensor", lambda value: _stands_for(value, Tensor)))
    changes.append((builtins, "isinstance", _is_instance))
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in changes]
    before.append((torch.autograd.Function, "apply", apply))
    changes.append((torch.autograd.Function, "apply", classmethod(applied)))
    try:
        for holder, name, value in changes:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _is_instance(value: Any, kinds: Any, *, original: Callable[..., bool] = isinstance) -> bool:
    """isinstance where a user's code calls it; torch and the recording itself see a proxy as what it is."""
    if not issubclass(type(value), Proxy):
        return original(value, kinds)
    caller = f"{sys._getframe(1).f_globals.get('__name__', '')}."
    ours = caller.startswith(("torch.", "offbeat.partitioning."))
    return original(value, kinds) if ours else _stands_for(value, kinds)


def _stands_for(value: Any, kinds: Any) -> bool:
    """Whether a value will be of these kinds: what stands for a tensor is a tensor."""
    if not issubclass(type(value), Proxy):
        return isinstance(value, kinds)
    if value.node.meta["tensor"] is None:
        raise Untraceable("it tests the type of a value that is known only when it runs")
    return Tensor in (kinds if type(kinds) is tuple else (kinds,))


def is_tensor(node: fx.Node, model: nn.Module) -> bool | None:
    """True where the node's value is a tensor, None where that is not known."""
    if node.op in ("placeholder", "get_attr"):
        return True  # a batch is a tensor, or a tuple of as many as forward has arguments
    if node.op == "call_module":
        layer = model.get_submodule(str(node.target))
        single = type(layer).__module__.startswith("torch.nn") and not layer._forward_hooks
        several = nn.Sequential, nn.MultiheadAttention, nn.RNNBase, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d
        return True if single and not issubclass(type(layer), several) else None
    name = node.target if type(node.target) is str else getattr(node.target, "__name__", "")
    if node.target is getattr:
        return True if node.args[1] in VIEW_ATTRIBUTES else None
    if name in DESCRIBING or name in SEVERAL or name in ("item", "tolist"):
        return None
    module = getattr(node.target, "__module__", None) or "torch"
    if node.op == "call_method" or module.startswith(("torch.nn", "torch._C", "torch.functional")) or module == "torch":
        return True
    if module == "_operator":
        return True if any(each.meta.get("tensor") for each in node.all_input_nodes) else None
    return None
