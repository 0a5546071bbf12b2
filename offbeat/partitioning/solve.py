"""The exact min-max contiguous partition: where K stages balance, on the workers and links that there are.

Stage k covers the units a, ..., b-1 between two cuts (a cut c is before unit c) and takes

    time(k, a, b) = (P[b] - P[a]) / speed_k + exposed_above[a] + exposed_below[b] = X_k[b] - Y_k[a]

with P the prefix sums of the costs. For a given limit, whether K stages can all keep to it is a dynamic programme over
(k, position). Because X and Y are separate, position b ends a stage k within the limit exactly if
X_k[b] - max Y_k[a] <= limit, the maximum taken over the starts a from which stage k may reach b; and a rounded
difference x - y never grows with y, so this holds to the last bit of the numbers as computed. What forbids a start
(memory, a pinned cut in between) forbids every earlier one as well, so the starts form a window whose lower edge
moves up with b, and each maximum is a range maximum. Only a window of positions is looked at for each k: the furthest
that k stages can reach, and the earliest from which the others can reach the end, as if every end had the smallest X
from there on and every start the largest Y up to there. A search with the times of partitions that were found on the
way then ends at the smallest limit itself, not one close to it.

Times and memory are float64: exact for whole numbers (FLOPs, bytes) up to 2**53 and speeds that are powers of two.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import UserError

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Exposed = Sequence[float] | Callable[[int], float]

COARSE = 1 / 128  # of a limit: how close the search comes by windows alone
BLOCK = 64  # starts tried at once: their table of times stays in the cache


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


class _Times:
    """Times of stages on workers of the same speed: ends - starts, over the positions 0..n, which are the legal cuts.

    least, most   the smallest of the ends from a position on, and the largest of the starts up to it
    """

    def __init__(self, ends: Floats, starts: Floats) -> None:
        self.ends, self.starts = ends, starts
        self.free = bool((ends == starts).all())  # of what a cut adds
        self.least: list[float] = np.minimum.accumulate(ends[::-1])[::-1].tolist()
        self.most: list[float] = np.maximum.accumulate(starts).tolist()

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


class _Held(NamedTuple):
    """Memory of a stage: ends - starts, at most `limit`."""

    ends: Floats
    starts: Floats
    limit: float


@dataclass(frozen=True)
class _Stage:
    """A stage run in one way.

    first   a lower bound on the starts of each end, which never falls; where `held` is None all from there on fit
    held    for a stage whose starts that fit are not all from some position on
    """

    times: _Times
    first: Places
    held: _Held | None = None

    def fits(self, ends: Places, starts: Places) -> Bools:
        """Which starts [end, start] a stage may have, whatever its time."""
        column = ends[:, None]
        may = (starts < column) & (starts >= self.first[column])
        if self.held is not None:
            may &= self.held.ends[column] - self.held.starts[starts] <= self.held.limit
        return may

    def furthest(self, start: int, limit: float) -> int:
        """No stage within the limit that starts at this position or before ends after that position."""
        return min(self.times.furthest(start, limit), int(self.first.searchsorted(start, side="right")) - 1)

    def earliest(self, end: int, limit: float) -> int:
        """No stage within the limit that ends at this position or after starts before that position."""
        return max(self.times.earliest(end, limit), int(self.first[end]))

    def seconds(self, ends: Places, starts: Places) -> Floats:
        """Times [end, start]; infinite where they do not fit."""
        return np.where(self.fits(ends, starts), self.times.ends[ends[:, None]] - self.times.starts[starts], np.inf)

    def within(self, limit: float, ends: Places, starts: Places) -> Bools:
        """Which starts [end, start] fit and keep to the limit."""
        quick: Bools = self.times.ends[ends[:, None]] - self.times.starts[starts] <= limit
        return quick & self.fits(ends, starts)


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
    count = len(work)
    at = _positions(count, K, pinned, legal)
    pace = _speeds(speeds, K)
    below = _at_cuts("exposed_below", exposed_below, at, count)
    above = _at_cuts("exposed_above", exposed_above, at, count)
    prefix = _prefix(work)[at]
    pins = _last_pin(at, pinned)
    kept = None if memory is None else _Kept.of(memory, at, K)
    by_speed = {speed: _Times(prefix / speed + below, prefix / speed - above) for speed in set(pace.tolist())}
    stages = _stages([by_speed[speed] for speed in pace.tolist()], pins, kept)
    edges = _best_edges(stages, np.searchsorted(at, [0, *sorted(set(pinned)), count]).tolist())
    if edges is None:
        assert kept is not None  # pins and legal cuts alone, once checked, always leave a partition
        raise _too_little(kept, pins)
    spans = list(zip(stages, itertools.pairwise(edges), strict=True))
    pieces = np.diff(prefix)
    largest = int(pieces.argmax())
    return Solution(
        cuts=tuple(at[edges[1:-1]].tolist()),
        times=tuple(float(stage.times.ends[b] - stage.times.starts[a]) for stage, (a, b) in spans),
        memory=None if kept is None else kept.of_stages(edges),
        costs=tuple(work.tolist()),
        largest=(int(at[largest]), int(at[largest + 1])),
        unit_bound=float(pieces[largest] / pace.max()),
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
    at = _positions(len(work), K, pinned, legal)
    prefix, pins = _prefix(work)[at], _last_pin(at, pinned)
    ways = []
    for memory, speeds in (plain, changed):
        pace = _speeds(speeds, K).tolist()
        by_speed = {speed: _Times(prefix / speed, prefix / speed) for speed in set(pace)}
        ways.append(_stages([by_speed[speed] for speed in pace], pins, _Kept.of(memory, at, K)))
    limit = _smallest_limit(ways)
    if limit is None:
        return None
    alone = _smallest_limit(ways[:1])
    without = np.inf if alone is None else alone / limit if limit else 1.0
    enough = alone is not None and without <= within
    return Changed(() if enough else _fewest(ways, limit * within), float(without))


def _stages(times: Sequence[_Times], pins: Places, kept: _Kept | None) -> list[_Stage]:
    if kept is None:
        return [_Stage(each, pins) for each in times]
    return [
        _Stage(each, np.maximum(pins, first), held)
        for each, first, held in zip(times, kept.first(), kept.held(), strict=True)
    ]


def _fewest(ways: Sequence[Sequence[_Stage]], limit: float) -> tuple[int, ...]:
    """The fewest stages that run the second way with all within the limit, which the two ways together permit."""
    windows = _windows(ways, limit)
    assert windows is not None
    fewest = [np.zeros(1)]  # for k = 0..K: changed stages of k that end at a position of the window
    for k, (before, here) in enumerate(itertools.pairwise(windows)):
        found = [
            np.where(way[k].within(limit, here, before), fewest[-1] + cost, np.inf) for cost, way in enumerate(ways)
        ]
        fewest.append(np.minimum(*(each.min(axis=1) for each in found)))
    stages: list[int] = []
    end = windows[-1]
    for k in reversed(range(len(windows) - 1)):
        least = fewest[k + 1][end[0] - windows[k + 1][0]]
        cost, place = next(
            (cost, int(place))
            for cost, way in enumerate(ways)
            for place in np.flatnonzero(way[k].within(limit, end, windows[k])[0])
            if fewest[k][place] + cost == least
        )
        end = windows[k][place : place + 1]
        stages += [k + 1] * cost
    return tuple(reversed(stages))


# --- the search ---------------------------------------------------------------------------------------------------


def _best_edges(stages: Sequence[_Stage], pinned: list[int]) -> list[int] | None:
    """Edges 0, cuts, n of the best partition; None where none fits. `pinned` are the edges that are given."""
    if len(pinned) == len(stages) + 1:  # nothing to choose
        each = zip(stages, *np.array([pinned[1:], pinned[:-1]])[..., None], strict=True)
        return pinned if all(stage.fits(end, start).item() for stage, end, start in each) else None
    limit = _smallest_limit([stages])
    return None if limit is None else _smoothest(stages, limit)


def _smallest_limit(ways: Sequence[Sequence[_Stage]]) -> float | None:
    """The time of the slowest stage of the best partition, each stage in the best way; None where there is none."""
    every = {stage.times for way in ways for stage in way}
    most = max(float(times.ends.max() - times.starts.min()) for times in every)
    low, limit = 0.0, most
    if _windows(ways, low) is not None:
        limit = low
    while limit - low > COARSE * limit:  # `low` is impossible
        middle = low + (limit - low) / 2
        low, limit = (middle, limit) if _windows(ways, middle) is None else (low, middle)
    step = COARSE * (limit or most)
    while (high := _faster(ways, limit)) is None:
        if limit >= most:
            return None
        low, limit, step = limit, min(most, limit + step), 2 * step
    while (found := _faster(ways, math.nextafter(high, -math.inf))) is not None:
        high = found
        middle = low + (high - low) / 2
        if low < middle < high:
            found = _faster(ways, middle)
            low, high = (middle, high) if found is None else (low, found)
    return high


def _faster(ways: Sequence[Sequence[_Stage]], limit: float) -> float | None:
    """The time of the slowest stage of a partition within the limit; None where there is none."""
    windows = _windows(ways, limit)
    if windows is None:
        return None
    if _alike(ways):
        furthest = [int(window[-1]) for window in windows]
        times = ways[0][0].times
        return max(float(times.ends[end] - times.starts[start]) for start, end in itertools.pairwise(furthest))
    reached = _reachable(ways, windows, limit)
    if not len(reached[-1]):
        return None
    slowest, end = 0.0, windows[-1]
    for k in reversed(range(len(ways[0]))):
        seconds = [way[k].seconds(end, reached[k])[0] for way in ways]
        best = min(seconds, key=lambda each: float(each.min()))
        slowest = max(slowest, float(best.min()))
        end = reached[k][best.argmin()][None]
    return slowest


def _alike(ways: Sequence[Sequence[_Stage]]) -> bool:
    """Whether each stage may as well reach as far as it can: a stage that is cut once more stays within the limit."""
    first = ways[0][0]
    same = len(ways) == 1 and all(stage.times is first.times and stage.held is None for stage in ways[0])
    return same and first.times.free and not any(stage.first.any() for stage in ways[0])


def _windows(ways: Sequence[Sequence[_Stage]], limit: float) -> list[Places] | None:
    """For k = 0..K, the positions from the earliest to the furthest that k stages can end at, the others above them, if
    all keep to the limit; None if that leaves none."""
    K, last = len(ways[0]), len(ways[0][0].first) - 1
    furthest, earliest = [0], [last]
    for k in range(K):
        reach = max(way[k].furthest(furthest[-1], limit) for way in ways)
        furthest.append(min(reach, last - (K - 1 - k)))
    if furthest[-1] < last:
        return None
    for k in reversed(range(K)):
        reach = min(way[k].earliest(earliest[-1], limit) for way in ways)
        earliest.append(max(min(reach, earliest[-1] - 1), k))
    earliest.reverse()
    if any(low > high for low, high in zip(earliest, furthest, strict=True)):
        return None
    positions = np.arange(last + 1)
    return [positions[low : high + 1] for low, high in zip(earliest, furthest, strict=True)]


def _reachable(ways: Sequence[Sequence[_Stage]], windows: Sequence[Places], limit: float) -> list[Places]:
    """For k = 0..K, the positions of a window that k stages within the limit can end at, each in one of the ways."""
    reached = [windows[0]]
    for k, (before, here) in enumerate(itertools.pairwise(windows)):
        ended = np.zeros(len(here), bool)
        for way in ways:
            ended |= way[k].times.ends[here] - _best_start(way[k], reached[-1], before, here) <= limit
        reached.append(here[ended])
    return reached


def _best_start(stage: _Stage, starts: Places, before: Places, ends: Places) -> Floats:
    """For every end the largest Y of the starts, positions of the window before, that it may have; -inf without one.

    Y mostly grows, so that it is the largest of all starts below the end; only where that one may not be is there more
    to look at.
    """
    low, size = before[0], len(before)
    values = np.full(size, -np.inf)
    values[starts - low] = stage.times.starts[starts]
    left, right = np.maximum(stage.first[ends] - low, 0), np.minimum(ends - low, size)
    highest = np.maximum.accumulate(values)
    place = np.maximum.accumulate(np.where(values == highest, np.arange(size), 0))[right - 1]  # the last of equals
    best: Floats = highest[right - 1]  # a window begins before the next one
    barred = place < left
    if stage.held is not None:
        barred |= stage.held.ends[ends] - stage.held.starts[place + low] > stage.held.limit
    rows = np.flatnonzero(barred & (best > -np.inf))
    if stage.held is None and len(rows):
        best[rows] = _window_max(values, left[rows], right[rows])
    elif len(rows):
        best[rows] = _best_fitting(stage, starts, ends[rows])
    return best


def _best_fitting(stage: _Stage, starts: Places, ends: Places) -> Floats:
    """The same by trying all starts."""
    best = np.full(len(ends), -np.inf)
    for top in range(0, len(ends), BLOCK):
        rows = ends[top : top + BLOCK]
        near = starts[slice(*np.searchsorted(starts, [stage.first[rows[0]], rows[-1]]))]
        if len(near):
            found = np.where(stage.fits(rows, near), stage.times.starts[near], -np.inf)
            best[top : top + BLOCK] = found.max(axis=1)
    return best


def _window_max(values: Floats, left: Places, right: Places) -> Floats:
    """The maximum of values[left:right] for each pair, -inf where that is empty; a table of powers of two."""
    width = right - left
    level = np.frexp(np.maximum(width, 1))[1] - 1  # the largest power of two that fits
    table = np.full((int(level.max()) + 1, len(values)), -np.inf)
    table[0] = values
    for j in range(1, len(table)):
        half = 1 << (j - 1)
        np.maximum(table[j - 1, :-half], table[j - 1, half:], out=table[j, :-half])
    last = np.maximum(right - (1 << level), 0)
    return np.where(width > 0, np.maximum(table[level, np.minimum(left, len(values) - 1)], table[level, last]), -np.inf)


def _smoothest(stages: Sequence[_Stage], limit: float) -> list[int]:
    """Edges 0, cuts, n of the partition within the limit with the smallest sum of squared times.

    From the last stage to the first, so that of equal sums the earliest first cut wins, then the earliest second.
    """
    size = len(stages[0].first)
    windows = _windows([stages], limit)
    assert windows is not None
    reached = _reachable([stages], windows, limit)
    rest = np.where(np.arange(size) == size - 1, 0.0, np.inf)  # the smallest sum from a position to the end
    next_cut = []
    for stage, starts in zip(reversed(stages), reversed(reached[:-1]), strict=True):
        rest, choice = _best_ends(stage, starts, rest, limit)
        next_cut.append(choice)
    edges = [0]
    for choice in reversed(next_cut):
        edges.append(int(choice[edges[-1]]))
    return edges


def _best_ends(stage: _Stage, starts: Places, rest: Floats, limit: float) -> tuple[Floats, Places]:
    """For every start of a stage: the smallest sum of squares from there on, and the end of the stage that gives it."""
    ends = np.flatnonzero(np.isfinite(rest))
    x, y, rest_there = stage.times.ends[ends], stage.times.starts[starts], rest[ends]
    begin = np.searchsorted(ends, starts, side="right")
    stop = np.searchsorted(stage.first[ends], starts, side="right")  # `first` never falls
    from_here_on = np.minimum.accumulate(x[::-1])[::-1]
    total, choice = np.full(len(rest), np.inf), np.zeros(len(rest), np.intp)
    for top in range(0, len(starts), BLOCK):
        rows = slice(top, top + BLOCK)
        left = begin[rows][0]
        right = min(stop[rows][-1], np.searchsorted(from_here_on - y[rows].max(), limit, side="right"))
        if left >= right:
            continue
        times = x[left:right] - y[rows, None]
        column = np.arange(left, right)
        barred = (times > limit) | (column < begin[rows, None]) | (column >= stop[rows, None])
        if stage.held is not None:
            barred |= ~stage.fits(ends[left:right], starts[rows]).T
        np.multiply(times, times, out=times)
        times += rest_there[left:right]
        times[barred] = np.inf
        best = times.argmin(axis=1)
        total[starts[rows]] = times[np.arange(len(best)), best]
        choice[starts[rows]] = ends[left + best]
    return total, choice


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

    def first(self) -> list[Places]:
        """Of each stage and end, the lowest start that may fit (the end itself where none does), without inputs."""
        return [_lowest_start(sums, limit) for sums, limit in zip(self.sums, self.limits, strict=True)]

    def held(self) -> list[_Held | None]:
        """For a stage that holds inputs, what decides which starts fit: more units may, if their input is smaller."""
        return [
            None if starts is sums else _Held(sums, starts, limit)
            for sums, starts, limit in zip(self.sums, self.starts, self.limits.tolist(), strict=True)
        ]

    def of_stages(self, edges: Sequence[int]) -> tuple[float, ...]:
        """What the stages between these positions keep."""
        each = zip(self.sums, self.starts, itertools.pairwise(edges), strict=True)
        return tuple(float(sums[b] - starts[a]) for sums, starts, (a, b) in each)


def _lowest_start(sums: Floats, limit: float) -> Places:
    """For every b the lowest a with sums[b] - sums[a] <= limit.

    A search for sums[b] - limit rounds differently from the difference that is reported, and is corrected by that.
    """
    low = np.minimum(np.searchsorted(sums, sums - limit), np.arange(len(sums)))
    while (short := sums - sums[low] > limit).any():
        low = low + short
    while (enough := (low > 0) & (sums - sums[low - 1] <= limit)).any():
        low = low - enough
    return low


def _too_little(kept: _Kept, pins: Places) -> UserError:
    """The error for a memory limit that no partition keeps to, with the smallest one that would do."""
    K = len(kept.sums)
    scale = [1.0] * K if kept.alike else kept.limits.tolist()
    each = zip(kept.sums, kept.starts, scale, strict=True)
    least = _smallest_limit([[_Stage(_Times(sums / by, starts / by), pins) for sums, starts, by in each]])
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


def _last_pin(at: Places, pinned: Collection[int]) -> Places:
    """For every end b, the last pinned cut below it (or 0): a stage must not reach across."""
    pins = np.searchsorted(at, np.array([0, *sorted(set(pinned))], np.intp))
    return pins[np.maximum(np.searchsorted(pins, np.arange(len(at)), side="left") - 1, 0)]


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
