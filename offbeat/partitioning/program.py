"""A model's forward as a list of operations: what tracing yields, what stages execute.

    x -> [conv1] -> [norm1] -> [relu] -> ... -> output

Arguments are plain containers with two kinds of marks in them: `Ref` stands for the value of an earlier operation (or
an input of the model), `State` for a parameter, buffer or tensor attribute, which is looked up anew at each run. So a
parameter never travels between stages as a value, but one that several stages use: there the later ones receive it
(`bind` gets the names).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Ref(str):
    """The value of the operation, or input, of this name."""

    __slots__ = ()


class State(str):
    """The parameter, buffer or tensor attribute at this dotted path of the model."""

    __slots__ = ()


NOTHING: Mapping[str, str] = MappingProxyType({})
DEVICE = ""  # the name of the device among the values of a run


class StageDevice:
    """The device on which the stage runs."""

    def __deepcopy__(self, memo: Any) -> StageDevice:
        return self

    def __reduce__(self) -> str:
        return "STAGE_DEVICE"


STAGE_DEVICE = StageDevice()


@dataclass(frozen=True)
class Effects:
    """What an operation was observed to do on a sample."""

    written: tuple[str, ...]  # the Refs and States that it wrote into
    shared: tuple[str, ...]  # those whose memory its result shares
    differentiable: bool  # whether gradients flow through its result


@dataclass(frozen=True)
class Op:
    """One operation: a call of a layer, a function or a tensor's method."""

    name: str
    kind: str  # call_module, call_function or call_method
    target: Any  # the layer's path, the function, the method's name
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: str  # path of the submodule whose forward does it; the layer's own path for a layer
    grad: bool = True  # False under torch.no_grad()
    effects: Effects | None = field(default=None, compare=False)  # None: what torch's schemas allow
    refs: tuple[str, ...] = field(init=False)
    states: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = list(marks((self.args, self.kwargs)))
        object.__setattr__(self, "refs", tuple(dict.fromkeys(mark for mark in found if type(mark) is Ref)))
        object.__setattr__(self, "states", tuple(dict.fromkeys(mark for mark in found if type(mark) is State)))


@dataclass(frozen=True)
class Program:
    """The operations of a forward in their order, the names of its inputs, and what it returns."""

    inputs: tuple[str, ...]
    ops: tuple[Op, ...]
    output: Any


def marks(content: Any) -> Iterator[str]:
    """The Refs and States in a template."""
    kind = type(content)
    if kind is Ref or kind is State:
        yield content
    elif kind is tuple or kind is list:
        for item in content:
            yield from marks(item)
    elif kind is dict:
        for item in content.values():
            yield from marks(item)
    elif kind is slice:
        yield from marks((content.start, content.stop, content.step))


@dataclass(frozen=True)
class Held:
    """A State bound to the module that holds it; read at each run, so that functional_call can replace it."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class MethodCall:
    """A tensor's method as a function."""

    name: str

    def __call__(self, subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(subject, self.name)(*args, **kwargs)


@dataclass(frozen=True)
class WithoutGrad:
    """A call that the model makes under torch.no_grad()."""

    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.call(*args, **kwargs)


@dataclass(frozen=True)
class Supplied:
    """A layer, some of whose parameters are given with each call."""

    layer: nn.Module
    names: tuple[str, ...]

    def __call__(self, parameters: tuple[Tensor, ...], /, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.layer, dict(zip(self.names, parameters, strict=True)), args, kwargs)


@dataclass
class BoundOp:
    """An operation bound to the layers that it runs on; `done` names the values that nobody needs after it."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    done: tuple[str, ...] = ()


def bind(ops: Sequence[Op], root: nn.Module, keep: set[str], received: Mapping[str, str] = NOTHING) -> list[BoundOp]:
    """The operations on the layers under `root`, which frees all values but those to keep after their last use.

    `received` has the names of the values that stand for parameters of the model, by their paths.
    """
    steps = [_step(op, root, received) for op in ops]
    seen = set(keep)
    for op, step in zip(reversed(ops), reversed(steps), strict=True):
        step.done = tuple(name for name in (*op.refs, op.name) if name not in seen)
        seen.update(step.done)
    return steps


def _step(op: Op, root: nn.Module, received: Mapping[str, str]) -> BoundOp:
    args = held(op.args, root, received)
    if op.kind == "call_module":
        call: Callable[..., Any] = root.get_submodule(op.target)
        inside = {path.removeprefix(f"{op.target}."): name for path, name in received.items()}
        given = {path: name for path, name in inside.items() if f"{op.target}.{path}" in received}
        if given:
            call, args = Supplied(root.get_submodule(op.target), tuple(given)), (tuple(map(Ref, given.values())), *args)
    else:
        call = MethodCall(op.target) if op.kind == "call_method" else op.target
    return BoundOp(op.name, call if op.grad else WithoutGrad(call), args, held(op.kwargs, root, received))


def held(content: Any, root: nn.Module, received: Mapping[str, str] = NOTHING) -> Any:
    """The template with every State bound to its holder under `root`, or to the value that was received for it."""
    kind = type(content)
    if kind is State and content in received:
        return Ref(received[content])
    if kind is State:
        path, _, name = content.rpartition(".")
        return Held(root.get_submodule(path), name)
    if kind is tuple or kind is list:
        return kind(held(item, root, received) for item in content)
    if kind is dict:
        return {key: held(item, root, received) for key, item in content.items()}
    if kind is slice:
        return slice(*(held(item, root, received) for item in (content.start, content.stop, content.step)))
    return content


def fill(content: Any, values: dict[str, Any]) -> Any:
    """The template with every mark replaced by its value."""
    kind = type(content)
    if kind is Ref:
        return values[content]
    if kind is StageDevice:
        return values[DEVICE]
    if kind is Held:
        return getattr(content.module, content.name)
    if kind is tuple or kind is list:
        return kind([fill(item, values) for item in content])
    if kind is dict:
        return {key: fill(item, values) for key, item in content.items()}
    if kind is slice:
        return slice(fill(content.start, values), fill(content.stop, values), fill(content.step, values))
    return content


def execute(steps: Sequence[BoundOp], values: dict[str, Any]) -> None:
    """Run the steps in order; each adds its value and drops those that nobody needs any more."""
    for step in steps:
        values[step.name] = step.call(*fill(step.args, values), **fill(step.kwargs, values))
        for name in step.done:
            del values[name]
