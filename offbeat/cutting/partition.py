"""A model cut into K stages where it balances."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.cutting.cut import check_stages, cut, is_sequence, split, units
from offbeat.cutting.profile import Profile, profile
from offbeat.cutting.solve import Memory, Solution, solve
from offbeat.cutting.trace import Traced, trace
from offbeat.cutting.walk import verify
from offbeat.errors import UserError, unknown

Units = Literal["blocks", "layers"]
By = Literal["flops", "measured"]
ROUNDS = 3  # of measuring whole stages and moving the cuts


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

    by="flops" gives the same cuts everywhere; "measured" times the units here, then whole stages, and moves the cuts.
    `speeds` are those of the K workers, `pinned` cuts that must be among the chosen, `untie` copies parameters that two
    stages use instead of refusing them.

    >>> made = partition(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), 2, torch.ones(1, 4))
    >>> made.cuts, [list(stage.state_dict()) for stage in made.stages]
    ([2], [['0.weight', '0.bias'], ['2.weight', '2.bias']])
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
            why += f"; {names} cannot be used by two stages, or say untie=True to give each its own copy"
        raise UserError(f"{K} stages but only {len(legal) + 1} units to cut between: use K <= {len(legal) + 1}{why}")
    if cuts is None:
        if sample is None:
            raise UserError("there is no batch to cut the model by: give a sample, or cuts=[...]")
        verify(traced, sample)
        cuts = solve_for(model, sample, K, by=by, speeds=speeds, memory=memory, pinned=pinned, legal=legal).cuts
    if len(cuts) != K - 1:
        raise UserError(f"{len(cuts)} cuts {list(cuts)} make {len(cuts) + 1} stages but K = {K}: give {K - 1} cuts")
    stages = traced.split(list(cuts), untie=untie)
    return Partition(stages, list(cuts), "layers", [unit.name for unit in traced.units], list(traced.notes))


def solve_for(
    model: nn.Module, sample: Any, K: int, *, by: By = "flops", speeds: Sequence[float] | None = None,
    memory: Memory | None = None, pinned: Sequence[int] = (), legal: Sequence[int] | None = None,
    measured: Profile | None = None,
) -> Solution:  # fmt: skip
    """The best cuts for what the units cost; measured ones are corrected by what whole stages take."""
    found = measured or profile(model, sample, timed=by == "measured")
    costs = found.costs()
    options: dict[str, Any] = {"speeds": speeds, "memory": memory, "pinned": pinned, "legal": legal or found.legal_cuts}
    solution = solve(costs, K, **options)
    if by == "flops":
        return solution
    best, slowest = solution, float("inf")
    for _ in range(ROUNDS):
        taken = [sum(pair) for pair in stage_seconds(model, solution.cuts, sample)]
        times = [seconds / speed for seconds, speed in zip(taken, speeds or [1.0] * K, strict=True)]
        if max(times) < slowest:
            best, slowest = replace(solution, times=tuple(times)), max(times)
        for start, end, seconds in zip([0, *solution.cuts], [*solution.cuts, len(costs)], taken, strict=True):
            scale = seconds / max(1e-12, sum(costs[start:end]))
            costs[start:end] = [cost * scale for cost in costs[start:end]]
        moved = solve(costs, K, **options)
        if moved.cuts == solution.cuts:
            break
        solution = moved
    return best


def stage_seconds(
    model: nn.Module, cuts: Sequence[int], sample: Any, *, repeat: int = 3
) -> list[tuple[float, float]]:
    """Median seconds of the forward and of the backward of whole stages, one after the other, on a copy."""
    twin = trace(copy.deepcopy(model).train())
    x, found = sample, []
    kept: tuple[Tensor | None, ...] = ()
    for stage in twin.split(list(cuts), untie=True):  # whether they may be separated was decided before
        inputs = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
        laps: list[tuple[float, float]] = []
        for _ in range(repeat + 1):
            began = time.perf_counter()
            x = stage(pytree.tree_map_only(Tensor, torch.clone, inputs))
            middle = time.perf_counter()
            roots = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if roots:
                leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
                targets = [tensor for tensor in [*leaves, *stage.parameters()] if tensor.requires_grad]
                incoming = [torch.ones_like(root) for root in roots]
                # kept until the next backward, as training keeps them: else malloc gives the memory back in between
                kept = torch.autograd.grad(roots, targets, incoming, allow_unused=True)
            laps.append((middle - began, time.perf_counter() - middle))
        del kept
        x = pytree.tree_map_only(Tensor, Tensor.detach, x)
        found.append((statistics.median(lap[0] for lap in laps[1:]), statistics.median(lap[1] for lap in laps[1:])))
    return found


def _block_names(model: nn.Module) -> list[str]:
    return list(model._modules) if is_sequence(model) else [type(model).__name__]


def _between_blocks(traced: Traced, model: nn.Module) -> list[int]:
    """Legal cuts that lie between entries of a sequence."""
    top = [unit.module.partition(".")[0] for unit in traced.units]
    return [position for position in traced.legal_cuts if top[position] != top[position - 1]]
