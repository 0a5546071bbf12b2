"""Both modes of a model recorded on a sample, and on other sizes, to be sure that the sample's are not frozen.

sample (4, 16)    the program
sample (5, 16)    must give the same program: batches of any length can be run
sample (4, 15)    if it gives the same program, so can this size; otherwise every batch must have the sample's
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.errors import UserError
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import Inputs
from offbeat.partitioning.program import Effects, Op, Program, Ref
from offbeat.partitioning.record import Untraceable, hooked, layer, untraceable_reason
from offbeat.partitioning.sample_recorder import SampleRecorder, opened_modules

MASKS = "transformers.masking_utils"
VARIED = 3  # distinct sizes of a sample, beside its batch size, that are tried with another value


@dataclass
class SampleTrace:
    """What was recorded: a program per mode, submodules that stay whole with the reason, written buffers, notes."""

    programs: dict[bool, Program]
    atomic: dict[str, str]
    written_buffers: set[str]
    notes: list[str] = field(default_factory=list)


def record_on_sample(model: nn.Module, inputs: Inputs, sample: Any, *, inside_blocks: bool = False) -> SampleTrace:
    """Record the model in both modes; raises Untraceable where its own forward cannot be recorded."""
    atomic: dict[str, str] = {path: "it has hooks" for path, module in model.named_modules() if hooked(module)}
    reason = atomic.get("") or untraceable_reason(model)
    if reason:
        raise Untraceable(reason)
    runs = _Runs(model, inputs, atomic, opened_modules(model, inside_blocks=inside_blocks))
    values = inputs.values(sample)
    batch, sizes = _sizes(values)
    while True:
        found = runs.until_stable(values)
        small, programs = runs.on_another_batch(values, batch)
        owner = None if programs is None else _first_difference(found.programs, programs)
        if not owner:
            break
        atomic[owner] = "its operations depend on the batch size"
    frozen = batch is not None and (programs is None or owner == "")
    fixed = {size for size in sizes[:VARIED] if size < 2 or not _free(runs, found, values if frozen else small, size)}
    fixed |= set(sizes[VARIED:])
    check = FixedInputs.of(values, fixed, batch=frozen)
    checked = {mode: check.added_to(program) for mode, program in found.programs.items()}
    called = {op.target for program in checked.values() for op in program.ops if op.kind == "call_module"}
    whole = {path: why for path, why in atomic.items() if path in called and not layer(model, path)}
    if frozen:
        runs.notes.append(f"only batches of {batch} samples can be run: the forward depends on the batch size")
    return SampleTrace(checked, whole, found.written_buffers, runs.notes)


def _free(runs: _Runs, found: SampleTrace, values: Mapping[str, Any], size: int) -> bool:
    shorter = runs.varied(_changed(values, 1, size, size - 1))
    return shorter is not None and _first_difference(found.programs, shorter) is None


class _Runs:
    """Recordings of one model, with what was learnt from those that failed."""

    def __init__(self, model: nn.Module, inputs: Inputs, atomic: dict[str, str], opened: set[str]) -> None:
        self.model, self.inputs, self.atomic, self.opened = model, inputs, atomic, opened
        self.functions = mask_functions(model)
        self.notes: list[str] = []

    def until_stable(self, values: Mapping[str, Any]) -> SampleTrace:
        """Record again until no further submodule or function must be called as a whole."""
        while True:
            recorders = {training: self._recorder(training) for training in (True, False)}
            programs = {mode: self._run(recorder, values) for mode, recorder in recorders.items()}
            failed = {path: why for recorder in recorders.values() for path, why in recorder.failed.items()}
            functions = {each for recorder in recorders.values() for each in recorder.found} - self.functions
            if not failed and not functions:
                written = {name for recorder in recorders.values() for name in recorder.written_buffers}
                return SampleTrace(programs, self.atomic, written)
            self.functions |= functions
            if not functions:
                self.atomic.update(failed)

    def on_another_batch(
        self, values: Mapping[str, Any], batch: int | None
    ) -> tuple[Mapping[str, Any], dict[bool, Program] | None]:
        """The sample with another batch size, a small one if the model runs on it, and the programs for it."""
        for rows in [] if batch is None else [2, batch + 1] if batch > 2 else [batch + 1]:
            other = _changed(values, 0, batch or 0, rows)
            programs = self.varied(other)
            if programs is not None:
                return other, programs
        return values, None

    def varied(self, values: Mapping[str, Any]) -> dict[bool, Program] | None:
        """The programs for other sizes; None where the model cannot run on them."""
        programs = {}
        for training in (True, False):
            recorder = self._recorder(training)
            try:
                programs[training] = self._run(recorder, values)
            except (Untraceable, UserError):
                return None
            if recorder.failed or recorder.found - self.functions:
                return None
        return programs

    def _recorder(self, training: bool) -> SampleRecorder:
        shadow, notes = copy_for_recording(self.model, training)
        self.notes = notes
        return SampleRecorder(shadow, self.model, opened=self.opened, atomic=self.atomic, functions=self.functions)

    def _run(self, recorder: SampleRecorder, values: Mapping[str, Any]) -> Program:
        own = {name: pytree.tree_map_only(Tensor, _input, value) for name, value in values.items()}
        devices = {leaf.device.index for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor) and leaf.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            return recorder.program(own, self.inputs.call)


def mask_functions(model: nn.Module) -> set[tuple[Any, str]]:
    """Functions of transformers that make attention masks: whether there is one depends on padding and lengths."""
    found = set()
    for forward in {inspect.unwrap(type(module).forward) for module in model.modules()}:
        module = sys.modules.get(forward.__module__)
        for name, value in vars(module).items() if module else ():
            if inspect.isfunction(value) and value.__module__ == MASKS:
                found.add((module, name))
    return found


def _input(tensor: Tensor) -> Tensor:
    """A copy through which gradients flow, and that may be written into."""
    wanted = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(wanted).clone() if wanted else tensor.clone()


def copy_for_recording(model: nn.Module, training: bool) -> tuple[nn.Module, list[str]]:
    """A copy that shares the memory of parameters alone, without caches, and what to know about it.

    All floating-point parameters require gradients there: what a user freezes now may be trained later.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        wanted = parameter.is_floating_point() or parameter.is_complex()
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=wanted)
    try:
        shadow = copy_model(model, memo)
    except UserError as error:
        raise Untraceable(str(error)) from error
    notes = without_caches(shadow)
    # A model in training mode may have parts that its user set to evaluation mode: they stay so.
    return shadow if training and model.training else shadow.train(training), notes


def without_caches(model: nn.Module) -> list[str]:
    """Switch off the caches of keys and values in a copy of a model: they would have to cross the cuts."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in list(configs.values()):
        configs.update({id(value): value for value in vars(config).values() if hasattr(value, "use_cache")})
    cached = [config for config in configs.values() if getattr(config, "use_cache", None)]
    for config in cached:
        config.use_cache = False
    return ["use_cache is off in the stages: their output has no cache of keys and values"] if cached else []


@dataclass(frozen=True)
class FixedInputs:
    """Refuses a batch that is not like the sample where the program depends on it."""

    shapes: tuple[tuple[str, tuple[int | None, ...]], ...]  # argument, its sizes; None: any
    values: tuple[tuple[str, Any], ...]  # arguments that are no tensors

    @classmethod
    def of(cls, inputs: Mapping[str, Any], sizes: set[int], *, batch: bool) -> FixedInputs:
        """`sizes` that must stay; batch: dimension 0 must, too."""
        shapes = [
            (name, (value.shape[0] if batch else None, *(size if size in sizes else None for size in value.shape[1:])))
            for name, value in inputs.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        values = [(name, value) for name, value in inputs.items() if isinstance(value, bool | float | str | None)]
        return cls(tuple((name, shape) for name, shape in shapes if any(shape)), tuple(values))

    def __call__(self, *given: Any) -> None:
        for value, (name, sizes) in zip(given, self.shapes, strict=False):
            shape = tuple(value.shape)
            if len(shape) != len(sizes) or any(
                size not in (None, here) for size, here in zip(sizes, shape, strict=True)
            ):
                allowed = ", ".join("any" if size is None else str(size) for size in sizes)
                raise UserError(
                    f"{name} of shape {shape} but the model was traced for ({allowed}): give batches of this shape, "
                    "or partition the model with a sample of the new one"
                )
        for value, (name, expected) in zip(given[len(self.shapes) :], self.values, strict=True):
            if value != expected:
                raise UserError(
                    f"{name} = {value!r} but the model was traced for {expected!r}: give every batch the same, "
                    "or partition the model with a sample of the new one"
                )

    def added_to(self, program: Program) -> Program:
        """The program with this check before it."""
        args = tuple(Ref(name) for name, _ in (*self.shapes, *self.values))
        first = Op("check_inputs", "call_function", self, args, {}, "", True, Effects((), (), False))
        return Program(program.inputs, (first, *program.ops), program.output) if args else program


def _sizes(values: Mapping[str, Any]) -> tuple[int | None, list[int]]:
    """The batch size, and the distinct other sizes of the sample's tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(dict(values)) if isinstance(leaf, Tensor) and leaf.dim()]
    batch = tensors[0].shape[0] if tensors else None
    return batch, list(dict.fromkeys(size for tensor in tensors for size in tensor.shape[1:]))


def _changed(values: Mapping[str, Any], first_dim: int, size: int, to: int) -> dict[str, Any]:
    """The sample with another size: dimension 0 (a sample more) or all dimensions from 1 on that have it (cut)."""

    def change(tensor: Tensor) -> Tensor:
        for dim, length in enumerate(tensor.shape):
            if length == size and dim >= first_dim and (first_dim or dim == 0):
                index = torch.arange(to, device=tensor.device).clamp(max=size - 1)
                tensor = tensor.index_select(dim, index)
        return tensor

    return {name: pytree.tree_map_only(Tensor, change, value) for name, value in values.items()}


def _first_difference(one: dict[bool, Program], other: dict[bool, Program]) -> str | None:
    """The submodule at which two recordings differ; None where they do not."""
    for mode, program in one.items():
        ops, others = program.ops, other[mode].ops
        for a, b in zip(ops, others, strict=False):
            if a != b:
                return a.owner
        if len(ops) != len(others) or program.output != other[mode].output:
            return ""
    return None
