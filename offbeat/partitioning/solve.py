"""The exact min-max contiguous partition: where K stages balance, on the workers and links that there are.

Stage k covers the units a, ..., b-1 between two cuts (a cut c is before unit c) and takes

    time(k, a, b) = (P[b] - P[a]) / speed_k + exposed_above[a] + exposed_below[b] = X_k[b] - Y_k[a]

with P the prefix sums of the costs. The time of the slowest stage is a dynamic programme over (k, position), and only a
window of positions is looked at for each k: from the earliest from which the other stages can reach the end within a
limit to the furthest that k stages can reach, as if every end had the smallest X from there on and every start the
largest Y up to there. A rounded difference x - y never grows with y, so that this excludes nothing, to the last bit.
Bisection finds a limit that leaves windows, though hardly a smaller one would. The best partition within them has the
smallest time itself, not one close to it; with that as the limit, a second pass finds the smallest sum of squares.

Times and memory are float64: exact for whole numbers (FLOPs, bytes) up to 2**53 and speeds that are powers of two.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import UserError

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Exposed = Sequence[float] | Callable[[int], float]

COARSE = 1 / 128  # of a limit: how close the search comes by windows alone
BLOCK = 64  # starts tried at once: their table of times stays in the cache
NOT_AFTER = np.tri(BLOCK, dtype=bool)  # [start, end] of the same positions: the end is not after the start


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a stage of these units keeps, at most `limit` per worker:

        parameters * versions[k] + held * in_flight[k] + entering * inputs[k] - twice * in_flight[k]

    parameters, held       of each unit: its parameters, and what one batch leaves for its backward
    versions, in_flight    of each stage, from stage 1: weight versions (optimizer state may count as more of them)
                           and batches between their forward and backward
    limit                  of every worker, or one for each
    entering               of each unit: the input of a stage that begins with it
    inputs                 of each stage: batches whose input it holds (none)
    twice                  of each unit: what `held` and `entering` both count where a stage begins with it (nothing)
    in_bytes               all of this is in bytes: an error about `limit` states megabytes
    """

    parameters: Sequence[float]
    held: Sequence[float]
    versions: Sequence[float]
    in_flight: Sequence[float]
    limit: float | Sequence[float]
    entering: Sequence[float] | None = None
    inputs: Sequence[float] | None = None
    twice: Sequence[float] | None = None
    in_bytes: bool = False


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cuts, what each stage then takes, and the bound that what cannot be cut apart sets.

    costs         of the units
    largest       the units (from, to) of the largest piece without a legal cut inside; one unit where all are legal
    unit_bound    its time on the fastest worker: no partition has a shorter slowest stage
    """

    cuts: tuple[int, ...]
    times: tuple[float, ...]
    memory: tuple[float, ...] | None
    costs: tuple[float, ...]
    largest: tuple[int, int]
    unit_bound: float

    @property
    def bottleneck(self) -> float:
        """Time of the slowest stage: the period of a pipeline in which no stage waits for another."""
        return max(self.times)

    @property
    def balance(self) -> float:
        """Mean over maximum of the stage times; 1 is perfect."""
        return self._mean / self.bottleneck if self.bottleneck else 1.0

    @property
    def balance_bound(self) -> float:
        """The most that `balance` could be with this mean, given the largest piece."""
        return self._mean / max(self._mean, self.unit_bound) if self.bottleneck else 1.0

    @property
    def _mean(self) -> float:
        return sum(self.times) / len(self.times)


class _Differences:
    """What stages from a to b take or keep: ends[b] - starts[a], over the positions 0..n, which are the legal cuts.

    least, most   the smallest of the ends from a position on, and the largest of the starts up to it
    """

    def __init__(self, ends: Floats, starts: Floats) -> None:
        self.ends, self.starts = ends, starts
        self.least = np.minimum.accumulate(ends[::-1])[::-1].data  # bisected faster than an array
        self.most = np.maximum.accumulate(starts).data

    def furthest(self, start: int, limit: float) -> int:
        """No stage within the limit that starts at this position or before ends after that position."""
        most = self.most[start]
        place = bisect.bisect_right(self.least, most + limit)  # rounds differently from the difference, which counts
        while place < len(self.least) and self.least[place] - most <= limit:
            place = bisect.bisect_right(self.least, self.least[place], place)
        while place > 0 and self.least[place - 1] - most > limit:
            place = bisect.bisect_left(self.least, self.least[place - 1], 0, place)
        return place - 1

    def earliest(self, end: int, limit: float) -> int:
        """No stage within the limit that ends at this position or after starts before that position."""
        least = self.least[end]
        place = bisect.bisect_left(self.most, least - limit)
        while place < len(self.most) and least - self.most[place] > limit:
            place = bisect.bisect_right(self.most, self.most[place], place)
        while place > 0 and least - self.most[place - 1] <= limit:
            place = bisect.bisect_left(self.most, self.most[place - 1], 0, place)
        return place

    def between(self, starts: slice, ends: slice) -> Floats:
        """Those of the stages [start, end]."""
        found: Floats = self.ends[ends] - self.starts[starts, None]
        return found


class _Pins(NamedTuple):
    """Of each position the last pinned cut below it, or 0, and the first one above it, or n: no stage goes across."""

    below: Places
    above: Places

    @classmethod
    def of(cls, at: Places, pinned: Collection[int]) -> _Pins:
        edges, places = np.searchsorted(at, sorted({0, *pinned, int(at[-1])})), np.arange(len(at))
        below = np.searchsorted(edges, places) - 1
        above = np.searchsorted(edges, places, side="right")
        return cls(edges[np.maximum(below, 0)], edges[np.minimum(above, len(edges) - 1)])


@dataclass(frozen=True)
class _Stage:
    """A stage run in one way; `held` is what it keeps, at most `most`."""

    times: _Differences
    pins: _Pins
    held: _Differences | None = None
    most: float = math.inf

    def furthest(self, start: int, limit: float) -> int:
        """No stage within the limit that starts at this position or before ends after that position."""
        end = min(self.times.furthest(start, limit), self.pins.above.item(start))
        return end if self.held is None else min(end, self.held.furthest(start, self.most))

    def earliest(self, end: int, limit: float) -> int:
        """No stage within the limit that ends at this position or after starts before that position."""
        start = max(self.times.earliest(end, limit), self.pins.below.item(end))
        return start if self.held is None else max(start, self.held.earliest(end, self.most))

    def blocks(self, starts: slice, ends: slice, limit: float) -> Iterator[tuple[slice, slice, Floats]]:
        """Times [start, end] for a few starts at once, infinite where a stage may not be whatever its time; with the
        places of these starts, and of the ends that they may reach within the limit."""
        for low in range(starts.start, starts.stop, BLOCK):
            high = min(low + BLOCK, starts.stop)
            left, right = max(low + 1, ends.start), min(self.furthest(high - 1, limit) + 1, ends.stop)
            if left < right:
                places = slice(low - starts.start, high - starts.start), slice(left - ends.start, right - ends.start)
                yield *places, self._seconds(slice(low, high), slice(left, right))

    def _seconds(self, starts: slice, ends: slice) -> Floats:
        times = self.times.between(starts, ends)
        if (both := starts.stop - ends.start) > 0:  # positions that are starts and ends
            corner = times[-both:, :both]
            corner[NOT_AFTER[:both, : corner.shape[1]]] = np.inf
        first = self.pins.below[ends]
        if first[-1] > starts.start:
            times[np.arange(starts.start, starts.stop)[:, None] < first] = np.inf
        if self.held is not None:
            times[self.held.between(starts, ends) > self.most] = np.inf
        return times


def solve(
    costs: Sequence[float],
    K: int,
    *,
    speeds: Sequence[float] | None = None,
    exposed_below: Exposed | None = None,
    exposed_above: Exposed | None = None,
    memory: Memory | None = None,
    pinned: Collection[int] = (),
    legal: Collection[int] | None = None,
) -> Solution:
    """Cuts of the contiguous partition into K non-empty stages whose slowest stage is the fastest possible.

    costs                          of each unit: time at speed 1, or FLOPs
    speeds                         of the worker of each stage, from stage 1 (all 1)
    exposed_below, exposed_above   what a cut before unit c adds to the stage below and above it: the communication that
                                   the method cannot hide, by position (entry 0 is no cut and is not read) or function
    memory                         what stages keep, and how much a worker has
    pinned, legal                  cuts that must be made; positions where cuts may be (all)

    Among partitions with the same slowest stage it is the one with the smallest sum of squared times (so that the
    other stages balance, too), and among those the one whose cuts come first in lexicographic order.

    >>> solve([4, 1, 1, 1, 4, 1], 3).cuts
    (1, 4)
    >>> slow_last = solve([1] * 10, 3, speeds=[1, 1, 0.5])
    >>> slow_last.cuts, slow_last.times, slow_last.balance
    ((4, 8), (4.0, 4.0, 4.0), 1.0)
    """
    work = _numbers("costs", costs)
    return Solver(
        len(work),
        K,
        speeds=speeds,
        exposed_below=exposed_below,
        exposed_above=exposed_above,
        memory=memory,
        pinned=pinned,
        legal=legal,
    ).solve(work)


class Solver:
    """`solve` for several costs of as many units, with everything else prepared once.

    >>> solver = Solver(6, 3)
    >>> solver.solve([4, 1, 1, 1, 4, 1]).cuts, solver.with_cuts([4, 1, 1, 1, 4, 1], (2, 3)).times
    ((1, 4), (5.0, 1.0, 6.0))
    """

    def __init__(
        self,
        count: int,
        K: int,
        *,
        speeds: Sequence[float] | None = None,
        exposed_below: Exposed | None = None,
        exposed_above: Exposed | None = None,
        memory: Memory | None = None,
        pinned: Collection[int] = (),
        legal: Collection[int] | None = None,
    ) -> None:
        self._count = count
        self._at = _positions(count, K, pinned, legal)
        self._pace = _speeds(speeds, K)
        self._below = _at_cuts("exposed_below", exposed_below, self._at, count)
        self._above = _at_cuts("exposed_above", exposed_above, self._at, count)
        self._pinned, self._pins = sorted(set(pinned)), _Pins.of(self._at, pinned)
        self._kept = None if memory is None else _Kept.of(memory, self._at, K)
        self._held = [] if self._kept is None else self._kept.held()

    def solve(self, costs: Sequence[float] | Floats) -> Solution:
        """The best cuts; UserError where memory permits none."""
        stages = self.stages(costs)
        if len(self._pinned) == len(stages) - 1:  # nothing to choose
            edges = self._edges(self._pinned) if self.fits(self._pinned) else None
        else:
            limit = _smallest_limit([stages])
            edges = None if limit is None else _smoothest(stages, limit)
        if edges is None:
            assert self._kept is not None  # pins and legal cuts alone, once checked, always leave a partition
            raise _too_little(self._kept, self._pins)
        return self._solution(costs, stages, edges)

    def with_cuts(self, costs: Sequence[float] | Floats, cuts: Sequence[int]) -> Solution:
        """These cuts, whether or not the stages fit the memory."""
        return self._solution(costs, self.stages(costs), self._edges(cuts))

    def fits(self, cuts: Sequence[int]) -> bool:
        """Whether the stages between these cuts fit the memory."""
        spans = itertools.pairwise(self._edges(cuts))
        each = zip(self._held, spans, strict=False)  # without a memory limit there are none
        return all(held.ends[b] - held.starts[a] <= limit for (held, limit), (a, b) in each)

    def stages(self, costs: Sequence[float] | Floats) -> list[_Stage]:
        """The stages with these costs, for the search."""
        prefix, pace = self._prefix(costs), self._pace.tolist()
        by_speed = {
            speed: _Differences(prefix / speed + self._below, prefix / speed - self._above) for speed in set(pace)
        }
        held: Sequence[tuple[_Differences | None, float]] = self._held or [(None, math.inf)] * len(pace)
        return [_Stage(by_speed[speed], self._pins, *each) for speed, each in zip(pace, held, strict=True)]

    def _prefix(self, costs: Sequence[float] | Floats) -> Floats:
        prefix: Floats = _prefix(_numbers("costs", costs, self._count))[self._at]
        return prefix

    def _edges(self, cuts: Sequence[int]) -> list[int]:
        """The positions of these cuts, with those of both ends."""
        edges: list[int] = np.searchsorted(self._at, [0, *cuts, self._count]).tolist()
        return edges

    def _solution(self, costs: Sequence[float] | Floats, stages: Sequence[_Stage], edges: list[int]) -> Solution:
        at, pieces = self._at, np.diff(self._prefix(costs))
        largest = int(pieces.argmax())
        spans = zip(stages, itertools.pairwise(edges), strict=True)
        return Solution(
            cuts=tuple(at[edges[1:-1]].tolist()),
            times=tuple(float(stage.times.ends[b] - stage.times.starts[a]) for stage, (a, b) in spans),
            memory=None if self._kept is None else self._kept.of_stages(edges),
            costs=tuple(map(float, costs)),
            largest=(int(at[largest]), int(at[largest + 1])),
            unit_bound=float(pieces[largest] / self._pace.max()),
        )


class Way(NamedTuple):
    """One of two ways to run a stage: what all stages keep, and how fast they are, if they run that way."""

    memory: Memory
    speeds: Sequence[float] | None = None


class Changed(NamedTuple):
    """The stages (from 1) that run the second way, and the time of the slowest stage without any of them, over the
    shortest possible; infinite where that does not fit."""

    stages: tuple[int, ...]
    without: float


def fastest_changed(
    costs: Sequence[float],
    K: int,
    plain: Way,
    changed: Way,
    *,
    within: float = 1.0,
    pinned: Collection[int] = (),
    legal: Collection[int] | None = None,
) -> Changed | None:
    """The stages that run the `changed` way so that the slowest stage is the fastest possible within the memory limits:
    the fewest with which it takes at most `within` times as long. None if nothing fits.

    Where the choice is free, the last stages stay plain.

    >>> sizes = {"parameters": [0] * 6, "held": [1] * 6, "versions": [0] * 2, "limit": 6}
    >>> plain, changed = Way(Memory(**sizes, in_flight=[3, 1])), Way(Memory(**sizes, in_flight=[1, 1]), [0.8, 0.8])
    >>> fastest_changed([1] * 6, 2, plain, changed)  # cut at 3: 3.75 in stage 1; plain, stage 2 would have 4 units
    Changed(stages=(1,), without=1.0666666666666667)
    >>> fastest_changed([1] * 6, 2, plain, changed, within=1.1)
    Changed(stages=(), without=1.0666666666666667)
    """
    work = _numbers("costs", costs)
    ways = [
        Solver(len(work), K, speeds=speeds, memory=memory, pinned=pinned, legal=legal).stages(work)
        for memory, speeds in (plain, changed)
    ]
    limit = _smallest_limit(ways)
    if limit is None:
        return None
    alone = _smallest_limit(ways[:1])
    without = np.inf if alone is None else alone / limit if limit else 1.0
    enough = alone is not None and without <= within
    return Changed(() if enough else _fewest(ways, min(limit * within, sys.float_info.max)), float(without))


def _fewest(ways: Sequence[Sequence[_Stage]], limit: float) -> tuple[int, ...]:
    """The fewest stages that run the second way with all within the limit, which the two ways together permit."""
    windows = _windows(ways, limit)
    assert windows is not None
    fewest = [np.zeros(1)]  # for k = 0..K: changed stages of k that end at a position of the window
    for k, (starts, ends) in enumerate(itertools.pairwise(windows)):
        found = np.full(ends.stop - ends.start, np.inf)
        for cost, way in enumerate(ways):
            for rows, columns, seconds in way[k].blocks(starts, ends, limit):
                changed = np.where(seconds <= limit, fewest[-1][rows, None] + cost, np.inf)
                found[columns] = np.minimum(found[columns], changed.min(axis=0))
        fewest.append(found)
    stages: list[int] = []
    end = windows[-1].start
    for k in reversed(range(len(windows) - 1)):
        least = fewest[k + 1][end - windows[k + 1].start]
        cost, place = next(
            (cost, int(place))
            for cost, way in enumerate(ways)
            for rows, _, seconds in way[k].blocks(windows[k], slice(end, end + 1), limit)
            for place in rows.start + np.flatnonzero(seconds <= limit)
            if fewest[k][place] + cost == least
        )
        end = windows[k].start + place
        stages += [k + 1] * cost
    return tuple(reversed(stages))


# --- the search ---------------------------------------------------------------------------------------------------


def _smallest_limit(ways: Sequence[Sequence[_Stage]]) -> float | None:
    """The time of the slowest stage of the best partition, each stage in the best way; None where there is none."""
    every = {stage.times for way in ways for stage in way}
    most = max(float(times.ends.max() - times.starts.min()) for times in every)
    low = _even(ways)
    limit = next(limit for limit in _growing(low, most) if limit == most or _windows(ways, limit) is not None)
    while limit - low > COARSE * limit:
        middle = low + (limit - low) / 2
        low, limit = (middle, limit) if _windows(ways, middle) is None else (low, middle)
    return next((time for limit in _growing(limit, most) if (time := _slowest(ways, limit)) is not None), None)


def _even(ways: Sequence[Sequence[_Stage]]) -> float:
    """The time of each stage if units could be cut anywhere."""
    whole = [
        min(float(stage.times.ends[-1] - stage.times.starts[0]) for stage in each) for each in zip(*ways, strict=True)
    ]
    return 1 / sum(1 / seconds for seconds in whole) if all(whole) else 0.0


def _growing(first: float, most: float) -> Iterator[float]:
    """Limits from the first one on, further and further apart, and `most`."""
    step = COARSE * (first or most)
    while first < most:
        yield first
        first, step = first + step, 2 * step
    yield most


def _slowest(ways: Sequence[Sequence[_Stage]], limit: float) -> float | None:
    """The time of the slowest stage of the best partition, if that is within the limit; otherwise None."""
    windows = _windows(ways, limit)
    if windows is None:
        return None
    slowest = np.zeros(1)  # from a position of the window to the end
    spans = itertools.pairwise(windows)
    for each, (starts, ends) in reversed(list(zip(zip(*ways, strict=True), spans, strict=True))):
        found = np.full(starts.stop - starts.start, np.inf)
        for stage in each:
            for rows, columns, seconds in stage.blocks(starts, ends, limit):
                np.maximum(seconds, slowest[columns], out=seconds)
                best = seconds[np.arange(len(seconds)), seconds.argmin(axis=1)]  # min takes longer
                found[rows] = np.minimum(found[rows], best)
        slowest = found
    return float(slowest[0]) if slowest[0] <= limit else None


def _windows(ways: Sequence[Sequence[_Stage]], limit: float) -> list[slice] | None:
    """For k = 0..K, the positions from the earliest to the furthest that k stages can end at, the others above them, if
    all keep to the limit; None if that leaves none."""
    K, last = len(ways[0]), len(ways[0][0].times.ends) - 1
    furthest, earliest = [0], [last]
    for k in range(K):
        reach = max([way[k].furthest(furthest[-1], limit) for way in ways])
        furthest.append(min(reach, last - (K - 1 - k)))
    if furthest[-1] < last:
        return None
    for k in reversed(range(K)):
        reach = min([way[k].earliest(earliest[-1], limit) for way in ways])
        earliest.append(max(min(reach, earliest[-1] - 1), k))
    earliest.reverse()
    if any(low > high for low, high in zip(earliest, furthest, strict=True)):
        return None
    return [slice(low, high + 1) for low, high in zip(earliest, furthest, strict=True)]


def _smoothest(stages: Sequence[_Stage], limit: float) -> list[int]:
    """Edges 0, cuts, n of the partition within the limit with the smallest sum of squared times.

    From the last stage to the first, so that of equal sums the earliest first cut wins, then the earliest second.
    """
    windows = _windows([stages], limit)
    assert windows is not None
    rest = np.zeros(1)  # the smallest sum from a position of the window to the end
    next_cut = []
    for stage, (starts, ends) in reversed(list(zip(stages, itertools.pairwise(windows), strict=True))):
        total, choice = np.full(starts.stop - starts.start, np.inf), np.zeros(starts.stop - starts.start, np.intp)
        for rows, columns, seconds in stage.blocks(starts, ends, limit):
            seconds[seconds > limit] = np.inf
            np.multiply(seconds, seconds, out=seconds)
            seconds += rest[columns]
            best = seconds.argmin(axis=1)
            total[rows] = seconds[np.arange(len(best)), best]
            choice[rows] = best + ends.start + columns.start
        rest = total
        next_cut.append((starts.start, choice))
    edges = [0]
    for start, choice in reversed(next_cut):
        edges.append(int(choice[edges[-1] - start]))
    return edges


# --- what is given ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """Memory of stage k from a to b: sums[k][b] - starts[k][a]; `alike`: one limit was given for all workers."""

    sums: list[Floats]
    starts: list[Floats]
    limits: Floats
    alike: bool
    in_bytes: bool

    @classmethod
    def of(cls, memory: Memory, at: Places, K: int) -> _Kept:
        count = int(at[-1])
        parameters, held = (_numbers(f"memory.{name}", getattr(memory, name), count) for name in ("parameters", "held"))
        versions, in_flight = (
            _numbers(f"memory.{name}", getattr(memory, name), K, of="stages") for name in ("versions", "in_flight")
        )
        alike = np.ndim(memory.limit) == 0
        given = np.resize(memory.limit, K) if alike else memory.limit
        limits = _numbers("memory.limit", given, K, of="stages", zero=False)
        sums = [_prefix(parameters * v + held * f)[at] for v, f in zip(versions, in_flight, strict=True)]
        if memory.entering is None or memory.inputs is None:
            return cls(sums, sums, limits, alike, memory.in_bytes)
        given_twice = [0.0] * count if memory.twice is None else memory.twice
        entering, twice = (
            np.append(_numbers(f"memory.{name}", values, count), 0.0)[at]
            for name, values in (("entering", memory.entering), ("twice", given_twice))
        )
        inputs = _numbers("memory.inputs", memory.inputs, K, of="stages")
        starts = [
            each - np.maximum(entering * n - twice * f, 0) if n else each
            for each, n, f in zip(sums, inputs, in_flight, strict=True)
        ]
        return cls(sums, starts, limits, alike, memory.in_bytes)

    def held(self) -> list[tuple[_Differences, float]]:
        """The memory of each stage, and its limit."""
        each = zip(self.sums, self.starts, self.limits.tolist(), strict=True)
        return [(_Differences(sums, starts), limit) for sums, starts, limit in each]

    def of_stages(self, edges: Sequence[int]) -> tuple[float, ...]:
        """What the stages between these positions keep."""
        each = zip(self.sums, self.starts, itertools.pairwise(edges), strict=True)
        return tuple(float(sums[b] - starts[a]) for sums, starts, (a, b) in each)


def _too_little(kept: _Kept, pins: _Pins) -> UserError:
    """The error for a memory limit that no partition keeps to, with the smallest one that would do."""
    K = len(kept.sums)
    scale = [1.0] * K if kept.alike else kept.limits.tolist()
    each = zip(kept.sums, kept.starts, scale, strict=True)
    least = _smallest_limit([[_Stage(_Differences(sums / by, starts / by), pins) for sums, starts, by in each]])
    assert least is not None
    shown = _megabytes if kept.in_bytes else _plain
    if kept.alike:
        given, enough = f"a memory limit of {shown(kept.limits[0])} per worker", f"at least {shown(least)}"
    else:
        given = f"the memory limits {', '.join(map(shown, kept.limits))}"
        enough = f"limits at least {math.ceil(least * 1000) / 1000:.3f} times as large"
    fit = "1 stage does not fit" if K == 1 else f"{K} stages do not fit"
    return UserError(f"{fit} {given}: use {enough}, or more stages")


def _megabytes(value: float) -> str:
    """Bytes in megabytes, rounded up: a limit of that many fits as well.

    >>> _megabytes(1000), _megabytes(1000.5), _megabytes(2.5e9)
    ('0.001 MB', '0.002 MB', '2500 MB')
    """
    return f"{math.ceil(value / 1e3) / 1e3:.12g} MB"


def _plain(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.17g}"


def too_few_units(K: int, count: int, otherwise: str = "") -> UserError:
    """
    >>> print(too_few_units(4, 2, ", or a deeper model"))
    4 stages but only 2 units to cut between: use K=2 or fewer, or a deeper model
    """
    return UserError(
        f"{K} stages but only {count} unit{'s' * (count > 1)} to cut between: use {_at_most(count)}{otherwise}"
    )


def check_count(cuts: Sequence[object], K: int) -> None:
    """Refuse cuts that do not make K stages.

    >>> check_count([3], 3)
    Traceback (most recent call last):
    offbeat.errors.UserError: cuts=[3] gives 2 stages, not K=3: give 2 cuts
    """
    if len(cuts) != K - 1:
        needed = f"give {K - 1} cut{'s' * (K > 2)}" if K > 1 else "leave the cuts out"
        raise UserError(f"cuts={list(cuts)} gives {len(cuts) + 1} stage{'s' * (len(cuts) > 0)}, not K={K}: {needed}")


def _at_most(stages: int) -> str:
    return f"K={stages} or fewer" if stages > 1 else "K=1"


def _positions(count: int, K: int, pinned: Collection[int], legal: Collection[int] | None) -> Places:
    """0, the legal cuts in order, and n; refuses what no partition can satisfy."""
    if isinstance(K, bool) or not isinstance(K, int | np.integer) or K < 1:
        raise UserError(f"K={K!r} stages: use a whole number from 1 up")
    if count < K:
        raise too_few_units(K, count, ", or a deeper model")
    every = range(1, count)
    allowed = list(every) if legal is None else sorted(set(legal))
    for name, cuts in (("legal", allowed), ("pinned", pinned)):
        outside = sorted(set(cuts) - set(every))
        if outside:
            raise UserError(f"{name} cut {outside[0]} of {count} units: cuts are from 1 to {count - 1}")
    if len(allowed) < K - 1:
        raise UserError(
            f"{K} stages but only {len(allowed)} legal cut{'s' * (len(allowed) != 1)} among {count} units: use "
            f"{_at_most(len(allowed) + 1)}, or a model that can be cut in more places"
        )
    for cut in sorted(set(pinned) - set(allowed)):
        above = bisect.bisect(allowed, cut)
        near = " or ".join(map(str, allowed[max(above - 1, 0) : above + 1]))
        raise UserError(
            f"cut {cut} is pinned but the model cannot be cut there: "
            + (f"pin {near}, the nearest legal" if near else "unpin it, no cut is legal")
        )
    if len(set(pinned)) > K - 1:
        raise UserError(
            f"{len(set(pinned))} pinned cuts {sorted(set(pinned))} but {K} stages have {K - 1}: "
            f"use K={len(set(pinned)) + 1} or more, or pin fewer"
        )
    return np.array([0, *allowed, count], np.intp)


def _speeds(given: Sequence[float] | None, K: int) -> Floats:
    return np.ones(K) if given is None else _numbers("speeds", given, K, of="stages", zero=False)


def _at_cuts(name: str, given: Exposed | None, at: Places, count: int) -> Floats:
    """The exposed communication at each position; nothing at the model's own ends."""
    exposed = np.zeros(len(at))
    if callable(given):
        exposed[1:-1] = _numbers(name, [given(cut) for cut in at[1:-1].tolist()])
    elif given is not None:
        exposed[1:-1] = _numbers(name, [0.0, *list(given)[1:]], count)[at[1:-1]]
    return exposed


def _numbers(
    name: str, values: ArrayLike, length: int | None = None, *, of: str = "units", zero: bool = True
) -> Floats:
    """The values as floats, refused unless there are that many and all are finite and not negative."""
    array = np.array(values, dtype=np.float64).reshape(-1)
    if length is not None and len(array) != length:
        raise UserError(f"{len(array)} {name} for {length} {of}: give one for each")
    good = np.isfinite(array) & ((array >= 0) if zero else (array > 0))
    if not good.all():
        where = int(np.flatnonzero(~good)[0])
        raise UserError(f"{name}[{where}] = {array[where]:g}: use finite numbers {'from 0 up' if zero else 'above 0'}")
    return array


def _prefix(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))
