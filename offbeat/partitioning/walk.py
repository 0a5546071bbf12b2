"""Run a traced model unit by unit, to measure each of them, or next to its model, to verify it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core import codec
from offbeat.core.descriptions import USER_CODE_ERRORS
from offbeat.errors import UserError, first_line
from offbeat.partitioning.chunk import Whole
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import advice, settings_advice
from offbeat.partitioning.message import each_tensor, encode
from offbeat.partitioning.program import DEVICE, bind, execute, marks
from offbeat.partitioning.sample_trace import without_caches
from offbeat.partitioning.trace import Traced, Unit

Values = dict[str, Any]
Visit = Callable[[Unit, Callable[[Values], Values], Values], Values]


def run_units(traced: Traced, x: Any, visit: Visit) -> Values:
    """Run the units in order, in the model's current mode; returns the outputs of the last one.

    visit(unit, call, inputs) returns the outputs, call(inputs), and may call it several times. Inputs and
    outputs are values by name, as in `Traced.boundary`. Tensors are detached between units, and under grad mode the
    inputs require gradients where the model's would: call(inputs) yields the unit's own graph and no other. The layers
    are the model's own: running them moves BatchNorm statistics, so measure a copy of the model. Works on any device,
    also on meta.
    """
    mode = traced.model.training
    program, memory, last_use = traced.programs[mode], traced.memory[mode], traced.last_use[mode]
    carried = traced.carriers[mode]
    values = traced.inputs.values(x)
    device = _device(x)
    outputs: Values = {}
    for unit in traced.units:
        start, end = unit.spans[mode]
        ops = program.ops[start:end]
        made = {op.name for op in ops}
        needed = list(dict.fromkeys(ref for op in ops for ref in op.refs if ref not in made))
        kept = [op.name for op in ops if last_use.get(op.name, -1) >= end]
        changed = frozenset[str]().union(*memory.writes[start:end])
        steps = bind(ops, traced.model, {*needed, *kept})
        copied = [name for name in needed if memory.roots[name] & changed]

        def call(inputs: Values, *, steps: Any = steps, kept: Any = kept, copied: Any = copied) -> Values:
            here = {**inputs, DEVICE: device}
            for name in copied:  # a leaf that requires gradients must not be written, nor an input twice
                here[name] = each_tensor(here[name], Tensor.clone)
            execute(steps, here)
            return {name: here[name] for name in kept}

        inputs = {name: each_tensor(values[name], _leaf if name in carried else Tensor.detach) for name in needed}
        try:
            outputs = visit(unit, call, inputs)
        except UserError:
            raise
        except (*USER_CODE_ERRORS, AssertionError) as error:
            raise UserError(f"unit {unit.name} cannot run on this sample: {first_line(error)}") from error
        values.update(outputs)
        values = {name: value for name, value in values.items() if last_use.get(name, -1) >= end}
    return {str(mark): values[mark] for mark in marks(program.output) if mark in values}


def _device(x: Any) -> torch.device:
    tensors = (leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in tensors), torch.get_default_device())


def _leaf(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    wanted = torch.is_grad_enabled() and (tensor.is_floating_point() or tensor.is_complex())
    return detached.requires_grad_() if wanted else detached


def verify(traced: Traced, x: Any) -> None:
    """Refuse a trace that computes something else than its model on this batch; copies run, the model is left alone.

    Tracing sees one path through Python code. What decides otherwise at another time (an attribute that changes, a
    random generator of the model's own) it cannot see, but a run mostly shows it. On meta tensors only shapes are
    compared.
    """
    if traced.whole:
        return
    whole, chunk = copy_model(traced.model), traced.twin().as_one()
    without_caches(whole)
    for training in (True, False):
        untraced = Whole(whole.train(training), traced.inputs)
        if not _same(_output(untraced, x, whole), _output(chunk.train(training), x, whole)):
            mode = "training" if training else "evaluation"
            raise UserError(
                f"{type(traced.model).__name__} traced computes something else than untraced in {mode} mode: keep "
                f"what changes between runs out of its forward{settings_advice(traced.model)}, or give the pipeline a "
                "list of stages"
            )
    if traced.notes:  # units that are whole submodules may return anything
        traced.bar(_unsendable_cuts(traced.twin(), x))


def _unsendable_cuts(traced: Traced, x: Any) -> set[int]:
    """Where a value crosses that no message can contain, such as an object of a class of the model's own."""
    unsendable: set[str] = set()

    def visit(unit: Unit, call: Callable[[Values], Values], inputs: Values) -> Values:
        outputs = call(inputs)
        for name, value in outputs.items():
            try:
                codec.encode(encode(value), lambda tensor, path: [], purpose="cross stages")
            except UserError:
                unsendable.add(name)
        return outputs

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        run_units(traced, x, visit)
    return {cut for cut in range(1, len(traced.units)) if unsendable.intersection(traced.boundary(cut))}


def _output(run: Callable[[Any], Any], x: Any, model: nn.Module) -> Any:
    batch = pytree.tree_map_only(Tensor, torch.clone, x)
    cuda = sorted({leaf.device.index for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_cuda})
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(0)
        try:
            return run(batch)
        except (*USER_CODE_ERRORS, AssertionError) as error:
            raise UserError(f"the model cannot take this sample: {first_line(error)}{advice(model, x)}") from error


def _same(a: Any, b: Any) -> bool:
    """Whether two outputs have the same classes, keys and values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return a.is_meta or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and type(b) is dict and not isinstance(a, OrderedDict):  # a rare class, made a plain one
        a = dict(a)
    if isinstance(a, torch.Size) and type(b) is tuple:  # likewise
        a = tuple(a)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a):
        return all(_same(getattr(a, each.name, None), getattr(b, each.name, None)) for each in fields(a))
    return bool(a == b)
