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

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import UserError

Floats = NDArray[np.float64]
Exposed = Sequence[float] | Callable[[int], float]

BLOCK = 64  # starts tried at once: their table of times stays in the cache


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a stage of these units keeps: parameters * versions[k] + held * in_flight[k], at most `limit` per worker.

    parameters, held       of each unit: its parameters, and what one batch leaves for its backward
    versions, in_flight    of each stage, from stage 1: weight versions (optimizer state may count as more of them)
                           and batches between their forward and backward
    limit                  of every worker, or one for each
    """

    parameters: Sequence[float]
    held: Sequence[float]
    versions: Sequence[float]
    in_flight: Sequence[float]
    limit: float | Sequence[float]


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
    """One problem, one row per stage: time = ends - starts, over the positions 0..n, a start no lower than `first`."""

    ends: list[Floats]
    starts: list[Floats]
    first: list[NDArray[np.intp]]
    legal: NDArray[np.bool_]


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
    pace = np.ones(K) if speeds is None else _numbers("speeds", speeds, K, of="stages", zero=False)
    below = _at_cuts("exposed_below", exposed_below, allowed, count)
    above = _at_cuts("exposed_above", exposed_above, allowed, count)
    prefix = _prefix(work)
    pins = _last_pin(count, pinned)
    kept = None if memory is None else _Kept.of(memory, count, K)
    mask = np.zeros(count + 1, bool)
    mask[allowed] = True
    stages = _Stages(
        ends=[prefix / speed + below for speed in pace],
        starts=[prefix / speed - above for speed in pace],
        first=[pins] * K if kept is None else [np.maximum(pins, first) for first in kept.first()],
        legal=mask,
    )
    limit = _smallest_limit(stages)
    if limit is None:
        assert kept is not None  # pins and legal cuts alone, once checked, always leave a partition
        raise _too_little(kept, pins, mask)
    edges = _smoothest(stages, limit)
    spans = list(enumerate(itertools.pairwise(edges)))
    largest = max(itertools.pairwise([0, *allowed, count]), key=lambda piece: prefix[piece[1]] - prefix[piece[0]])
    return Solution(
        cuts=tuple(edges[1:-1]),
        times=tuple(float(stages.ends[k][b] - stages.starts[k][a]) for k, (a, b) in spans),
        memory=None if kept is None else tuple(float(kept.sums[k][b] - kept.sums[k][a]) for k, (a, b) in spans),
        costs=tuple(work.tolist()),
        largest=largest,
        unit_bound=float((prefix[largest[1]] - prefix[largest[0]]) / pace.max()),
    )


# --- the search ---------------------------------------------------------------------------------------------------


def _smallest_limit(stages: _Stages) -> float | None:
    """The time of the slowest stage of the best partition; None where there is no partition."""

    def possible(limit: float) -> bool:
        return bool(_reachable(stages, limit)[-1][-1])

    high = max(float(ends.max() - starts.min()) for ends, starts in zip(stages.ends, stages.starts, strict=True))
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


def _reachable(stages: _Stages, limit: float) -> list[NDArray[np.bool_]]:
    """For k = 0..K, the positions that k stages within the limit can end at."""
    positions = np.arange(len(stages.legal))
    reached = [positions == 0]
    for k, (ends, starts, first) in enumerate(zip(stages.ends, stages.starts, stages.first, strict=True), start=1):
        best = _window_max(np.where(reached[-1], starts, -np.inf), first)
        may_end = stages.legal if k < len(stages.ends) else positions == positions[-1]
        reached.append(may_end & (ends - best <= limit))
    return reached


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
    reached = _reachable(stages, limit)
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
    """Memory of stage k from a to b: sums[k][b] - sums[k][a]; `alike`: one limit was given for all workers."""

    sums: list[Floats]
    limits: Floats
    alike: bool

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
        return cls(sums, limits, alike)

    def first(self) -> list[NDArray[np.intp]]:
        """Of each stage and end, the lowest start that fits (the end itself where none does)."""
        return [_lowest_start(sums, limit) for sums, limit in zip(self.sums, self.limits, strict=True)]


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
    needed = kept.sums if kept.alike else [sums / limit for sums, limit in zip(kept.sums, kept.limits, strict=True)]
    least = _smallest_limit(_Stages(ends=needed, starts=needed, first=[pins] * K, legal=legal))
    assert least is not None
    if kept.alike:
        given, enough = f"a memory limit of {_plain(kept.limits[0])} per worker", f"at least {_plain(least)}"
    else:
        given = f"the memory limits {', '.join(map(_plain, kept.limits))}"
        enough = f"limits at least {math.ceil(least * 1000) / 1000:.3f} times as large"
    return UserError(f"{K} stages do not fit {given}: use {enough}, or more stages")


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
            f"{K} stages but only {len(allowed)} legal cuts among {count} units: use {_at_most(len(allowed) + 1)}, "
            "or a model that can be cut in more places"
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
