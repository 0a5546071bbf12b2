"""Cuts for measured units, moved by the times of whole stages: a stage does not take as long as the sum of its units.

Each step times the stages of the present cuts and of a few others in the same rounds: the best cuts by the units, whose
times are scaled to those of their stages, and the present cuts with one unit moved from the slowest stage to the next
one or the one before. Other cuts are kept only if they are faster in these rounds. The steps end when all of these have
been tried, when balance leaves no more than noise to gain, after SECONDS, or before a time limit that is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from offbeat.partitioning.solve import Solution, Solver
from offbeat.partitioning.timing import Load, Meter, StageTime, Timings, shortest

STEPS, SECONDS = 8, 60.0  # at most, of timing cuts and moving them
WORTHWHILE = 0.01  # of the slowest stage: less than this to gain is noise
LAPS, LONGEST = 4, 5.0  # laps of the slowest stage for which all run at once, and the most seconds that may take


@dataclass(frozen=True)
class RoundsBalance:
    """Mean over slowest stage: by the shortest time of each stage, and in the worst and the best round."""

    balance: float
    least: float
    most: float

    @classmethod
    def of(cls, loads: Sequence[float], rounds: Sequence[Sequence[float]]) -> RoundsBalance:
        each = [fmean(times) / max(times) for times in rounds]
        return cls(fmean(loads) / max(loads), min(each), max(each))


@dataclass(frozen=True)
class Refinement:
    """The cuts after all steps.

    solution        its times are those of whole stages, and the costs of its units are scaled to them
    before, after   the balance of the first cuts, which the units alone gave, and of the last, timed in the same rounds
    tried, kept     other cuts that were timed, and those of them that were faster
    """

    solution: Solution
    before: RoundsBalance | None = None
    after: RoundsBalance | None = None
    tried: int = 0
    kept: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Without the solution."""
        return {name: value for name, value in asdict(self).items() if name != "solution"}


def refine(
    costs: Sequence[float],
    K: int,
    meter: Meter,
    *,
    M: int = 1,
    speeds: Sequence[float] | None = None,
    seconds: float = math.inf,
    **options: Any,
) -> Refinement:
    """The best cuts for measured units, moved by the times of whole stages.

    meter    times the stages between cuts
    M        an update counts as a part of each of its M batches
    speeds   of the workers of the stages; with `options` as for `solve`
    seconds  time limit; the stages of the first cuts are timed in any case
    """
    search = _Search(list(costs), K, meter, M, {**options, "speeds": speeds})
    solution = search.best()
    if K == 1:
        return Refinement(solution)
    first = present = solution.cuts
    tried, kept, began = {first}, 0, time.monotonic()
    others: list[Cuts] = []
    for _ in range(STEPS):
        step_began = time.monotonic()
        found = search.time([present, *others])
        fastest = min(found, key=lambda cuts: max(found[cuts].loads))
        if max(found[fastest].loads) < (1 - WORTHWHILE) * max(found[present].loads):
            present, kept = fastest, kept + 1
        search.scale(found, last=present)
        others = search.alternatives(present, tried)
        now = time.monotonic()
        if not others or now - began > SECONDS or now - began + 2 * (now - step_began) > seconds:  # with the last one
            break
        tried |= set(others)
    if present != first:  # once more: the times by which cuts were chosen are too optimistic
        found = search.time([first, present])
        if max(found[first].loads) <= max(found[present].loads):
            present, kept = first, 0
        search.scale(found, last=present)
    return Refinement(
        replace(search.solution(present), times=tuple(found[present].loads)),
        found[first].balance if first in found else found[present].balance,
        found[present].balance,
        len(tried) - 1,
        kept,
    )


Cuts = tuple[int, ...]


@dataclass(frozen=True)
class _StageLoads:
    """Seconds per batch of each stage: alone at speed 1; on its worker, with what the method cannot hide of messages;
    the same by round."""

    taken: list[float]
    loads: list[float]
    rounds: list[list[float]]

    @property
    def balance(self) -> RoundsBalance:
        return RoundsBalance.of(self.loads, self.rounds)


class _Search:
    """The units of one model, with their costs as far as stages have been timed; `options` are those of `solve`."""

    def __init__(self, costs: list[float], K: int, meter: Meter, M: int, options: dict[str, Any]) -> None:
        self.costs, self.K, self.meter, self.M, self.options = costs, K, meter, M, options
        self.solver = Solver(len(costs), K, **options)
        self.speeds: Sequence[float] = options["speeds"] or [1.0] * K
        legal: Collection[int] | None = options.get("legal")
        self.legal = sorted(range(1, len(costs)) if legal is None else legal)

    def best(self) -> Solution:
        """The best cuts, by the costs of the units; UserError where memory permits none."""
        return self.solver.solve(self.costs)

    def solution(self, cuts: Cuts) -> Solution:
        """These cuts, by the costs of the units."""
        return self.solver.with_cuts(self.costs, cuts)

    def time(self, several: Sequence[Cuts]) -> dict[Cuts, _StageLoads]:
        """The loads of the stages between each of the cuts, timed in the same rounds."""
        slowest = max(max(self.solution(cuts).times) for cuts in several)
        load = Load([1] * self.K, self.M, seconds=min(LONGEST, LAPS * slowest))
        timed = self.meter(several, load)
        return {cuts: self._loads(cuts, timings) for cuts, timings in zip(several, timed, strict=True)}

    def _loads(self, cuts: Cuts, timings: Timings) -> _StageLoads:
        times, units = self.solution(cuts).times, stage_sums(self.costs, cuts)
        exposed = [max(0.0, time - unit / speed) for time, unit, speed in zip(times, units, self.speeds, strict=True)]

        def on_workers(taken: Sequence[StageTime]) -> list[float]:
            each = zip(taken, self.speeds, exposed, strict=True)
            return [stage.batch(self.M) / speed + more for stage, speed, more in each]

        best = shortest(timings, self.M)
        rounds = [on_workers(each) for each in timings]
        return _StageLoads([stage.batch(self.M) for stage in best], on_workers(best), rounds)

    def scale(self, found: Mapping[Cuts, _StageLoads], *, last: Cuts) -> None:
        """Scale the units to the times of their stages: those of the last cuts then fit exactly."""
        for cuts in [*(cuts for cuts in found if cuts != last), last]:
            self.costs = rescaled(self.costs, cuts, found[cuts].taken)

    def alternatives(self, present: Cuts, tried: Collection[Cuts]) -> list[Cuts]:
        """Cuts that have not been tried: the best by the units, where they promise a faster slowest stage, and those
        that move one unit out of the slowest stage."""
        now = self.solution(present)
        if now.balance > 1 - WORTHWHILE:
            return []
        best = self.best()
        found = [best.cuts] if best.bottleneck < (1 - WORTHWHILE) * now.bottleneck else []
        found += self._neighbours(now)
        return [cuts for cuts in dict.fromkeys(found) if cuts not in tried]

    def _neighbours(self, now: Solution) -> Iterator[Cuts]:
        """The slowest stage without its first unit, and without its last: up to the next position that is legal."""
        slowest, pinned = now.times.index(now.bottleneck), set(self.options.get("pinned", ()))
        for place, step in ((slowest - 1, 1), (slowest, -1)):
            if not 0 <= place < self.K - 1 or now.cuts[place] in pinned:
                continue
            target = self.legal.index(now.cuts[place]) + step
            moved = (*now.cuts[:place], self.legal[target % len(self.legal)], *now.cuts[place + 1 :])
            if all(a < b for a, b in pairwise(moved)) and 0 <= target < len(self.legal) and self.solver.fits(moved):
                yield moved


def stage_sums(parts: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """What the units of each stage have together.

    >>> stage_sums([1.0, 2.0, 3.0, 4.0], (1, 3))
    [1.0, 5.0, 4.0]
    """
    total = list(accumulate(parts, initial=0.0))
    return [total[end] - total[start] for start, end in pairwise([0, *cuts, len(parts)])]


def rescaled(costs: Sequence[float], cuts: Sequence[int], totals: Sequence[float]) -> list[float]:
    """The costs with the sum of each stage made the total of that stage."""
    found: list[float] = []
    for start, end, total in zip([0, *cuts], [*cuts, len(costs)], totals, strict=True):
        here = sum(costs[start:end])
        found += [cost * total / here if here else total / (end - start) for cost in costs[start:end]]
    return found
