"""What each unit costs: time forward and backward, parameters, bytes held for the backward, bytes on each boundary.

Times are medians of repetitions on the target device with the user's own sample. Units of equal modules with the same
name, numbers left out, and the same sizes and FLOPs, such as a layer of equal blocks, share the median of their times,
unless these are very different: other work on the machine, which comes and goes, then affects all of them alike. Sizes
and FLOPs do not depend on the machine and can be had alone, on the meta device, which is what deterministic cuts use.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from offbeat.errors import UserError, first_line
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.trace import Traced, Unit, trace
from offbeat.partitioning.walk import Values, run_units

# FLOPs that a byte read or written by a unit counts, where nothing is timed. By FLOPs alone only convolutions and
# products would weigh anything, though the rest takes a fifth of the time of ResNets for CIFAR. A fixed number, so that
# cuts are the same everywhere: chosen among 0, 4, 8, ..., 128 by the measured balance of four ResNets on a CPU.
FLOPS_PER_BYTE = 8
BUDGET = 8.0  # seconds to time all units in, where a model is deep; two laps of each in any case
DIFFERENT = 2.0  # times as long: a unit that is alike by its sizes computes something else
ENOUGH = 0.02  # seconds of laps for one unit: of a quick one, more than `repeat`


@dataclass(frozen=True)
class UnitCost:
    """One unit; seconds are 0 where nothing was timed."""

    name: str
    parameters: int
    parameter_bytes: int
    flops: int  # forward
    held_bytes: int  # saved by autograd for one batch, and by no earlier unit; parameters and the batch not counted
    moved_bytes: int  # of its inputs, outputs and parameters
    forward: float = 0.0
    backward: float = 0.0
    held_input_bytes: int = 0  # of held_bytes: of its inputs, which a stage that begins with it holds in any case


@dataclass(frozen=True)
class Profile:
    """The costs of all units; `boundary_bytes[c]` is what a batch sends at cut c (its gradient is sent back)."""

    device: str
    timed: bool
    shapes: list[list[int]]
    units: list[UnitCost]
    boundary_bytes: list[int]
    legal_cuts: list[int]
    threads: int = 1  # of torch, at the measuring
    model: str = ""  # the name that its user gave it

    def misfit(self, sample: Any, traced: Traced, *, model: str, device: str) -> str | None:
        """What makes this profile another model's, or another setting's; None where it fits."""
        facts = {
            "model": (self.model, model),
            "shape": (self.shapes, _shapes(sample)),
            "device": (self.device, device),
            "number of threads": (self.threads, torch.get_num_threads()),
        }
        for name, (there, here) in facts.items():
            if there != here:
                return f"its {name} is {there}, here it is {here}"
        same = [unit.name for unit in self.units] == [unit.name for unit in traced.units]
        same = same and self.legal_cuts == traced.legal_cuts and self.timed
        return None if same else "its units are not the model's, or were not timed"

    def save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(f"profile {path} cannot be written ({reason}): give another file") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "units": [UnitCost(**unit) for unit in values["units"]]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"profile {path} cannot be read ({first_line(error)}): measure it again") from error

    def held_bytes(self, start: int, end: int) -> int:
        """What a batch in flight holds in a stage of these units: its input, and what autograd saves."""
        units = self.units[start:end]
        return self.boundary_bytes[start] - units[0].held_input_bytes + sum(unit.held_bytes for unit in units)

    def costs(self) -> list[float]:
        """What a partition balances: seconds where they were measured, otherwise FLOPs, with bytes moved as FLOPs."""
        if self.timed:
            return [unit.forward + unit.backward for unit in self.units]
        return [float(unit.flops + FLOPS_PER_BYTE * unit.moved_bytes) for unit in self.units]


def profile(
    model: nn.Module, sample: Any, *, timed: bool = True, repeat: int = 5, traced: Traced | None = None
) -> Profile:
    """Measure a copy of the model in training mode; with timed=False sizes and FLOPs alone.

    Those come from the meta device, without computing; a model that reads values, which meta tensors do not have,
    runs once on its own device instead. `traced` is the model's trace, where there is one already. Each unit is
    repeated `repeat` times and for ENOUGH seconds; of a deep model less often: all repetitions together are to take
    BUDGET seconds.
    """
    own = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if timed:
        return _profile((traced or trace(model, sample)).twin(), sample, own, repeat)
    traced = traced or trace(model, sample)
    try:
        return _profile(traced.twin(device="meta"), sample, torch.device("meta"), 0)
    except UserError:
        if own.type == "meta":
            raise
        return _profile(traced.twin(), sample, own, 0)


def profile_blocks(model: nn.Module, sample: Any) -> Profile:
    """Sizes and FLOPs of the entries of an nn.Sequential, counted on the meta device."""
    dry = copy_model(model).train().to("meta")
    x = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), sample)
    shapes, costs, boundaries = _shapes(sample), [], []
    held = _Held(x, *dry.parameters(), *dry.buffers())
    for name, block in dry._modules.items():
        assert block is not None
        own = list(block.parameters())
        boundaries.append(_bytes(x))
        try:
            with held.by(x), FlopCounterMode(display=False) as counter, torch.enable_grad():
                y = block(pytree.tree_map_only(Tensor, Tensor.detach, x))
        except Exception as error:
            raise UserError(f"unit {name} cannot be counted on this sample: {first_line(error)}") from error
        size = sum(p.numel() * p.element_size() for p in own)
        moved, flops = size + _bytes(x) + _bytes(y), counter.get_total_flops()
        count, of_inputs = sum(p.numel() for p in own), held.of_inputs
        costs.append(UnitCost(name, count, size, flops, held.bytes, moved, held_input_bytes=of_inputs))
        x = y
    return Profile("meta", False, shapes, costs, boundaries, list(range(1, len(costs))), torch.get_num_threads())


def _profile(traced: Traced, sample: Any, device: torch.device, repeat: int) -> Profile:
    """Of a traced copy."""
    model = traced.model.train()
    x = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)
    costs: list[UnitCost] = []
    sizes = {name: _bytes(value) for name, value in traced.inputs.values(x).items()}
    known = dict(model.named_parameters())
    held = _Held(x, *known.values(), *model.buffers())
    share = BUDGET / len(traced.units)

    def visit(unit: Unit, call: Callable[[Values], Values], inputs: Values) -> Values:
        own = [known[name] for name in unit.parameters if name in known]
        with held.by(inputs), FlopCounterMode(display=False) as counter:
            outputs = call(inputs)
        sizes.update({name: _bytes(value) for name, value in outputs.items()})
        seconds = _seconds(call, inputs, own, repeat, device, share) if repeat else (0.0, 0.0)
        count, size = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        moved = size + sum(_bytes(value) for values in (inputs, outputs) for value in values.values())
        flops = counter.get_total_flops()
        costs.append(UnitCost(unit.name, count, size, flops, held.bytes, moved, *seconds, held.of_inputs))
        return outputs

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        run_units(traced, x, visit)
    boundaries = [sum(sizes.get(name, 0) for name in traced.boundary(cut)) for cut in range(len(traced.units))]
    threads, legal = torch.get_num_threads(), list(traced.legal_cuts)
    if repeat:
        described = cache(lambda path: repr(model.get_submodule(path)))
        costs = with_shared_times(costs, [described(unit.module) for unit in traced.units])
    return Profile(str(device), bool(repeat), _shapes(sample), costs, boundaries, legal, threads)


def with_shared_times(units: Sequence[UnitCost], modules: Sequence[str]) -> list[UnitCost]:
    """The units, each with the median times of all that are alike, if its own times are at most DIFFERENT times as long
    or as short. `modules` describes the module of each, as repr does.

    >>> times = ("block0", 1.0), ("block1", 1.5), ("block2", 1.1), ("block3", 4.0), ("head", 9.0)
    >>> units = [UnitCost(f"{name}.up", 4, 16, 8, 0, 32, forward=seconds) for name, seconds in times]
    >>> [unit.forward for unit in with_shared_times(units, ["Linear(2, 2)"] * 5)]
    [1.3, 1.3, 1.3, 4.0, 9.0]
    >>> [unit.forward for unit in with_shared_times(units[:3], ["Conv1d(2, 2, dilation=3)", *["Conv1d(2, 2)"] * 2])]
    [1.0, 1.3, 1.3]
    """
    costs = [replace(unit, name=re.sub(r"\d+", "", unit.name), forward=0.0, backward=0.0) for unit in units]
    kinds = list(zip(costs, modules, strict=True))
    alike: dict[tuple[UnitCost, str], list[UnitCost]] = defaultdict(list)
    for kind, unit in zip(kinds, units, strict=True):
        alike[kind].append(unit)
    return [_with_median(unit, alike[kind]) for kind, unit in zip(kinds, units, strict=True)]


def _with_median(unit: UnitCost, alike: Sequence[UnitCost]) -> UnitCost:
    forward, backward = (statistics.median(getattr(one, side) for one in alike) for side in ("forward", "backward"))
    own, shared = unit.forward + unit.backward, forward + backward
    fits = shared <= DIFFERENT * own and own <= DIFFERENT * shared
    return replace(unit, forward=forward, backward=backward) if fits else unit


def _shapes(sample: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]


def _bytes(content: Any) -> int:
    leaves = pytree.tree_leaves(content)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


class _Held:
    """Bytes of the storages that autograd saves in a unit and in none before; `of_inputs`: those of its inputs.

    A weak reference keeps the identity of a storage that is gone from being used again.
    """

    def __init__(self, *known: Any) -> None:
        self.seen = {reference.cdata: reference for reference in map(_reference, _strided(known))}
        self.inputs: set[int] = set()
        self.bytes = self.of_inputs = 0

    @contextmanager
    def by(self, inputs: Any) -> Iterator[None]:
        """Around the forward of a unit with these inputs."""
        self.bytes = self.of_inputs = 0
        self.inputs = {_reference(tensor).cdata for tensor in _strided(inputs)}
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        for each in _strided(tensor):
            reference = _reference(each)
            if self.seen.setdefault(reference.cdata, reference) is reference:
                size = each.untyped_storage().nbytes()
                self.bytes += size
                self.of_inputs += size if reference.cdata in self.inputs else 0
        return tensor


def _strided(content: Any) -> Iterator[Tensor]:
    """The tensors of a pytree that have a storage."""
    leaves = (leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor))
    return (leaf for leaf in leaves if leaf.layout is torch.strided)


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _seconds(
    call: Callable[[Values], Values],
    inputs: Values,
    parameters: Sequence[Tensor],
    repeat: int,
    device: torch.device,
    share: float,
) -> tuple[float, float]:
    """Median forward and backward seconds of one unit: of at least `repeat` laps where they fit into `share` seconds,
    and of more where they are short. On a GPU by events on its stream."""
    forwards, backwards = [], []
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    targets = [*leaves, *(parameter for parameter in parameters if parameter.requires_grad)]
    began = time.perf_counter()
    for attempt in itertools.count():
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
        if not attempt:  # it pays for memory and for choosing kernels
            began = time.perf_counter()
            continue
        forwards.append(forward)
        backwards.append(backward)
        taken = time.perf_counter() - began
        if (attempt >= min(repeat, 2) and taken > share) or (attempt >= repeat and taken > ENOUGH):
            break
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
