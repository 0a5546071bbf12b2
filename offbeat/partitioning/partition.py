"""A model cut into K stages where it balances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import nn

from offbeat.errors import UserError, unknown
from offbeat.partitioning.cut import check_stages, cut, is_sequence, split, units
from offbeat.partitioning.profile import profile
from offbeat.partitioning.solve import Memory, Solution, solve
from offbeat.partitioning.timing import Load, Meter, one_by_one
from offbeat.partitioning.trace import Traced, trace
from offbeat.partitioning.walk import verify

Units = Literal["blocks", "layers"]
By = Literal["flops", "measured"]
ROUNDS = 3  # of measuring whole stages and moving the cuts
WORTHWHILE = 0.005  # of the slowest stage: less than this to gain is noise, and ends the rounds
LAPS, LONGEST = 4, 5.0  # laps of the slowest stage for which all run at once, and the most seconds that may take


@dataclass(frozen=True)
class Partition:
    """The stages of a model, and where they were cut; unit c is the first behind a cut c.

    units   "blocks": the entries of an nn.Sequential; "layers": what torch.fx traces, so that cuts may lie in blocks
    names   of the units
    notes   what could not be traced, or was copied
    """

    stages: list[nn.Module]
    cuts: list[int]
    units: Units
    names: list[str]
    notes: list[str]

    @property
    def K(self) -> int:  # noqa: N802
        return len(self.stages)


def default_units(model: nn.Module, K: int) -> Units:
    """Blocks where the model is a plain sequence with enough of them, otherwise layers."""
    return "blocks" if K == 1 or (is_sequence(model) and len(units(model)) >= K) else "layers"


def partition(
    model: nn.Module,
    K: int,
    sample: Any = None,
    *,
    cuts: Sequence[int] | None = None,
    units: Units | None = None,
    by: By = "flops",
    speeds: Sequence[float] | None = None,
    memory: Memory | None = None,
    pinned: Sequence[int] = (),
    untie: bool = False,
) -> Partition:
    """Cut a model into K stages: where `cuts` say, or at the best places for a sample.

    by="flops" gives the same cuts everywhere (between layers it counts bytes moved, too); "measured" times the units
    here, then whole stages, and moves the cuts.
    `speeds` are those of the K workers, `pinned` cuts that must be among the chosen, `untie` copies parameters that two
    stages use instead of refusing them.

    >>> import torch
    >>> made = partition(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), 2, torch.ones(1, 4))
    >>> made.cuts, [list(stage.state_dict()) for stage in made.stages]
    ([1], [['0.weight', '0.bias'], ['2.weight', '2.bias']])
    """
    check_stages(model, K)
    kind = units or default_units(model, K)
    if kind not in get_args(Units):
        raise unknown("units", kind, get_args(Units))
    if by not in get_args(By):
        raise unknown("partition", by, get_args(By))
    if speeds is not None and len(speeds) != K:
        raise UserError(f"{len(speeds)} speeds for {K} stages: give one for each")
    if kind == "blocks" and by == "flops" and speeds is None and memory is None and not pinned:
        chosen = cut(model, K, cuts=cuts, sample=sample)
        return Partition(split(model, chosen), chosen, "blocks", _block_names(model), [])
    if kind == "blocks" and cuts is not None:
        chosen = cut(model, K, cuts=cuts)
        return Partition(split(model, chosen), chosen, "blocks", _block_names(model), [])
    if K == 1:
        return Partition([model], [], "layers", [type(model).__name__], [])
    traced = trace(model)
    legal = traced.legal(untie=untie)
    if kind == "blocks":
        legal = _between_blocks(traced, model)
    if len(legal) + 1 < K:
        why = f" ({'; '.join(traced.notes)})" if traced.notes else ""
        if traced.shared and not untie:
            names = ", ".join(traced.shared)
            why += f"; {names} cannot be used by two stages: cut by offbeat.partition(..., untie=True), a copy each"
        count = len(legal) + 1
        raise UserError(f"{K} stages but only {count} unit{'s' * (count > 1)} to cut between: use K <= {count}{why}")
    if cuts is None:
        if sample is None:
            raise UserError("there is no batch to cut the model by: give a sample, or cuts=[...]")
        verify(traced, sample)
        cuts = solve_for(
            model, sample, K, by=by, speeds=speeds, memory=memory, pinned=pinned, legal=legal, traced=traced
        ).cuts
    if len(cuts) != K - 1:
        raise UserError(f"{len(cuts)} cuts {list(cuts)} make {len(cuts) + 1} stages but K = {K}: give {K - 1} cuts")
    stages = traced.split(list(cuts), untie=untie)
    return Partition(stages, list(cuts), "layers", [unit.name for unit in traced.units], list(traced.notes))


def solve_for(
    model: nn.Module,
    sample: Any,
    K: int,
    *,
    by: By = "flops",
    speeds: Sequence[float] | None = None,
    memory: Memory | None = None,
    pinned: Sequence[int] = (),
    legal: Sequence[int] | None = None,
    traced: Traced | None = None,
) -> Solution:
    """The best cuts for what the units cost; measured ones are corrected by what whole stages take."""
    found = profile(model, sample, timed=by == "measured", traced=traced)
    options: dict[str, Any] = {"speeds": speeds, "memory": memory, "pinned": pinned, "legal": legal or found.legal_cuts}
    if by == "flops":
        return solve(found.costs(), K, **options)
    meter = one_by_one((traced or trace(model)).twin(), sample)
    return refine(found.costs(), K, meter, **options)


def refine(
    costs: Sequence[float], K: int, meter: Meter, *, M: int = 1, speeds: Sequence[float] | None = None, **options: Any
) -> Solution:
    """The best cuts for measured units, moved by what whole stages take: a stage is not the sum of its units.

    `meter` times the stages between cuts; an update counts as a part of each of its M batches.
    """
    costs = list(costs)
    solution = solve(costs, K, speeds=speeds, **options)
    best, slowest = solution, float("inf")
    for _ in range(ROUNDS if K > 1 else 0):
        load = Load([1] * K, M, seconds=min(LONGEST, LAPS * max(solution.times)))
        taken = [stage.batch(M) for stage in meter(solution.cuts, load)]
        times = []
        for k, (start, end) in enumerate(pairwise([0, *solution.cuts, len(costs)])):
            speed = speeds[k] if speeds else 1.0
            exposed = max(0.0, solution.times[k] - sum(costs[start:end]) / speed)
            times.append(taken[k] / speed + exposed)
        if max(times) < slowest:
            best, slowest = replace(solution, times=tuple(times)), max(times)
        costs = rescaled(costs, solution.cuts, taken)
        moved = solve(costs, K, speeds=speeds, **options)
        if moved.cuts == solution.cuts or moved.bottleneck > (1 - WORTHWHILE) * slowest:
            break
        solution = moved
    return best


def rescaled(costs: Sequence[float], cuts: Sequence[int], totals: Sequence[float]) -> list[float]:
    """The costs with the sum of each stage made the total of that stage."""
    found: list[float] = []
    for start, end, total in zip([0, *cuts], [*cuts, len(costs)], totals, strict=True):
        here = sum(costs[start:end])
        found += [cost * total / here if here else total / (end - start) for cost in costs[start:end]]
    return found


def _block_names(model: nn.Module) -> list[str]:
    return list(model._modules) if is_sequence(model) else [type(model).__name__]


def _between_blocks(traced: Traced, model: nn.Module) -> list[int]:
    """Legal cuts that lie between entries of a sequence."""
    top = [unit.module.partition(".")[0] for unit in traced.units]
    return [position for position in traced.legal_cuts if top[position] != top[position - 1]]
