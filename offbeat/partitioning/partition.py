"""A model cut into K stages where it balances."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from numbers import Integral
from statistics import fmean
from typing import Any, Literal, get_args

from torch import nn

from offbeat.errors import Unbalanced, UserError, unknown, warn_caller
from offbeat.partitioning.balance import StageSummary, imbalance, summarize, table
from offbeat.partitioning.choose import Trace, choose_trace
from offbeat.partitioning.chunk import as_stage
from offbeat.partitioning.cut import balanced, check_blocks, check_stages, cut, forward_flops, is_sequence, split, units
from offbeat.partitioning.inputs import Inputs, as_dict, depends_on_batch
from offbeat.partitioning.profile import Profile, profile, profile_blocks
from offbeat.partitioning.refine import refine
from offbeat.partitioning.solve import Memory, Solution, check_count, solve, too_few_units
from offbeat.partitioning.ties import Tied, TiedParameter
from offbeat.partitioning.timing import one_by_one
from offbeat.partitioning.trace import Traced, Way
from offbeat.partitioning.trace import trace as trace_model

Units = Literal["blocks", "layers"]
By = Literal["flops", "measured"]


@dataclass(frozen=True)
class Partition:
    """The stages of a model, and where they were cut: cut c is before unit c. Printed, it is a table of the stages.

    units       "blocks": the entries of an nn.Sequential; "layers": what tracing finds, so that cuts may be inside
                blocks
    names       of the units
    notes       what could not be traced, or was copied, and an imbalance worth a warning
    trace       how the layers were found: "fx" or "sample"
    costs       of the stages: FLOPs with bytes moved, or seconds where they were measured; empty where cuts were given
    unit_costs  of the units, measured in the same way; those of a stage add up to its cost
    legal       positions where the model may be cut
    ties        parameters that several stages use
    """

    stages: list[nn.Module]
    cuts: list[int]
    units: Units
    names: list[str]
    notes: list[str]
    trace: Way = "fx"
    costs: tuple[float, ...] = ()
    unit_costs: tuple[float, ...] = ()
    legal: tuple[int, ...] = ()
    ties: tuple[TiedParameter, ...] = ()
    count: Callable[[], Profile] | None = field(default=None, repr=False, compare=False)  # sizes of the units

    @property
    def K(self) -> int:  # noqa: N802
        return len(self.stages)

    @property
    def balance(self) -> float | None:
        """Mean over maximum of the stages' costs; 1 is perfect, None where cuts were given."""
        return fmean(self.costs) / max(self.costs) if any(self.costs) else None

    def summary(self) -> list[StageSummary]:
        """What each stage has and costs."""
        parameters = [sum({id(p): p.numel() for p in stage.parameters()}.values()) for stage in self.stages]
        found, costs = self._count(), list(self.costs)
        if found and not costs:
            flops = [float(unit.flops) for unit in found.units]  # what chooses cuts between blocks
            each = flops if self.units == "blocks" and any(flops) else found.costs()
            costs = [sum(each[start:end]) for start, end in pairwise([0, *self.cuts, len(self.names)])]
        tied = [sum(tie.bytes for tie in self.ties if tie.sent(k)) for k in range(1, self.K + 1)]
        return summarize(self.names, self.cuts, parameters, costs, found, tied=tied)

    def _count(self) -> Profile | None:
        try:
            return self.count() if self.count else None
        except UserError:  # given cuts need no sample that the model can take
            return None

    def __str__(self) -> str:
        return "\n".join([table(self.summary()), *(f"note: {note}" for note in self.notes)])


def default_units(model: nn.Module, K: int, cuts: Sequence[int | str] | None = None) -> Units:
    """Blocks where the model is a plain sequence with enough of them that share no parameters, and named cuts are its
    entries; else layers."""
    inside = [cut for cut in cuts or () if isinstance(cut, str) and cut not in model._modules]
    blocks = K == 1 or (is_sequence(model) and len(units(model)) >= K)
    if blocks and K > 1 and cuts is None and _ties_entries(model):
        return "layers"
    return "blocks" if blocks and not inside else "layers"


def needs_batch(
    model: nn.Module, K: int, *, cuts: Sequence[int | str] | None, units: Units, trace: Trace = "auto"
) -> bool:
    """Whether the stages can only be made with a batch: to choose cuts, to know which arguments of forward it fills, or
    to run it where torch.fx cannot trace all of the model."""
    if depends_on_batch(model) or (cuts is None and K > 1):
        return True
    if K == 1 or units == "blocks":
        return False
    return trace == "sample" or (trace == "auto" and bool(trace_model(model, way="fx").notes))


def _ties_entries(model: nn.Module) -> bool:
    """Whether two entries of a sequence have a parameter in common."""
    each = [{id(parameter) for parameter in entry.parameters()} for entry in units(model)]
    return sum(map(len, each)) > len(set[int]().union(*each))


def check_cutting(*, cuts: Any, units: Units | None, by: By, trace: Trace, tied: Tied) -> None:
    """Refuse what is wrong whatever the model is."""
    for name, value, allowed in (
        ("by", by, By),
        ("trace", trace, Trace),
        ("tied", tied, Tied),
        ("units", units, Units),
    ):
        if value not in get_args(allowed) and (name, value) != ("units", None):
            raise unknown(name, value, get_args(allowed))
    listed = isinstance(cuts, Collection) and not isinstance(cuts, str | Mapping | Set)
    right = listed and all(isinstance(cut, Integral | str) and not isinstance(cut, bool) for cut in cuts)
    if cuts is not None and not right:
        raise UserError(f"cuts={cuts!r}: give a list of numbers of units, or of names of modules, one less than K")


def partition(
    model: nn.Module,
    K: int,
    sample: Any = None,
    *,
    cuts: Sequence[int | str] | None = None,
    units: Units | None = None,
    by: By = "flops",
    speeds: Sequence[float] | None = None,
    memory: Memory | None = None,
    pinned: Sequence[int] = (),
    tied: Tied = "shared",
    trace: Trace = "auto",
) -> Partition:
    """Cut a model into K stages: at `cuts`, or at the best places for a sample.

    sample  a batch: a tensor, a tuple of arguments, or a dict of keyword arguments of forward
    cuts    K-1 of them: numbers of units, or names of modules ("layer3.0"), each the first of a stage
    units   where to cut: "blocks" or "layers", see Partition. Cuts between blocks that are chosen by time, speeds or
            memory are numbers of layers
    by      "flops" gives the same cuts everywhere (between layers it counts bytes moved, too); "measured" times the
            units here, then whole stages, and moves the cuts
    speeds  of the K workers
    pinned  cuts that must be among the chosen
    tied    what becomes of a parameter that several stages use: "shared": the first of them trains it, and sends it to
            the others with every batch; "copies": each trains a copy (of the model's, which is then untied; ties.py)
    trace   "fx": torch.fx; "sample": run the sample and record what happens between blocks; "auto": fx, or the sample
            where that gives fewer than K units or a better balance

    >>> import torch
    >>> made = partition(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2, torch.ones(1, 4))
    >>> made.cuts, [list(stage.state_dict()) for stage in made.stages]
    ([1], [['0.weight', '0.bias'], ['2.weight', '2.bias']])
    >>> print(made)
    stage  from  to  units  parameters  cost  memory  sends per batch
        1  0     0       1          20   50%    96 B             16 B
        2  1     2       2          20   50%   112 B                -
    """
    check_stages(model, K)
    check_cutting(cuts=cuts, units=units, by=by, trace=trace, tied=tied)
    sample = as_dict(sample)
    kind = units or default_units(model, K, cuts)
    if speeds is not None and not isinstance(speeds, Sized):
        raise UserError(f"speeds={speeds!r}: give a list of numbers, one per stage")
    if speeds is not None and len(speeds) != K:
        raise UserError(f"{len(speeds)} speeds for {K} stages: give one for each")
    if not isinstance(memory, Memory | None):
        raise UserError(f"memory={memory!r}: give offbeat.partitioning.Memory(...)")
    if not isinstance(pinned, Iterable):
        raise UserError(f"pinned={pinned!r}: give a list of numbers of units")
    if K == 1 and not cuts:
        return Partition([as_stage(model, Inputs.of(model, sample))], [], kind, _block_names(model), [])
    plain = by == "flops" and speeds is None and memory is None and not pinned
    if kind == "blocks" and (plain or cuts is not None):
        return _between_entries(model, K, sample, cuts)
    traced, found = choose_trace(model, K, sample, trace, tied=tied)
    legal = traced.legal(tied) if kind == "layers" else _legal_between_blocks(traced, tied)
    if len(legal) + 1 < K:
        raise _too_few_units(traced, K, len(legal) + 1, tied=tied, sample=sample)
    names, notes = [unit.name for unit in traced.units], []
    times: tuple[float, ...] = ()
    unit_costs: tuple[float, ...] = ()
    if cuts is None:
        if sample is None:
            raise UserError("there is no batch to cut the model by: give a sample, or cuts=[...]")
        found = found or profile(model, sample, timed=False, traced=traced)
        options: dict[str, Any] = {"speeds": speeds, "memory": memory, "pinned": pinned, "legal": legal}
        solution = solve_for(model, sample, K, by=by, found=found, traced=traced, **options)
        cuts, times, unit_costs = solution.cuts, solution.times, solution.costs
        remedy = "split it into submodules"
        if speeds is None and memory is None and not pinned:
            notes = _warned(imbalance(times, names, solution.cuts, solution.costs, remedy=remedy))
    chosen = positions(cuts, names, [unit.module for unit in traced.units])
    check_count(list(cuts), K)
    stages = traced.split(chosen, tied=tied)
    count = None if sample is None else partial(_counted, found, model, sample, traced)
    ties = tuple(traced.ties.values())
    return Partition(
        stages,
        chosen,
        "layers",
        names,
        [*traced.notes, *notes],
        trace=traced.way,
        costs=times,
        unit_costs=unit_costs,
        legal=tuple(legal),
        ties=ties,
        count=count,
    )


def _counted(found: Profile | None, model: nn.Module, sample: Any, traced: Traced) -> Profile:
    return found or profile(model, sample, timed=False, traced=traced)


def _between_entries(model: nn.Module, K: int, sample: Any, cuts: Sequence[int | str] | None) -> Partition:
    """The stages of an nn.Sequential cut between its entries."""
    names = _block_names(model)
    given = None if cuts is None else block_cuts(model, cuts)
    flops: list[int] = []
    if given is None and K > 1 and sample is not None:
        check_blocks(model, K)
        flops = forward_flops(model, sample)
    chosen = balanced(flops, K) if flops else cut(model, K, cuts=given, sample=sample)
    count = None if sample is None or not is_sequence(model) else partial(profile_blocks, model, sample)
    costs: tuple[float, ...] = ()
    notes: list[str] = []
    if flops:
        costs = tuple(float(sum(flops[start:end])) for start, end in pairwise([0, *chosen, len(flops)]))
        remedy = 'cut inside blocks: units="layers"'
        notes = _warned(imbalance(costs, names, chosen, flops, remedy=remedy))
    return Partition(
        split(model, chosen),
        chosen,
        "blocks",
        names,
        notes,
        costs=costs,
        unit_costs=tuple(map(float, flops)),
        legal=tuple(range(1, len(names))),
        count=count,
    )


def _too_few_units(traced: Traced, K: int, most: int, *, tied: Tied, sample: Any) -> UserError:
    why = f" ({'; '.join(traced.notes)})" if traced.notes else ""
    if traced.notes and sample is None:
        why += "; or give a sample: running it may show more units"
    if shared := traced.shared(tied):
        why += f"; {', '.join(shared)} cannot be used by two stages: give tied='copies', a copy for each"
    return too_few_units(K, most, why)


def positions(cuts: Sequence[int | str], names: Sequence[str], modules: Sequence[str]) -> list[int]:
    """The cuts as numbers of units; a name is that of a unit, or of the module whose first unit begins a stage.

    >>> positions(["layer1.1", 4], ["conv", "layer1.0", "layer1.1.conv", "layer1.1.add", "fc"], [""] * 5)
    [2, 4]
    """
    return [each if not isinstance(each, str) else _position(each, names, modules) for each in cuts]


def block_cuts(model: nn.Module, cuts: Sequence[int | str]) -> list[int]:
    """Cuts between the entries of a sequence as numbers."""
    names = _block_names(model)
    return positions(cuts, names, names)


def _position(name: str, names: Sequence[str], modules: Sequence[str]) -> int:
    inside = (name, f"{name}.")
    found = [n for n, each in enumerate(names) if each == name or each.startswith(inside[1])]
    found += [n for n, each in enumerate(modules) if each == name or each.startswith(inside[1])]
    if not found:
        around = next((each for each in names if name.startswith(f"{each}.")), None)
        if around:
            raise UserError(
                f"cut before {name!r}, which is inside the unit {around}: that is never cut; use {around!r}"
            )
        raise unknown("module in cuts", name, dict.fromkeys(each for each in [*modules, *names] if each))
    if min(found) == 0:
        raise UserError(f"cut before {name!r}, the first unit: there is nothing before it; name a later module")
    return min(found)


def _warned(line: str | None) -> list[str]:
    if line is None:
        return []
    warn_caller(line, Unbalanced)
    return [line]


def solve_for(
    model: nn.Module, sample: Any, K: int, *, by: By, found: Profile, traced: Traced, **options: Any
) -> Solution:
    """The best cuts for what the units cost; measured ones are corrected by what whole stages take."""
    if by == "flops":
        return solve(found.costs(), K, **options)
    timed = profile(model, sample, traced=traced)
    return refine(timed.costs(), K, one_by_one(traced.twin(), sample), **options).solution


def _block_names(model: nn.Module) -> list[str]:
    return list(model._modules) if is_sequence(model) else [type(model).__name__]


def _legal_between_blocks(traced: Traced, tied: Tied) -> list[int]:
    """Legal cuts between entries of a sequence."""
    top = [unit.module.partition(".")[0] for unit in traced.units]
    return [position for position in traced.legal(tied) if top[position] != top[position - 1]]
