"""The exact min-max contiguous partition: where K stages balance, on the workers and links that there are.

Stage k covers the units a, ..., b-1 between two cuts (a cut c is before unit c) and takes

    time(k, a, b) = (P[b] - P[a]) / speed_k + exposed_above[a] + exposed_below[b] = X_k[b] - Y_k[a]

with P the prefix sums of the costs. For a given limit, whether K stages can all keep to it is a dynamic programme over
(k, position). Because X and Y are separate, position b ends a stage k within the limit exactly if
X_k[b] - max Y_k[a] <= limit, the maximum taken over the starts a from which stage k may reach b; and a rounded
difference x - y never grows with y, so this holds to the last bit of the numbers as computed. What forbids a start
(memory, a pinned cut in between) forbids every earlier one as well, so the starts form a window whose lower edge
moves up with b, and each maximum is a range maximum. A bisection down to two neighbouring floats then finds the
smallest limit itself, not one close to it.

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

Fits = NDArray[np.bool_] | None  # [end, start]; None: all
Floats = NDArray[np.float64]
Exposed = Sequence[float] | Callable[[int], float]

BLOCK = 64  # starts tried at once: their table of times stays in the cache


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a stage of these units keeps: parameters * versions[k] + held * in_flight[k] + entering * inputs[k], at most
    `limit` per worker.

    parameters, held       of each unit: its parameters, and what one batch leaves for its backward
    versions, in_flight    of each stage, from stage 1: weight versions (optimizer state may count as more of them)
                           and batches between their forward and backward
    limit                  of every worker, or one for each
    entering               of each unit: the input of a stage that begins with it
    inputs                 of each stage: batches of which it holds the input alone, and repeats the forward (none)
    in_bytes               all of this is in bytes: an error about `limit` states megabytes
    """

    parameters: Sequence[float]
    held: Sequence[float]
    versions: Sequence[float]
    in_flight: Sequence[float]
    limit: float | Sequence[float]
    entering: Sequence[float] | None = None
    inputs: Sequence[float] | None = None
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


@dataclass(frozen=True)
class _Stages:
    """One problem, one row per stage: time = ends - starts, over the positions 0..n, a start no lower than `first`.

    `fits` has the starts [end, start] that fit, for a stage where these are not all from some position on.
    """

    ends: list[Floats]
    starts: list[Floats]
    first: list[NDArray[np.intp]]
    fits: list[Fits]
    legal: NDArray[np.bool_]

    def within(self, k: int, limit: float, end: int | slice = slice(None)) -> NDArray[np.bool_]:
        """Which starts of a stage fit and keep to the limit: [end, start], or [start] for one end."""
        fits = self.fits[k]
        quick: NDArray[np.bool_] = np.asarray(self.ends[k][end])[..., None] - self.starts[k] <= limit
        return quick if fits is None else quick & fits[end]


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
    allowed = _allowed(count, K, pinned, legal)
    pace = _speeds(speeds, K)
    below = _at_cuts("exposed_below", exposed_below, allowed, count)
    above = _at_cuts("exposed_above", exposed_above, allowed, count)
    prefix = _prefix(work)
    pins = _last_pin(count, pinned)
    kept = None if memory is None else _Kept.of(memory, count, K)
    mask = _mask(count, allowed)
    stages = _Stages(
        ends=[prefix / speed + below for speed in pace],
        starts=[prefix / speed - above for speed in pace],
        first=[pins] * K if kept is None else [np.maximum(pins, first) for first in kept.first()],
        fits=[None] * K if kept is None else kept.fits(),
        legal=mask,
    )
    limit = _smallest_limit([stages])
    if limit is None:
        assert kept is not None  # pins and legal cuts alone, once checked, always leave a partition
        raise _too_little(kept, pins, mask)
    edges = _smoothest(stages, limit)
    spans = list(enumerate(itertools.pairwise(edges)))
    largest = max(itertools.pairwise([0, *allowed, count]), key=lambda piece: prefix[piece[1]] - prefix[piece[0]])
    return Solution(
        cuts=tuple(edges[1:-1]),
        times=tuple(float(stages.ends[k][b] - stages.starts[k][a]) for k, (a, b) in spans),
        memory=None if kept is None else tuple(float(kept.sums[k][b] - kept.starts[k][a]) for k, (a, b) in spans),
        costs=tuple(work.tolist()),
        largest=largest,
        unit_bound=float((prefix[largest[1]] - prefix[largest[0]]) / pace.max()),
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
    prefix = _prefix(_numbers("costs", costs))
    count = len(costs)
    mask, pins = _mask(count, _allowed(count, K, pinned, legal)), _last_pin(count, pinned)
    ways = []
    for memory, speeds in (plain, changed):
        kept, times = _Kept.of(memory, count, K), [prefix / speed for speed in _speeds(speeds, K)]
        ways.append(_Stages(times, times, [np.maximum(pins, first) for first in kept.first()], kept.fits(), mask))
    limit = _smallest_limit(ways)
    if limit is None:
        return None
    alone = _smallest_limit(ways[:1])
    without = np.inf if alone is None else alone / limit if limit else 1.0
    enough = alone is not None and without <= within
    return Changed(() if enough else _fewest(ways, limit * within), float(without))


def _fewest(ways: Sequence[_Stages], limit: float) -> tuple[int, ...]:
    """The fewest stages that run the second way with all within the limit, which the two ways together permit."""
    positions = np.arange(len(ways[0].legal))
    K, count = len(ways[0].ends), len(positions) - 1
    fewest = [np.where(positions == 0, 0.0, np.inf)]  # for k = 0..K: changed stages of k that end at a position
    for k in range(K):
        may_end = ways[0].legal if k < K - 1 else positions == count
        found = [-_best_start(-fewest[-1], way.first[k], way.within(k, limit)) + cost for cost, way in enumerate(ways)]
        fewest.append(np.where(may_end, np.minimum(*found), np.inf))
    stages: list[int] = []
    end = count
    for k in reversed(range(K)):
        cost, end = next(
            (cost, int(start))
            for cost, way in enumerate(ways)
            for start in np.flatnonzero(way.within(k, limit, end))
            if way.first[k][end] <= start < end and fewest[k][start] + cost == fewest[k + 1][end]
        )
        stages += [k + 1] * cost
    return tuple(reversed(stages))


# --- the search ---------------------------------------------------------------------------------------------------


def _smallest_limit(ways: Sequence[_Stages]) -> float | None:
    """The time of the slowest stage of the best partition, each stage in the best way; None where there is none."""
    stages = ways[0]

    def possible(limit: float) -> bool:
        return bool(_reachable(ways, limit)[-1][-1])

    high = max(float(e.max() - s.min()) for way in ways for e, s in zip(way.ends, way.starts, strict=True))
    if not possible(high):
        return None
    low = high / (2 * len(stages.ends))
    while low > 0 and possible(low):
        low, high = low / 2, low
    if low == 0 and possible(low):
        return low
    while low < (middle := low + (high - low) / 2) < high:  # `low` is impossible, `high` is not
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


def _reachable(ways: Sequence[_Stages], limit: float) -> list[NDArray[np.bool_]]:
    """For k = 0..K, the positions that k stages within the limit can end at, each stage in one of the ways."""
    stages = ways[0]
    positions = np.arange(len(stages.legal))
    reached = [positions == 0]
    for k in range(len(stages.ends)):
        ended = np.zeros(len(positions), bool)
        for way in ways:
            best = _best_start(np.where(reached[-1], way.starts[k], -np.inf), way.first[k], way.fits[k])
            ended |= way.ends[k] - best <= limit
        reached.append(ended & (stages.legal if k < len(stages.ends) - 1 else positions == positions[-1]))
    return reached


def _best_start(values: Floats, first: NDArray[np.intp], fits: Fits) -> Floats:
    """For every b the maximum of values[first[b]:b], of those that fit; -inf where there is none."""
    if fits is None:
        return _window_max(values, first)
    positions = np.arange(len(values))
    may = fits & (positions < positions[:, None]) & (positions >= first[:, None])
    best: Floats = np.where(may, values, -np.inf).max(axis=1)
    return best


def _window_max(values: Floats, first: NDArray[np.intp]) -> Floats:
    """The maximum of values[first[b]:b] for every b, -inf where that is empty; a table of powers of two."""
    size = len(values)
    if not first.any():
        return np.concatenate(([-np.inf], np.maximum.accumulate(values)[:-1]))
    positions = np.arange(size)
    width = positions - first
    level = np.frexp(np.maximum(width, 1))[1] - 1  # the largest power of two that fits
    table = np.full((int(level.max()) + 1, size), -np.inf)
    table[0] = values
    for j in range(1, len(table)):
        half = 1 << (j - 1)
        np.maximum(table[j - 1, :-half], table[j - 1, half:], out=table[j, :-half])
    last = np.maximum(positions - (1 << level), 0)
    return np.where(width > 0, np.maximum(table[level, np.minimum(first, size - 1)], table[level, last]), -np.inf)


def _smoothest(stages: _Stages, limit: float) -> list[int]:
    """Edges 0, cuts, n of the partition within the limit with the smallest sum of squared times.

    From the last stage to the first, so that of equal sums the earliest first cut wins, then the earliest second.
    """
    size = len(stages.legal)
    reached = _reachable([stages], limit)
    rest = np.where(np.arange(size) == size - 1, 0.0, np.inf)  # the smallest sum from a position to the end
    next_cut = []
    for k in reversed(range(len(stages.ends))):
        rest, choice = _best_ends(stages, k, np.flatnonzero(reached[k]), rest, limit)
        next_cut.append(choice)
    edges = [0]
    for choice in reversed(next_cut):
        edges.append(int(choice[edges[-1]]))
    return edges


def _best_ends(
    stages: _Stages, k: int, starts: NDArray[np.intp], rest: Floats, limit: float
) -> tuple[Floats, NDArray[np.intp]]:
    """For every start of a stage: the smallest sum of squares from there on, and the end of the stage that gives it."""
    ends = np.flatnonzero(np.isfinite(rest))
    x, y, rest_there = stages.ends[k][ends], stages.starts[k][starts], rest[ends]
    begin = np.searchsorted(ends, starts, side="right")
    stop = np.searchsorted(stages.first[k][ends], starts, side="right")  # `first` never falls
    fits = stages.fits[k]
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
        if fits is not None:
            barred |= ~fits[np.ix_(ends[left:right], starts[rows])].T
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
    def of(cls, memory: Memory, count: int, K: int) -> _Kept:
        parameters, held = (_numbers(f"memory.{name}", getattr(memory, name), count) for name in ("parameters", "held"))
        versions, in_flight = (
            _numbers(f"memory.{name}", getattr(memory, name), K, of="stages") for name in ("versions", "in_flight")
        )
        alike = np.ndim(memory.limit) == 0
        given = np.resize(memory.limit, K) if alike else memory.limit
        limits = _numbers("memory.limit", given, K, of="stages", zero=False)
        sums = [_prefix(parameters * v + held * f) for v, f in zip(versions, in_flight, strict=True)]
        if memory.entering is None or memory.inputs is None:
            return cls(sums, sums, limits, alike, memory.in_bytes)
        entering = np.append(_numbers("memory.entering", memory.entering, count), 0.0)
        inputs = _numbers("memory.inputs", memory.inputs, K, of="stages")
        starts = [each - entering * n if n else each for each, n in zip(sums, inputs, strict=True)]
        return cls(sums, starts, limits, alike, memory.in_bytes)

    def first(self) -> list[NDArray[np.intp]]:
        """Of each stage and end, the lowest start that fits (the end itself where none does); see `fits`."""
        return [
            _lowest_start(sums, limit) if starts is sums else np.zeros(len(sums), np.intp)
            for sums, starts, limit in zip(self.sums, self.starts, self.limits, strict=True)
        ]

    def fits(self) -> list[Fits]:
        """For a stage that holds inputs, which starts [end, start] fit: more units may, if their input is smaller."""
        return [
            None if starts is sums else sums[:, None] - starts <= limit
            for sums, starts, limit in zip(self.sums, self.starts, self.limits, strict=True)
        ]


def _mask(count: int, allowed: Sequence[int]) -> NDArray[np.bool_]:
    mask = np.zeros(count + 1, bool)
    mask[allowed] = True
    return mask


def _lowest_start(sums: Floats, limit: float) -> NDArray[np.intp]:
    """For every b the lowest a with sums[b] - sums[a] <= limit, by bisection for all b at once.

    Not by searching for sums[b] - limit, which rounds differently from the difference that is reported.
    """
    low, high = np.zeros(len(sums), np.intp), np.arange(len(sums))
    while (low < high).any():
        middle = (low + high) // 2
        fits = sums - sums[middle] <= limit
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
    return low


def _too_little(kept: _Kept, pins: NDArray[np.intp], legal: NDArray[np.bool_]) -> UserError:
    """The error for a memory limit that no partition keeps to, with the smallest one that would do."""
    K = len(kept.sums)
    ends, starts = (
        each if kept.alike else [sums / limit for sums, limit in zip(each, kept.limits, strict=True)]
        for each in (kept.sums, kept.starts)
    )
    least = _smallest_limit([_Stages(ends=ends, starts=starts, first=[pins] * K, fits=[None] * K, legal=legal)])
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


def _allowed(count: int, K: int, pinned: Collection[int], legal: Collection[int] | None) -> list[int]:
    """The legal cuts in order; refuses what no partition can satisfy."""
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
    return allowed


def _last_pin(count: int, pinned: Collection[int]) -> NDArray[np.intp]:
    """For every end b, the last pinned cut below it (or 0): a stage must not reach across."""
    pins = np.array([0, *sorted(set(pinned))], np.intp)
    return pins[np.maximum(np.searchsorted(pins, np.arange(count + 1), side="left") - 1, 0)]


def _speeds(given: Sequence[float] | None, K: int) -> Floats:
    return np.ones(K) if given is None else _numbers("speeds", given, K, of="stages", zero=False)


def _at_cuts(name: str, given: Exposed | None, allowed: Sequence[int], count: int) -> Floats:
    """The exposed communication by position 0..n; nothing at the model's own ends."""
    at = np.zeros(count + 1)
    if callable(given):
        at[allowed] = _numbers(name, [given(cut) for cut in allowed])
    elif given is not None:
        at[allowed] = _numbers(name, [0.0, *list(given)[1:]], count)[allowed]
    return at


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
