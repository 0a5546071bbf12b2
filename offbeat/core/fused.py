"""A stage's forward with BatchNorm, the sum after it and ReLU in one function (kernels/batch_norm.py).

A small network on a large GPU is limited by the number of its kernels; these three are half of a residual network's.
The module is traced once by torch.fx. Nothing else in it is changed: its other parts, parameters and buffers are the
module's own. What cannot be traced, or has nothing to join, runs as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offbeat.core.weights import Tensors, replacements
from offbeat.errors import NotFused, first_line, warn_caller
from offbeat.kernels.batch_norm import norm
from offbeat.kernels.conv3x3 import convolution, narrow

SUMS = (operator.add, operator.iadd, torch.add)
CLOSE = 0.1  # relative distance of outputs; wrongly traced ones are further apart
RELUS = (F.relu, torch.relu)


class Fused:
    """Called like `weights.call` for the module of stage k; `refused` is the reason why nothing is joined, if so."""

    def __init__(self, k: int, module: nn.Module, *, refused: str | None = None) -> None:
        self.k, self.module = k, module
        self.refused: str | None = None
        self.joined = nn.Module()  # runs the module's own parts
        self.tried = False
        if refused is None:
            self._trace()
        else:
            self._refuse(refused)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        warn_caller(f"stage {self.k} is not fused and runs as it is: {reason}", NotFused)

    def _trace(self) -> None:
        try:
            graph = fx.Tracer().trace(self.module)
        except Exception as error:  # of the model's own code, on a proxy instead of a tensor
            self._refuse(f"it cannot be traced: {first_line(error)}")
            return
        for node in list(graph.nodes):
            if _is_relu(self.module, node):
                _join(self.module, graph, node)
        for node in graph.nodes:
            if _is_norm(self.module, node):
                node.args, node.meta["relu"] = (node.args[0], None), False
            elif _is_narrow(self.module, node):
                node.meta["narrow"] = True
        self.joined = _Joined(self.module, graph)

    def __call__(self, parameters: Tensors | None, arguments: tuple[Any, ...], *, buffers: bool = True) -> Any:
        if self.refused is None and not self.tried:
            self.tried = True
            self._try(parameters, arguments)
        return self._run(self.refused is None, replacements(self.module, parameters, buffers=buffers), arguments)

    def _run(self, joined: bool, replaced: Tensors, arguments: tuple[Any, ...]) -> Any:
        if not joined:
            return functional_call(self.module, replaced, arguments)
        return functional_call(self.joined, {f"module.{name}": tensor for name, tensor in replaced.items()}, arguments)

    @torch.no_grad()
    def _try(self, parameters: Tensors | None, arguments: tuple[Any, ...]) -> None:
        """Compare with the module itself, leaving no trace in it: writes in place can be traced wrongly."""
        on_gpus = {leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_cuda}
        given = []
        for joined in (False, True):
            copied = pytree.tree_map_only(Tensor, Tensor.clone, arguments)
            with torch.random.fork_rng(devices=on_gpus):
                output = self._run(joined, replacements(self.module, parameters, buffers=False), copied)
            given.append([leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)])
        if not all(_close(one, other) for one, other in zip(*given, strict=True)):
            self._refuse("traced, it gives another result")


class _Joined(nn.Module):
    """Runs a graph on the parts of a module as they are when it is called."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        self.module = module
        self.run = _Interpreter(module, graph=graph)

    def forward(self, *arguments: Any) -> Any:
        return _plain(self.run.run(*arguments))


def _plain(output: Any) -> Any:
    """An output as the module returns it: a graph has list and dict types of its own."""
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    if type(output) is tuple:
        return tuple(map(_plain, output))
    return list(map(_plain, output)) if isinstance(output, list) else output


class _Interpreter(fx.Interpreter):
    extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        if "relu" not in n.meta and "narrow" not in n.meta:
            return super().run_node(n)
        layer, ((x, *other), _) = self.fetch_attr(str(n.target)), self.fetch_args_kwargs_from_env(n)
        return convolution(layer, x) if "narrow" in n.meta else norm(layer, x, *other, relu=n.meta["relu"])


def _join(module: nn.Module, graph: fx.Graph, relu: fx.Node) -> None:
    """Put a BatchNorm that ends in that ReLU, and what is added in between, into one node."""
    given: Any = relu.args[0]
    other: Any = None
    layer = given
    if isinstance(given, fx.Node) and given.op == "call_function" and given.target in SUMS and _alone(given):
        layer, other = given.args if len(given.args) == 2 and not given.kwargs else (None, None)
        if given.target is not operator.iadd and not _is_norm(module, layer):  # in place: only into the layer's output
            layer, other = other, layer
        if not isinstance(other, fx.Node):
            return
    if not _is_norm(module, layer) or not _alone(layer):
        return
    with graph.inserting_before(relu):
        joined = graph.call_module(layer.target, (layer.args[0], other))
    joined.meta["relu"] = True
    relu.replace_all_uses_with(joined)
    for node in (relu, given, layer):
        if not node._erased:
            graph.erase_node(node)


def _is_relu(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        return type(part) is nn.ReLU and not _has_hooks(part)
    return node.op == "call_function" and node.target in RELUS and len(node.args) == 1


def _is_norm(module: nn.Module, node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_module" or "relu" in node.meta:
        return False
    part = module.get_submodule(str(node.target))
    return type(part) is nn.BatchNorm2d and not _has_hooks(part) and len(node.args) == 1


def _is_narrow(module: nn.Module, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    part = module.get_submodule(str(node.target))
    return narrow(part) and not _has_hooks(part)


def _close(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of many layers in half precision; both may be unusable in the same way."""
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return one.shape == other.shape and bool((one - other).norm() <= CLOSE * one.norm())


def _alone(node: fx.Node) -> bool:
    return len(node.users) == 1


def _has_hooks(part: nn.Module) -> bool:
    """Whether it has hooks, which have to be called."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
