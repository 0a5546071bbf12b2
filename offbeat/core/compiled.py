"""A stage's forward through torch.compile: the module on the tensors of a version, as one graph.

One graph or none: a forward that was cut in two by something that cannot be compiled would be half done, statistics of
BatchNorm included, when its other half fails. What cannot be compiled runs uncompiled, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from offbeat.core.weights import Tensors, replacements
from offbeat.errors import NotCompiled, first_line, warn_caller

BACKEND = "inductor"
CompiledCall = Callable[[Tensors, tuple[Any, ...]], Any]


class Compiled:
    """Called like `weights.call` for the module of stage k; `refused` is the reason why it is not compiled, if so."""

    def __init__(self, k: int, module: nn.Module, *, refused: str | None = None) -> None:
        self.k, self.module = k, module
        self.refused: str | None = None
        self.run: CompiledCall | None = None
        if refused is not None:
            self._refuse(refused)

    def __call__(self, parameters: Tensors | None, arguments: tuple[Any, ...], *, buffers: bool = True) -> Any:
        replaced = replacements(self.module, parameters, buffers=buffers)
        failure = None
        if self.refused is None:
            try:
                return self._compiled(replaced, arguments)
            except Exception as error:  # of the compiler or of the model: those of the model recur below
                failure = error
        output = functional_call(self.module, replaced, arguments)
        if failure is not None:
            self._refuse(first_line(getattr(failure, "inner_exception", failure)))
        return output

    def _compiled(self, replaced: Tensors, arguments: tuple[Any, ...]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler about its own parts, whenever it compiles
            if self.run is None:
                self.run = _compile(_function(self.k, self.module))
            return self.run(replaced, arguments)

    def _refuse(self, reason: str) -> None:
        self.refused, self.run = reason, None
        warn_caller(f"stage {self.k} is not compiled and runs as it is: {reason}", NotCompiled)


def _compile(function: Callable[..., Any]) -> CompiledCall:
    import torch._functorch.config as functorch  # here, since it is slow to load

    functorch.donated_buffer = False  # else a backward with retain_graph=True raises
    # The random numbers of torch itself: dropout draws what it draws without compiling.
    options: dict[str, Any] = {"options": {"fallback_random": True}} if BACKEND == "inductor" else {}
    return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False, **options)


def _function(k: int, module: nn.Module) -> Callable[..., Any]:
    """A function with a code object of its own: torch limits how often it compiles one, over all stages."""

    def run(replaced: Tensors, arguments: tuple[Any, ...]) -> Any:
        return functional_call(module, replaced, arguments)

    name = f"stage_{k}"
    return FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
