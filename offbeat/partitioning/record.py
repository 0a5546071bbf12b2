"""Record a model's forward as a Program, in training and in evaluation mode, with torch.fx.

Plain fx would freeze more than a program may freeze, so here nothing that a forward computes is computed while
recording (see proxies.py); blocks under torch.no_grad() stay so, and assertions on sizes stay assertions. A submodule
that branches on data, draws from Python's or NumPy's random numbers, has hooks, or does anything else that cannot be
recorded is called as a whole. The model itself is never touched: a copy is recorded, which shares its tensors.
What remains frozen: plain attributes (numbers, flags) have the value that they had when the model was recorded.
"""

from __future__ import annotations

import dis
import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from threading import get_ident
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import ParameterProxy, Proxy

from offbeat.errors import UserError, first_line
from offbeat.partitioning.aliases import DESCRIBING, VIEW_ATTRIBUTES
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import Inputs
from offbeat.partitioning.program import Op, Program, Ref, State
from offbeat.partitioning.proxies import Everything, InPlace, Untraceable, is_tensor, patched

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def record(model: nn.Module, inputs: Inputs) -> tuple[dict[bool, Program], dict[str, str]]:
    """The programs in training (True) and evaluation mode (False), and why submodules are called as a whole."""
    atomic: dict[str, str] = {path: "it has hooks" for path, module in model.named_modules() if hooked(module)}
    reason = atomic.get("") or untraceable_reason(model) or _reason_against_fx(model, inputs)
    if reason:
        raise Untraceable(reason)
    while True:
        programs, failed = {}, {}
        for training in (True, False):
            recorder = ForwardTracer(_shadow(model, training), atomic, inputs)
            programs[training] = recorder.program()
            failed.update(recorder.failed)
        if not failed:
            break
        atomic.update(failed)
    called = {op.target for program in programs.values() for op in program.ops if op.kind == "call_module"}
    return programs, {path: atomic[path] for path in atomic if path in called and not layer(model, path)}


def _reason_against_fx(model: nn.Module, inputs: Inputs) -> str | None:
    """Why torch.fx cannot follow this forward."""
    named = inspect.signature(model.forward).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in named):
        return "its forward takes *arguments"
    needed = [each.name for each in named if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    return "its forward needs keyword arguments" if needed and not inputs.keywords else None


def untraceable_reason(model: nn.Module) -> str | None:
    """Why no way of recording applies to the model; None where one may."""
    named = inspect.signature(model.forward).parameters.values()
    if "forward" in vars(model):
        return "its forward is an attribute of the object, not of its class"
    if layer(model, ""):
        return "it is a single layer of torch.nn"
    return None if named else "its forward takes no argument"


def hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks, None) for hooks in HOOKS)


def layer(model: nn.Module, path: str) -> bool:
    """Whether it is one of torch's own layers, which are units as they are."""
    return is_layer(model.get_submodule(path))


def is_layer(module: nn.Module) -> bool:
    """Whether it is a layer of torch's own without repeated blocks: nn.TransformerEncoder is none."""
    ours = type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)
    return ours and not any(isinstance(each, nn.ModuleList) for each in module.modules())


def _shadow(model: nn.Module, training: bool) -> nn.Module:
    """A copy that shares all tensors: what a forward does to Python attributes happens to it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, Tensor):
                memo[id(tensor)] = tensor
    try:
        shadow = copy_model(model, memo)
    except UserError as error:
        raise Untraceable(str(error)) from error
    # A model that stands in training mode may have parts that its user froze in evaluation mode: they stay so.
    return shadow if training and model.training else shadow.train(training)


class ForwardTracer(fx.Tracer):
    """Records one forward; goes on where a submodule fails, to find all that do (then the program is no good)."""

    def __init__(self, model: nn.Module, atomic: Mapping[str, str], inputs: Inputs) -> None:
        super().__init__(autowrap_modules=(math,))
        self.model, self.atomic, self.inputs = model, atomic, inputs
        self.failed: dict[str, str] = {}
        self.owners = [""]
        self.surroundings = surroundings()
        self.thread = get_ident()  # calls of other threads are not recorded
        self.paths: dict[int, str] = {}
        self.proxies: dict[str, Proxy] = {}
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers, vars(module)):
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        self.paths.setdefault(id(value), f"{path}.{name}".lstrip("."))

    def program(self) -> Program:
        """Record the forward; raises Untraceable where the model's own forward cannot be."""
        before = random_state()
        try:
            with torch.enable_grad(), Everything(self), patched(self):
                graph = self.trace(self.model)
            if random_state() != before:
                raise Untraceable("it draws random numbers outside torch")
        except Exception as error:
            raise Untraceable(reason_of(error)) from error
        finally:
            restore_random_state(before)
        return _program(graph)

    # ---- what torch.fx calls

    def proxy(self, node: fx.Node) -> Proxy:
        return InPlace(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self.inputs.names]
        if not self.inputs.keywords:
            return root_fn, [self.root, *proxies]
        return lambda root, *given: root_fn(root, **dict(zip(self.inputs.names, given, strict=True))), [
            self.root,
            *proxies,
        ]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if path in self.atomic or self.is_leaf_module(m, path):
            return self._layer_call(path, args, kwargs)
        before = random_state()
        self.owners.append(path)
        try:
            result = forward(*args, **kwargs)
            if random_state() == before:
                return result
            self.failed[path] = "it draws random numbers outside torch"
        except Exception as error:
            self.failed[path] = reason_of(error)
        finally:
            self.owners.pop()
        restore_random_state(before)
        return self._layer_call(path, args, kwargs)

    def _layer_call(self, path: str, args: Any, kwargs: Any) -> Any:
        proxy = self.create_proxy("call_module", path, args, kwargs)
        proxy.node.meta["owner"] = path
        return proxy

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Any:
        if surroundings() != self.surroundings:
            raise Untraceable("it runs under an autocast or inference mode of its own")
        node = super().create_node(kind, target, args, kwargs, name, None)
        node.meta.update(owner=self.owners[-1], grad=torch.is_grad_enabled(), tensor=is_tensor(node, self.model))
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        path = self.paths.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if path is None or get_ident() != self.thread:
            return attr_val
        if path not in self.proxies:
            # The shape of a parameter is a fact; the shape of a buffer may change.
            constant = (lambda node: ParameterProxy(self, node, path, attr_val)) if _is_parameter(attr_val) else None
            self.proxies[path] = self.create_proxy("get_attr", path, (), {}, proxy_factory_fn=constant)
        return self.proxies[path]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy):
            return a.node
        if isinstance(a, Tensor):
            path = self.paths.get(id(a))
            if path is None:
                raise Untraceable("it makes a tensor in a way that cannot be recorded")
            return self.create_node("get_attr", path, (), {})
        if isinstance(a, nn.Module):
            raise Untraceable("it passes a module as an argument")
        if isinstance(a, OrderedDict):
            return self._ordered_dict(a)
        return super().create_arg(a)

    def _ordered_dict(self, a: OrderedDict[Any, Any]) -> Any:
        """An OrderedDict, as outputs of transformers are: built at every run. torch.fx would make it a plain dict."""
        if is_dataclass(a):
            values = {each.name: self.create_arg(getattr(a, each.name)) for each in fields(a) if each.init}
            return self.create_node("call_function", type(a), (), values)
        content = {key: self.create_arg(value) for key, value in a.items()}
        return self.create_node("call_function", type(a), (content,), {})

    def to_bool(self, obj: Proxy) -> bool:
        frame = inspect.currentframe()
        while frame and frame.f_globals.get("__name__", "") in (__name__, "torch.fx.proxy"):
            frame = frame.f_back
        if frame and _in_assertion(frame.f_code, frame.f_lasti):
            message = f"an assertion of {self.owners[-1] or 'the model'} failed (line {frame.f_lineno})"
            self.create_proxy("call_function", torch._assert, (obj, message), {})
            return True
        if _of_sizes(obj.node):
            raise Untraceable("it branches on the sizes or types of tensors")
        return super().to_bool(obj)


def _program(graph: fx.Graph) -> Program:
    names: dict[fx.Node, str] = {}
    taken: dict[str, int] = {}
    ops: list[Op] = []
    inputs: list[str] = []
    output: Any = None
    for node in graph.nodes:
        if node.op == "output":
            output = _template(node.args[0], names)
        elif node.op != "get_attr":
            base = _readable(node)
            taken[base] = taken.get(base, 0) + 1
            names[node] = base if taken[base] == 1 else f"{base}#{taken[base]}"
            if node.op == "placeholder":
                inputs.append(names[node])
                continue
            args, kwargs = _template(tuple(node.args), names), _template(dict(node.kwargs), names)
            owner, grad = node.meta["owner"], node.meta["grad"]
            ops.append(Op(names[node], node.op, node.target, args, kwargs, owner, grad))
    return Program(tuple(inputs), tuple(ops), output)


def _template(content: Any, names: Mapping[fx.Node, str]) -> Any:
    """An fx argument with marks for its nodes and plain containers for fx's immutable ones."""
    if isinstance(content, fx.Node):
        if content.op == "get_attr":
            return State(content.target)
        if content not in names:
            raise Untraceable("it keeps values from one run to the next")
        return Ref(names[content])
    if isinstance(content, tuple):
        return tuple(_template(item, names) for item in content)
    if isinstance(content, list):
        return [_template(item, names) for item in content]
    if isinstance(content, dict):
        return {key: _template(item, names) for key, item in content.items()}
    if isinstance(content, slice):
        return slice(*(_template(item, names) for item in (content.start, content.stop, content.step)))
    return content


def _readable(node: fx.Node) -> str:
    """layer1.0.conv1 for a layer, layer1.0.add for what its block's forward does itself."""
    if node.op in ("placeholder", "call_module"):
        return str(node.target)
    if node.target is getattr:
        action = str(node.args[1])
    else:
        action = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")
    return f"{node.meta['owner']}.{action}".lstrip(".")


def reason_of(error: BaseException) -> str:
    """Why, in part of a line: torch.fx explains itself at length."""
    if isinstance(error, Untraceable):
        return str(error)
    text = first_line(error).split(". ")[0].rstrip(".")
    return "it branches on the values of tensors" if "control flow" in text else text


def _of_sizes(node: fx.Node) -> bool:
    """Whether its value comes from sizes, types and devices alone."""
    if node.target is getattr:
        return node.args[1] not in VIEW_ATTRIBUTES
    if node.op == "call_method" and node.target in DESCRIBING:
        return True
    return node.op == "call_function" and bool(node.all_input_nodes) and all(map(_of_sizes, node.all_input_nodes))


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def surroundings() -> tuple[Any, ...]:
    """The modes under which an operation means something else, and which a program does not hold."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (*autocast, torch.is_inference_mode_enabled())


def random_state() -> tuple[Any, ...]:
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), (kind, keys.tobytes(), *rest)


def restore_random_state(state: tuple[Any, ...]) -> None:
    kind, keys, *rest = state[1]
    random.setstate(state[0])
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _in_assertion(code: Any, position: int) -> bool:
    """Whether the truth value at this place decides an assert statement alone.

    assert t <= 8        3.11: COMPARE_OP, POP_JUMP_FORWARD_IF_TRUE (over it), LOAD_ASSERTION_ERROR, RAISE_VARARGS
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOT_TAKEN")]
    offsets = {each.offset: index for index, each in enumerate(instructions)}
    index = offsets.get(position, len(instructions))
    while index < len(instructions) and instructions[index].opname in ("TO_BOOL", "COMPARE_OP"):  # from 3.13 on
        index += 1
    if index + 1 >= len(instructions) or "JUMP" not in instructions[index].opname:
        return False
    if instructions[index].opname.endswith("IF_TRUE"):
        failing = instructions[index + 1]
    elif instructions[index].opname.endswith("IF_FALSE"):
        failing = instructions[offsets[instructions[index].argval]]
    else:
        return False
    return failing.opname == "LOAD_ASSERTION_ERROR" or "AssertionError" in str(failing.argval)
