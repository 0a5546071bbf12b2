"""Record a model's forward as a Program by running it on a sample.

torch.fx follows a forward without values, and so stops at Python code that needs them: decorators that inspect
arguments, output classes, masks that depend on padding. Here the forward runs for real, on a copy of the model, and
what it does between its blocks is recorded:

    forward of a Hugging Face model     x = self.wte(ids)             layer, called as a whole
                                        x = x + self.wpe(positions)   torch function, recorded
                                        mask = create_causal_mask(x)  function that reads values, called as a whole
                                        for block in self.h:
                                            x = block(x, mask)        block, called as a whole
                                        return Output(logits=head(x)) object, built again at every run

A module is opened only if it contains repeated blocks (a ModuleList or Sequential of at least two), or is one and
blocks are to be cut; all others are called as a whole. Sizes are recorded as references (sizes.py), so the program is
not tied to the sample's batch size; sample_trace.py runs the model on other sizes to be sure of it. What an operation
writes into, and whose memory its result shares, is observed.
"""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from offbeat.partitioning.aliases import DESCRIBING
from offbeat.partitioning.program import STAGE_DEVICE, Effects, Op, Program, Ref, State, marks
from offbeat.partitioning.record import (
    Untraceable,
    is_layer,
    random_state,
    reason_of,
    restore_random_state,
    surroundings,
)
from offbeat.partitioning.sample_values import (
    Unresolved,
    is_namedtuple,
    may_return_none,
    resolved,
    shares_memory,
    tensors_in,
)
from offbeat.partitioning.sizes import TracedSize

READS_VALUES = "it branches on the values of tensors"
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format, Enum)
PLAIN_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, type(Ellipsis), range)
DESCRIPTIONS = DESCRIBING | {"__len__", "__repr__", "__str__", "__format__", "__hash__", "is_nested", "is_inference"}
ON_SIZES = (operator.neg, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
PURE = (operator.getitem, getattr, "size", "numel", *ON_SIZES)  # left out of the program where nothing uses them


def opened_modules(model: nn.Module, *, inside_blocks: bool) -> set[str]:
    """Paths of the modules whose forward is recorded; all others are called as a whole.

    Those that contain a list of at least two blocks; `inside_blocks`: also the blocks, down to their submodules.
    """
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    found = set()
    for path, module in model.named_modules():
        if any(isinstance(each, lists) and len(each) > 1 for each in module.modules()):
            found.add(path)
        if inside_blocks and isinstance(module, lists) and len(module) > 1:
            found |= {f"{path}.{name}".lstrip(".") for name, block in module.named_children() if not is_layer(block)}
    return found


class SampleRecorder:
    """One run of a forward on a sample, recorded."""

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module,
        *,
        opened: set[str],
        atomic: Mapping[str, str],
        functions: set[tuple[Any, str]],
    ) -> None:
        self.model, self.opened, self.atomic, self.functions = model, opened, atomic, functions
        self.failed: dict[str, str] = {}  # submodules that cannot be opened, with the reason
        self.found: set[tuple[Any, str]] = set()  # functions (module or class, name) that must be called as a whole
        self.written_buffers: set[str] = set()
        self.ops: list[Op] = []
        self.owners = [""]
        self.whole = 0  # depth of calls as a whole: nothing is recorded inside
        self.taken: dict[str, int] = {}
        self.known: dict[int, str] = {}  # identity of a value: Ref or State
        self.kept: list[Any] = []  # keeps identities unique
        self.uniform: set[int] = set()  # results of torch.rand
        self.certain: dict[int, bool] = {}  # truth of tensors that do not depend on the values drawn
        self.literals: dict[int, Any] = {}  # attributes of the model's modules, as the original has them
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.surroundings = surroundings()
        for path, module in model.named_modules():
            twin = vars(original.get_submodule(path))
            for held in (module._parameters, module._buffers, vars(module)):
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        self.known.setdefault(id(value), State(f"{path}.{name}".lstrip(".")))
                    elif name in twin and not isinstance(value, PLAIN):
                        self.literals[id(value)] = twin[name]

    # ---- running

    def program(self, values: Mapping[str, Any], call: Callable[[nn.Module, dict[str, Any]], Any]) -> Program:
        """Run call(model, values) and record it; raises Untraceable where the model's own forward cannot be."""
        self.taken.update(dict.fromkeys(values, 1))
        given = {name: self._bind(value, Ref(name), {}) for name, value in values.items()}
        before = random_state()
        try:
            with torch.enable_grad(), self._patched(), _Torch(self):
                result = call(self.model, given)
            if random_state() != before:
                raise Untraceable("it draws random numbers outside torch")
            output = self._template(result)
        except Exception as error:
            if self.found - self.functions or self._blame(error, self.model):
                return Program((), (), None)
            raise Untraceable(reason_of(error)) from error
        finally:
            restore_random_state(before)
            self.kept.clear()  # with the sample's activations
        return Program(tuple(values), tuple(_without_unused(self.ops, output)), output)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Calls of modules, and of the functions in `functions`, reach the recorder."""
        classes = {cls for module in self.model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        with ExitStack() as stack:
            for cls in (each for each in classes if "__call__" in vars(each)):
                stack.callback(setattr, cls, "__call__", vars(cls)["__call__"])
                cls.__call__ = self._module_caller(vars(cls)["__call__"])  # type: ignore[method-assign]
            apply = torch.autograd.Function.__dict__["apply"]
            stack.callback(setattr, torch.autograd.Function, "apply", apply)
            torch.autograd.Function.apply = classmethod(self._applier(apply))  # type: ignore[method-assign,assignment]
            for holder, name in self.functions:
                function = vars(holder)[name]
                stack.callback(setattr, holder, name, function)
                setattr(holder, name, self._function_caller(function, method=isinstance(holder, type)))
            yield

    def _module_caller(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(module))
            if self.whole or path is None or path == "" or self.owners[-1] == path:
                return original(module, *args, **kwargs)
            return self._module(original, module, path, args, kwargs)

        return call

    def _module(self, original: Any, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        if path in self.atomic or path not in self.opened:
            return self._layer(original, module, path, args, kwargs)
        before, size = random_state(), len(self.ops)
        self.owners.append(path)
        try:
            result = original(module, *args, **kwargs)
            if random_state() == before:
                return result
            self.failed[path] = "it draws random numbers outside torch"
        except Exception as error:
            if not self._blame(error, module):
                self.failed[path] = reason_of(error)
        finally:
            self.owners.pop()
        restore_random_state(before)
        del self.ops[size:]
        return self._layer(original, module, path, args, kwargs)

    def _layer(self, original: Any, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            buffers = dict(module.named_buffers(path))
            before = {name: buffer._version for name, buffer in buffers.items()}
        result = self._call("call_module", path, args, kwargs, lambda *a, **k: original(module, *a, **k), owner=path)
        with torch._C.DisableTorchFunction():
            self.written_buffers.update(name for name, buffer in buffers.items() if buffer._version != before[name])
        return result

    def _function_caller(self, function: Callable[..., Any], *, method: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.whole:
                return function(*args, **kwargs)
            if method:
                return self._check(function, args, kwargs)
            return self._call("call_function", function, args, kwargs, function, optional=may_return_none(function))

        return call

    def _check(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A method that reads values and returns nothing warns of them, which is done here and not in the stages."""
        with self._as_a_whole():
            result = function(*resolved(args), **resolved(kwargs))
        if result is not None:
            raise Untraceable(READS_VALUES)

    def _applier(self, original: Any) -> Callable[..., Any]:
        """Custom autograd functions, which torch does not hand to modes. Those of other threads are not recorded."""
        thread = get_ident()

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)
            if self.whole or get_ident() != thread:
                return bound(*args, **kwargs)
            return self._call("call_function", bound, args, kwargs, bound)

        return apply

    def _blame(self, error: BaseException, module: nn.Module) -> bool:
        """Find the function, called by the module's forward, that failed: next time it is called as a whole."""
        forward = inspect.unwrap(type(module).forward)
        codes = [frame.f_code for frame in _frames(error)]
        if forward.__code__ not in codes or not isinstance(error, Untraceable):
            return False
        inside = codes[len(codes) - codes[::-1].index(forward.__code__) :][:3]  # with the decorators of a function
        for holder in (sys.modules[forward.__module__], *type(module).__mro__[:-1]):
            for name, value in vars(holder).items():
                ours = inspect.isfunction(value) and inspect.unwrap(value).__code__ in inside
                if ours and value.__module__.split(".")[0] not in ("torch", "offbeat"):
                    self.found.add((holder, name))
                    return (holder, name) not in self.functions
        return False

    # ---- recording

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        self.whole += 1
        try:
            yield
        finally:
            self.whole -= 1

    def _call(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        run: Callable[..., Any],
        *,
        owner: str | None = None,
        optional: bool = False,
    ) -> Any:
        """Run as a whole and record it; returns the result with its parts known."""
        with self._as_a_whole():
            if surroundings() != self.surroundings:
                raise Untraceable("it runs under an autocast or inference mode of its own")
            template = self._template((tuple(args), dict(kwargs)))
            arguments = resolved((tuple(args), dict(kwargs)))
            tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)}
            versions = {key: tensor._version for key, tensor in tensors.items() if not tensor.is_inference()}
            memory = {key: self.known[key] for key in tensors if key in self.known}
            result = run(*arguments[0], **arguments[1])
            changed = [key for key, version in versions.items() if key in memory and tensors[key]._version != version]
            written = tuple(memory[key] for key in changed)
            for mark in written:
                if type(mark) is State:
                    self.written_buffers.add(str(mark))
            name = self._name(owner if owner is not None else self.owners[-1], kind, target)
            given = {key: (tensors[key], memory[key]) for key in memory}
            self._add(name, kind, target, template, owner, written, (result, [tensors[key] for key in changed]), given)
            if isinstance(result, Tensor) and any(tensors[key] is result for key in changed):
                return result  # x.add_(1) is x
            return self._unresolved(result, Ref(name)) if optional else self._bind(result, Ref(name), given)

    def _unresolved(self, result: Any, ref: Ref) -> Unresolved:
        made = Unresolved(ref, result)
        self.kept.append(made)
        return made

    def _add(
        self,
        name: str,
        kind: str,
        target: Any,
        template: Any,
        owner: str | None,
        written: tuple[str, ...],
        result: Any,
        arguments: dict[int, tuple[Tensor, str]],
    ) -> None:
        shared = tuple(mark for tensor, mark in arguments.values() if mark in written or shares_memory(result, tensor))
        effects = Effects(written, shared, any(leaf.requires_grad for leaf in tensors_in(result)))
        grad = torch.is_grad_enabled()
        place = self.owners[-1] if owner is None else owner
        self.ops.append(Op(name, kind, target, template[0], template[1], place, grad, effects))

    def _name(self, owner: str, kind: str, target: Any) -> str:
        if kind == "call_module":
            base = str(target)
        else:
            action = target if isinstance(target, str) else getattr(target, "__name__", "call")
            base = f"{owner}.{action}".lstrip(".")
        self.taken[base] = self.taken.get(base, 0) + 1
        return base if self.taken[base] == 1 else f"{base}#{self.taken[base]}"

    def _bind(self, value: Any, ref: Ref, arguments: dict[int, tuple[Tensor, str]]) -> Any:
        """The value, its parts known as the results of picking them."""
        if isinstance(value, Tensor):
            if id(value) in self.known:  # x.float() is x itself here, and something else in another precision
                value = value.view_as(value)
            self._know(value, ref)
            return value
        if isinstance(value, TracedSize) or value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            return TracedSize.of(value, ref, self._on_sizes)
        if type(value) in (tuple, list) or is_namedtuple(value) or type(value).__module__ == "torch.return_types":
            parts = [self._pick(item, operator.getitem, ref, n, arguments) for n, item in enumerate(value)]
            return type(value)(*parts) if is_namedtuple(value) else type(value)(parts)
        if isinstance(value, torch.Size):
            return torch.Size([self._pick(item, operator.getitem, ref, n, arguments) for n, item in enumerate(value)])
        if isinstance(value, dict):
            for key in list(value):
                value[key] = self._pick(value[key], operator.getitem, ref, key, arguments)
            return value
        if is_dataclass(value) and not isinstance(value, type):
            for each in fields(value):
                part = self._pick(getattr(value, each.name), getattr, ref, each.name, arguments)
                object.__setattr__(value, each.name, part)  # also of a frozen one
            return value
        self._know(value, ref)
        return value

    def _pick(self, item: Any, function: Any, ref: Ref, key: Any, arguments: dict[int, tuple[Tensor, str]]) -> Any:
        if item is None or isinstance(item, bool | float | str):
            return item
        name = self._name("", "call_function", f"{ref}.{key}")
        self._add(name, "call_function", function, ((ref, key), {}), self.owners[-1], (), item, arguments)
        return self._bind(item, Ref(name), arguments)

    def _know(self, value: Any, mark: str) -> None:
        self.known[id(value)] = mark
        self.kept.append(value)

    def _template(self, content: Any) -> Any:
        """The content with references for what is known; refuses what would be frozen though it may change."""
        if isinstance(content, TracedSize | Unresolved):
            return content.ref
        if id(content) in self.known and not isinstance(content, PLAIN):
            return self.known[id(content)]
        if isinstance(content, Tensor):
            raise Untraceable("it makes a tensor in a way that cannot be recorded")
        if isinstance(content, torch.device):
            return STAGE_DEVICE
        if isinstance(content, PLAIN):
            return content
        if isinstance(content, nn.Module):
            raise Untraceable("it passes a module as an argument")
        if isinstance(content, torch.Size) or type(content) is tuple:
            return tuple(self._template(item) for item in content)
        if type(content) is list:
            return [self._template(item) for item in content]
        if type(content) is dict:
            return {key: self._template(item) for key, item in content.items()}
        if type(content) is slice:
            return slice(*(self._template(item) for item in (content.start, content.stop, content.step)))
        if id(content) in self.literals:
            return self.literals[id(content)]
        return self._template_of_object(content)

    def _template_of_object(self, content: Any) -> Any:
        if is_namedtuple(content):
            return self._build(content, type(content), tuple(self._template(item) for item in content), {})
        if is_dataclass(content) and not isinstance(content, type):
            values = {field.name: getattr(content, field.name) for field in fields(content) if field.init}
            return self._build(content, type(content), (), {key: self._template(item) for key, item in values.items()})
        if isinstance(content, dict):
            return self._build(content, type(content), ({k: self._template(v) for k, v in content.items()},), {})
        if isinstance(content, PLAIN_CALLABLES):
            return content
        raise Untraceable(f"it passes a {type(content).__name__} from one of its parts to another")

    def _build(self, content: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        """An operation that builds an object of this class at every run."""
        name = self._name(self.owners[-1], "call_function", kind)
        self._add(name, "call_function", kind, (args, kwargs), None, (), content, {})
        self._know(content, Ref(name))
        return Ref(name)

    # ---- torch functions and sizes

    def _on_sizes(self, function: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Record arithmetic on sizes, or the check of a comparison between them."""
        if self.whole:
            return result
        name = self._name(self.owners[-1], "call_function", function)
        self._add(name, "call_function", function, (self._template(args), {}), None, (), result, {})
        return result if result is None else TracedSize.of(result, Ref(name), self._on_sizes)

    def torch_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that the forward calls, and record it unless it only describes a tensor."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._attribute(function, args)
        if name in ("size", "numel", "nelement") and args:
            return self._size(args[0], *args[1:], **kwargs) if name == "size" else self._numel(args[0])
        if name in DESCRIPTIONS:
            return function(*resolved(args), **resolved(kwargs))
        if name == "__bool__" and id(args[0]) in self.certain:
            return self.certain[id(args[0])]
        if name in ("__set__", "requires_grad_") and _requires_gradients(function, args, kwargs):
            return self._call("call_method", "requires_grad_", args[:1], {}, Tensor.requires_grad_)
        if name in ("__set__", "__delete__", "requires_grad_"):
            raise Untraceable("it sets an attribute of a tensor")
        method = is_tensor_method_or_property(function) or isinstance(function, types.MethodDescriptorType)
        target = name if method else function
        result = self._call("call_method" if method else "call_function", target, args, kwargs, function)
        if not tensors_in(result) and not tensors_in((args, kwargs)):
            del self.ops[-1]  # torch.set_grad_enabled and the like
        elif not tensors_in(result) and not self._wrote() and name not in ("__setitem__", "_assert"):
            raise Untraceable(READS_VALUES)
        self._note_certain(name, args, result)
        return result

    def _wrote(self) -> bool:
        effects = self.ops[-1].effects
        return effects is not None and bool(effects.written)

    def _note_certain(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """torch.rand is at least 0 and below 1: whether it is below 0 does not depend on the draw."""
        if name == "rand":
            self.uniform.add(id(result))
        below = args[1] if name in ("lt", "__lt__") and id(args[0]) in self.uniform else None
        if isinstance(below, int | float) and not 0 < below < 1:
            self.certain[id(result)] = below >= 1

    def _attribute(self, function: Any, args: tuple[Any, ...]) -> Any:
        attribute = function.__self__.__name__
        if attribute == "shape":
            return self._size(args[0])
        value = function(*resolved(args))
        if not isinstance(value, Tensor) or id(value) in self.known or attribute == "grad":
            return value
        if attribute == "data":
            raise Untraceable("it uses .data of a tensor")
        return self._call("call_function", getattr, (args[0], attribute), {}, lambda *_: value)

    def _size(self, tensor: Tensor, dim: int | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            shape = tuple(tensor.size())
        if type(self.known.get(id(tensor))) is State and isinstance(tensor, nn.Parameter):
            return torch.Size(shape) if dim is None else shape[dim]
        if dim is not None:
            return self._one_size(tensor, dim, shape[dim])
        return torch.Size([self._one_size(tensor, n, length) for n, length in enumerate(shape)])

    def _one_size(self, tensor: Tensor, dim: int, length: int) -> TracedSize:
        return self._size_op("size", (tensor, dim), length)

    def _numel(self, tensor: Tensor) -> TracedSize:
        with torch._C.DisableTorchFunction():
            return self._size_op("numel", (tensor,), tensor.numel())

    def _size_op(self, method: str, args: tuple[Any, ...], value: int) -> TracedSize:
        name = self._name(self.owners[-1], "call_method", method)
        self._add(name, "call_method", method, (self._template(args), {}), None, (), value, {})
        return TracedSize.of(value, Ref(name), self._on_sizes)


class _Torch(TorchFunctionMode):
    """Hands every torch function that the forward calls to the recorder."""

    def __init__(self, recorder: SampleRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.whole:
            return func(*args, **(kwargs or {}))
        return self.recorder.torch_call(func, args, kwargs or {})


def _requires_gradients(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is tensor.requires_grad = True, or tensor.requires_grad_()."""
    if function.__name__ == "__set__":
        return function.__self__.__name__ == "requires_grad" and args[1] is True
    return (*args[1:], *kwargs.values()) in ((), (True,))


def _frames(error: BaseException) -> list[Any]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def _without_unused(ops: list[Op], output: Any) -> list[Op]:
    """Without the sizes and picks that nothing uses."""
    used = {str(mark) for mark in marks(output)}
    kept: list[Op] = []
    for op in reversed(ops):
        if op.name in used or op.target not in PURE:
            kept.append(op)
            used.update(op.refs)
    return kept[::-1]
