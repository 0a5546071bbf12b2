"""What operations do to memory: which write into their arguments, which may return them or views of them.

A cut gives the later stage copies. That is exact unless two tensors of one memory (a view and its base) both cross it
and that memory is written. Torch's operator schemas state most of what is needed:

    aten::relu_(Tensor(a!) self) -> Tensor(a!)        a! is written
    aten::view(Tensor(a) self, ...) -> Tensor(a)      the result shares a
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import pairwise
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn

from offbeat.partitioning.program import Op, Program, Ref, marks

# Beyond the schemas: these return their argument itself, or a view of it, in some cases.
SHARING = {
    "__getitem__",
    "alpha_dropout",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "bfloat16",
    "bool",
    "broadcast_tensors",
    "byte",
    "cpu",
    "cuda",
    "double",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "einsum",
    "feature_alpha_dropout",
    "feature_dropout",
    "float",
    "getitem",
    "half",
    "identity",
    "int",
    "long",
    "meshgrid",
    "pos",
    "short",
    "sum_to_size",
    "type",
    "type_as",
}
SHARING_LAYERS = (
    nn.AlphaDropout,
    nn.ChannelShuffle,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
    nn.Flatten,
    nn.Identity,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.Unflatten,
)
CHANGING = {
    "iadd",
    "iand",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imod",
    "imul",
    "ior",
    "ipow",
    "irshift",
    "isub",
    "itruediv",
    "ixor",
    "setitem",
}
VIEW_ATTRIBUTES = {"T", "H", "mT", "mH", "data", "real", "imag"}
DESCRIBING = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
}
KNOWN_MODULES = ("torch", "math", "operator", "_operator", "builtins")
SEVERAL = {
    "aminmax",
    "chunk",
    "cummax",
    "cummin",
    "dsplit",
    "frexp",
    "hsplit",
    "kthvalue",
    "max",
    "median",
    "min",
    "mode",
    "sort",
    "split",
    "split_with_sizes",
    "std_mean",
    "svd",
    "tensor_split",
    "topk",
    "unbind",
    "unsafe_chunk",
    "unsafe_split",
    "var_mean",
    "vsplit",
}


def action(op: Op) -> str:
    """The name of the function or method."""
    return op.target if isinstance(op.target, str) else getattr(op.target, "__name__", "")


def opaque(op: Op, model: nn.Module) -> bool:
    """Whether it runs code of the user's, which may do anything to its arguments."""
    if op.kind == "call_module":
        layer = model.get_submodule(op.target)
        own = type(layer).__module__.startswith("torch.") and not isinstance(layer, nn.Sequential)
        return not own or bool(layer._forward_hooks or layer._forward_pre_hooks)
    if op.kind == "call_method" or isinstance(op.target, BuiltinFunctionType):
        return False
    module = getattr(op.target, "__module__", None) or "torch"
    return module.startswith("torch.utils") or module.split(".")[0] not in KNOWN_MODULES or action(op) == "apply"


def written(op: Op, model: nn.Module) -> list[str]:
    """The Refs and States that it may write into."""
    if op.effects is not None:
        return list(op.effects.written)
    if opaque(op, model):
        return list(marks((op.args, op.kwargs)))
    if op.kind == "call_module":
        return list(marks(op.args[:1])) if getattr(model.get_submodule(op.target), "inplace", False) else []
    name = action(op)
    mutating = (name.endswith("_") and not name.endswith("__")) or name.strip("_") in CHANGING
    found = list(marks(op.args[:1])) if mutating or _in_place_argument(op) else []
    return found + list(marks(op.kwargs.get("out")))


def _in_place_argument(op: Op) -> bool:
    if op.kwargs.get("inplace"):
        return True
    if op.kind != "call_function" or len(op.args) < 2:
        return False
    signature = _signature(op.target)
    if signature is None or "inplace" not in signature.parameters:
        return False
    try:
        return bool(signature.bind(*op.args, **op.kwargs).arguments.get("inplace", False))
    except TypeError:
        return False


@lru_cache(maxsize=256)  # inspect.signature parses the text of a function of Python's own C modules each time
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for most of torch's functions, which are written in C as well."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def shared(op: Op, model: nn.Module) -> list[str]:
    """The Refs and States whose memory its result may share."""
    if op.effects is not None:
        return list(op.effects.shared)
    if opaque(op, model):
        return list(marks((op.args, op.kwargs)))
    if op.kind == "call_module":
        sharing = isinstance(model.get_submodule(op.target), SHARING_LAYERS)
        return list(marks(op.args)) if sharing else written(op, model)
    if op.target is getattr:
        return list(marks(op.args)) if op.args[1] in VIEW_ATTRIBUTES else []
    if action(op) in SHARING or _schema_shares(action(op)):
        return list(marks(op.args[:1] if op.kind == "call_method" else op.args))
    return written(op, model)


@cache
def _schema_shares(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    if packet is None:
        return False
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        into = any(argument.kwarg_only and argument.alias_info for argument in schema.arguments)
        if not into and any(result.alias_info for result in schema.returns):
            return True
    return False


def describes(op: Op, descriptions: set[str]) -> bool:
    """Whether its value is a size, type or device, or computed from such (`descriptions`) alone."""
    if op.target is getattr:
        return op.args[1] not in VIEW_ATTRIBUTES | {"grad", "values", "indices"}
    if op.kind == "call_method" and op.target in DESCRIBING:
        return True
    computes = op.kind == "call_function" and (
        op.target is torch._assert or op.target.__module__ in ("_operator", "math", "builtins")
    )
    return computes and bool(op.refs) and not op.states and all(ref in descriptions for ref in op.refs)


def buffers_written(op: Op, model: nn.Module) -> list[str]:
    """Names of the buffers that it may write into: all that a layer holds, as torch's schemas do not list them."""
    if op.kind == "call_module":
        return [name for name, _ in model.get_submodule(op.target).named_buffers(op.target, remove_duplicate=False)]
    statistics = action(op) in ("batch_norm", "instance_norm")  # running means and variances
    return (
        list(op.states)
        if statistics or opaque(op, model)
        else [mark for mark in written(op, model) if mark in op.states]
    )


def returns_several(op: Op, model: nn.Module) -> bool:
    """Whether its value may be a tuple, so that picking from it is no work of its own."""
    if op.kind == "call_module":
        layer = model.get_submodule(op.target)
        return opaque(op, model) or isinstance(layer, nn.MultiheadAttention | nn.RNNBase)
    return opaque(op, model) or action(op) in SEVERAL


class AliasedMemory:
    """Which names of a program may share memory, and when that memory is written."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.roots: dict[str, frozenset[str]] = {name: frozenset([name]) for name in program.inputs}
        self.writes: list[frozenset[str]] = []  # roots that each operation writes into
        self.tensor: dict[str, str] = {name: name for name in program.inputs}  # x.relu_() is x itself
        self.descriptions: set[str] = set()
        for op in program.ops:
            changed = written(op, model)
            self.writes.append(self._roots_of(changed))
            unknown = op.effects is None and opaque(op, model)
            itself = changed and type(changed[0]) is Ref and action(op) != "setitem" and not unknown
            self.tensor[op.name] = self.tensor[changed[0]] if itself else op.name
            if describes(op, self.descriptions):
                self.descriptions.add(op.name)
                self.roots[op.name] = frozenset()
            else:
                own = [] if (bases := shared(op, model)) and not unknown else [op.name]
                self.roots[op.name] = self._roots_of(bases).union(own)

    def _roots_of(self, found: Iterable[str]) -> frozenset[str]:
        sets = [self.roots[mark] if type(mark) is Ref else frozenset([f"state:{mark}"]) for mark in found]
        return frozenset().union(*sets)

    def unsafe(self, program: Program, last_use: dict[str, int]) -> set[int]:
        """Positions p such that two tensors of one memory cross a cut before operation p, and it is written.

        Written later, the one would miss what happens to the other. Written before, their values are right, but
        autograd attaches a view anew to its changed base when the view is next used, which decides the order of the
        base's sum of gradients. A parameter, buffer or attribute crosses every cut.
        """
        last_write = {root: place for place, roots in enumerate(self.writes) for root in roots}
        defined = dict.fromkeys(program.inputs, -1) | {op.name: place for place, op in enumerate(program.ops)}
        sharing: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # root, tensor: its life
        for name, roots in self.roots.items():
            for root in roots & last_write.keys():
                # A result that nobody uses lives at its definition alone.
                sharing[root][self.tensor[name]] += [defined[name], last_use.get(name, defined[name])]
        bad: set[int] = set()
        for root, tensors in sharing.items():
            lives = [(min(life), max(life)) for life in tensors.values()]
            if root.startswith("state:"):
                lives.append((-1, len(program.ops)))
            begins = sorted(begin for begin, _ in lives)
            if len(lives) > 1 and last_write[root] > begins[1]:
                bad.update(_crossed_twice(lives))
        return bad


def _crossed_twice(lives: list[tuple[int, int]]) -> Iterator[int]:
    """Places p that at least two lives (begin, end) cross: begin < p <= end."""
    changes: dict[int, int] = defaultdict(int)
    for begin, end in lives:
        if begin < end:
            changes[begin + 1] += 1
            changes[end + 1] -= 1
    places = sorted(changes)
    crossing = 0
    for place, following in pairwise(places):
        crossing += changes[place]
        if crossing > 1:
            yield from range(place, following)


def carriers(program: Program, model: nn.Module, memory: AliasedMemory) -> set[str]:
    """The names whose values gradients may flow through: not masks, sizes, or what no_grad computes.

    Writing x[0] = y makes gradients flow through x, and through all that shares its memory.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = set(program.inputs)
    for op, writes in zip(program.ops, memory.writes, strict=True):
        inside = op.kind == "call_module" and next(model.get_submodule(op.target).parameters(), None) is not None
        reached = inside or any(ref in found for ref in op.refs) or any(path in parameters for path in op.states)
        if op.effects is not None:
            reached = op.effects.differentiable
        if op.target == "requires_grad_":
            found.update(op.refs)
        if reached and op.grad and op.name not in memory.descriptions and op.target != "detach":
            found.add(op.name)
            if writes:
                found.update(name for name, roots in memory.roots.items() if roots & writes)
    return found
