"""What each unit costs: time forward and backward, parameters, bytes held for the backward, bytes on each boundary.

Times are medians of repetitions on the target device with the user's own sample. Sizes and FLOPs do not depend on the
machine and can be had alone, on the meta device, which is what deterministic cuts use.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from offbeat.cutting.trace import Traced, Unit, trace
from offbeat.cutting.walk import Values, run_units
from offbeat.errors import UserError, first_line


@dataclass(frozen=True)
class UnitCost:
    """One unit; seconds are 0 where nothing was timed."""

    name: str
    parameters: int
    parameter_bytes: int
    flops: int  # forward
    held_bytes: int  # saved by autograd for one batch, parameters not counted
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The costs of all units; `boundary_bytes[c]` is what a batch sends up at cut c (its gradient comes down)."""

    device: str
    timed: bool
    shapes: list[list[int]]
    units: list[UnitCost]
    boundary_bytes: list[int]
    legal_cuts: list[int]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "units": [UnitCost(**unit) for unit in values["units"]]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"profile {path} cannot be read ({first_line(error)}): measure it again") from error

    def costs(self) -> list[float]:
        """What a partition balances: seconds where they were measured, otherwise FLOPs."""
        return [unit.forward + unit.backward if self.timed else float(unit.flops) for unit in self.units]


def profile(model: nn.Module, sample: Any, *, timed: bool = True, repeat: int = 5) -> Profile:
    """Measure a copy of the model in training mode; with timed=False sizes and FLOPs alone.

    Those come from the meta device, without computing; a model that looks at values, which meta tensors do not have,
    runs once on its own device instead.
    """
    own = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if timed:
        return _profile(model, sample, own, repeat)
    try:
        return _profile(model, sample, torch.device("meta"), 0)
    except UserError:
        if own.type == "meta":
            raise
        return _profile(model, sample, own, 0)


def _profile(model: nn.Module, sample: Any, device: torch.device, repeat: int) -> Profile:
    model = copy.deepcopy(model).train()
    traced = trace(model.to(device))
    x = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)
    costs: list[UnitCost] = []
    sizes = {name: _bytes(value) for name, value in zip(traced.inputs, _inputs(traced, x), strict=True)}
    known = dict(model.named_parameters())

    def visit(unit: Unit, call: Callable[[Values], Values], inputs: Values) -> Values:
        own = [known[name] for name in unit.parameters if name in known]
        held = _Held(known.values())
        with held, FlopCounterMode(display=False) as counter:
            outputs = call(inputs)
        sizes.update({name: _bytes(value) for name, value in outputs.items()})
        seconds = _seconds(call, inputs, own, repeat, device) if repeat else (0.0, 0.0)
        numbers, size = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        costs.append(UnitCost(unit.name, numbers, size, counter.get_total_flops(), held.bytes, *seconds))
        return outputs

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        run_units(traced, x, visit)
    boundaries = [sum(sizes.get(name, 0) for name in traced.boundary(cut)) for cut in range(len(traced.units))]
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]
    return Profile(str(device), bool(repeat), shapes, costs, boundaries, list(traced.legal_cuts))


def _inputs(traced: Traced, x: Any) -> list[Any]:
    return [x] if len(traced.inputs) == 1 else list(x)


def _bytes(content: Any) -> int:
    leaves = pytree.tree_leaves(content)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


class _Held(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd saves, each memory once, parameters not counted."""

    def __init__(self, parameters: Any) -> None:
        self.bytes = 0
        seen = {id(parameter) for parameter in parameters}

        def pack(tensor: Tensor) -> Tensor:
            key = id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
            if key not in seen and id(tensor) not in seen:
                seen.add(key)
                self.bytes += tensor.numel() * tensor.element_size()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def _seconds(
    call: Callable[[Values], Values], inputs: Values, parameters: Sequence[Tensor], repeat: int, device: torch.device
) -> tuple[float, float]:
    """Median forward and backward seconds of one unit; on a GPU by events on its stream."""
    forwards, backwards = [], []
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    targets = [*leaves, *(parameter for parameter in parameters if parameter.requires_grad)]
    for attempt in range(repeat + 1):
        clock = _Clock(device)
        outputs = pytree.tree_leaves(call(inputs))
        forward = clock.lap()
        roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if roots and targets:
            incoming = [torch.ones_like(root) for root in roots]
            clock = _Clock(device)
            torch.autograd.grad(roots, targets, incoming, allow_unused=True)
            backward = clock.lap()
        else:
            backward = 0.0
        if attempt:  # the first one pays for memory and for choosing kernels
            forwards.append(forward)
            backwards.append(backward)
    return statistics.median(forwards), statistics.median(backwards)


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.began = time.perf_counter()

    def lap(self) -> float:
        if self.event is None:
            return time.perf_counter() - self.began
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self.event.elapsed_time(end) / 1000
