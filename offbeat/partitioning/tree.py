"""A stage's part of the model's tree of modules: its own layers under their own names, placeholders for the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from offbeat.partitioning.chunk import Shell


def with_copies(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """The layer itself, or where it holds something to be copied a copy of it that shares all else."""
    tensors = [tensor for each in module.modules() for _, tensor in own_tensors(each)]
    if not copies.keys() & {id(module), *map(id, tensors)}:
        return module
    return copy.deepcopy(module, {id(tensor): copies.get(id(tensor), tensor) for tensor in tensors})


def put(chunk: Shell, model: nn.Module, path: str, module: nn.Module) -> None:
    """Give the chunk a layer at its path."""
    parent, _, name = path.rpartition(".")
    shell = shell_at(chunk, model, parent)
    if isinstance(shell, Shell):  # else it is inside a layer that the stage has as a whole
        shell._modules[name] = module


def shell_at(chunk: Shell, model: nn.Module, path: str) -> nn.Module:
    """The module at this path of the chunk, made of shells where it is not there."""
    here: nn.Module = chunk
    original = model
    for name in path.split(".") if path else []:
        original = original.get_submodule(name)
        if name not in here._modules:
            here._modules[name] = Shell(original)
        here = here.get_submodule(name)
    return here


def hold(shell: nn.Module, original: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    """Put a tensor where, and as what, the original module has it; persistent=False: another stage saves it."""
    if not isinstance(shell, Shell):
        return
    if name in original._parameters:
        shell.register_parameter(name, tensor)  # type: ignore[arg-type]
    elif name in original._buffers:
        saved = persistent and name not in original._non_persistent_buffers_set
        shell.register_buffer(name, tensor, persistent=saved)
    else:
        shell.__dict__[name] = tensor


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, buffers and tensor attributes by name."""
    for holder in (module._parameters, module._buffers, vars(module)):
        yield from ((name, value) for name, value in holder.items() if isinstance(value, Tensor))
