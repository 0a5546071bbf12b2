"""A contiguous piece of a program as an nn.Module: one argument in, one value out.

Between stages go the values that later stages need, in the order of their making: several as a tuple, one as itself
(message.py has the form). After them come tied parameters (ties.py), each as the tensor that the batch uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import UserError
from offbeat.partitioning.inputs import Inputs
from offbeat.partitioning.message import decode, duplicate, each_tensor, encode
from offbeat.partitioning.program import DEVICE, BoundOp, Held, execute, fill


class Mode:
    """The training flag of one of the model's modules, shared with it; a copy has a flag of its own."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Mode:
        return Mode(SimpleNamespace(training=self.module.training))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mode, (SimpleNamespace(training=self.module.training),)


class Shell(nn.Module):
    """A placeholder for a module of which a stage has only some submodules: holds those under their names."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._offbeat_mode = Mode(original)  # no name that a child could have

    @property
    def training(self) -> bool:
        """As the original's: the model's train() and eval() reach its stages, and theirs reach it."""
        return bool(self._offbeat_mode.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_offbeat_mode" in self.__dict__:
            self._offbeat_mode.module.training = mode


@dataclass
class StageProgram:
    """What a chunk does in one mode; `output` is a template at the last stage, else `outputs` are sent on."""

    batch: Inputs | None  # at the first stage: how the batch becomes its inputs
    inputs: tuple[str, ...]
    steps: list[BoundOp]
    outputs: tuple[str, ...]
    output: Any
    copied: tuple[str, ...]  # inputs that it may write into
    constant: tuple[str, ...]  # inputs that no gradient flows through, as in the unsplit model
    last: bool
    tied_inputs: tuple[str, ...] = ()  # parameters of an earlier stage, as values
    tied_outputs: tuple[Any, ...] = ()  # templates: parameters that later stages use


class Chunk(Shell):
    """A stage of a traced model; runs the program of the mode that it is in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._offbeat_programs: dict[bool, StageProgram] = {}

    def forward(self, x: Any) -> Any:
        program = self._offbeat_programs[self.training]
        values = program.batch.values(x) if program.batch else self._receive(x, program)
        values[DEVICE] = self._device(x)
        execute(program.steps, values)
        if program.last:
            return fill(program.output, values)
        sent = encode(tuple(values[name] for name in program.outputs))
        sent += tuple(_sent(each, values) for each in program.tied_outputs)
        return sent[0] if len(sent) == 1 else sent

    def _receive(self, x: Any, program: StageProgram) -> dict[str, Any]:
        own, expected = len(program.inputs), len(program.inputs) + len(program.tied_inputs)
        content = (x,) if expected == 1 else tuple(x)
        if len(content) != expected:
            crossing = f"{expected} cross the cut"
            raise UserError(f"{len(content)} values arrived where {crossing}: cut all stages alike, in one mode")
        received = decode(content[:own], self._device(content))
        values = dict(zip((*program.inputs, *program.tied_inputs), (*received, *content[own:]), strict=True))
        copies: dict[int, Tensor] = {}
        for name in program.copied:
            values[name] = each_tensor(values[name], lambda tensor: _copy(tensor, copies))
        for name in program.constant:
            values[name] = each_tensor(values[name], Tensor.detach)
        return values

    def _device(self, content: Any) -> torch.device:
        found: list[Tensor] = []
        each_tensor(content, found.append)
        for tensor in chain(found, self.parameters(), self.buffers()):  # of a whole model only as far as needed
            return tensor.device
        return torch.get_default_device()


class Whole(Shell):
    """A whole model of several arguments as a module of one: the batch. The model's names stay."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__(model)
        self._offbeat_whole = SimpleNamespace(model=model, inputs=inputs)  # hidden from named_modules
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            setattr(self, held, getattr(model, held))  # the same dictionaries: functional_call reaches the model

    def forward(self, x: Any) -> Any:
        whole = self._offbeat_whole
        whole.model.training = self.training  # a copy's flag is not its model's
        return whole.inputs.call(whole.model, whole.inputs.values(x))


def as_stage(model: nn.Module, inputs: Inputs) -> nn.Module:
    """The model as a module of one argument, the batch."""
    return Whole(model, inputs) if inputs.keywords or len(inputs.names) > 1 else model


def _sent(parameter: Any, values: dict[str, Any]) -> Tensor:
    """A tied parameter as it is sent: by its stage a copy, since an update changes the parameter in place."""
    tensor: Tensor = fill(parameter, values)
    return tensor.clone() if isinstance(parameter, Held) else tensor


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy, the same one for one tensor under two names."""
    if id(tensor) not in copies:
        copies[id(tensor)] = duplicate(tensor)
    return copies[id(tensor)]
