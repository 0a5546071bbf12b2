"""What each stage of a partition has and costs, as a table, and a warning where one is much slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from offbeat.partitioning.profile import Profile

TOLERATED = 1.3  # times the mean cost: a slower stage is worth a warning


@dataclass(frozen=True)
class StageSummary:
    """One stage. Cost, memory and boundary are None where there was no sample to count them by."""

    first: str  # name of its first unit
    last: str
    units: int
    parameters: int
    share: float | None = None  # of the cost of all stages
    memory: int | None = None  # bytes of its parameters, and of what one batch in flight holds
    boundary: int | None = None  # bytes per batch that it sends to the next stage; None for the last


def summarize(
    names: Sequence[str],
    cuts: Sequence[int],
    parameters: Sequence[int],
    costs: Sequence[float],
    found: Profile | None,
    *,
    tied: Sequence[int],
) -> list[StageSummary]:
    """The stages between the cuts; `parameters`, `costs` and `tied`, bytes of parameters to send, are those of each
    stage."""
    rows = []
    for k, (start, end) in enumerate(pairwise([0, *cuts, len(names)])):
        share = memory = boundary = None
        if costs:
            share = costs[k] / sum(costs) if sum(costs) else 1 / len(costs)
        if found:
            memory = sum(unit.parameter_bytes for unit in found.units[start:end]) + found.held_bytes(start, end)
            boundary = found.boundary_bytes[end] + tied[k] if end < len(names) else None
        rows.append(StageSummary(names[start], names[end - 1], end - start, parameters[k], share, memory, boundary))
    return rows


def table(rows: Sequence[StageSummary]) -> str:
    """The stages as aligned text.

    >>> rows = [StageSummary("conv", "layer1", 3, 1200, 0.4, 4096, 2048), StageSummary("fc", "fc", 1, 90, 0.6, 80)]
    >>> print(table(rows))
    stage  from  to      units  parameters  cost  memory  sends per batch
        1  conv  layer1      3       1,200   40%   4 KiB            2 KiB
        2  fc    fc          1          90   60%    80 B                -
    """
    heads = ("stage", "from", "to", "units", "parameters", "cost", "memory", "sends per batch")
    cells = [heads]
    for k, row in enumerate(rows, start=1):
        share = "-" if row.share is None else f"{row.share:.0%}"
        sizes = [_bytes(row.memory), _bytes(row.boundary)]
        cells.append((str(k), row.first, row.last, str(row.units), f"{row.parameters:,}", share, sizes[0], sizes[1]))
    widths = [max(len(line[n]) for line in cells) for n in range(len(heads))]
    left = {1, 2}
    lines = []
    for line in cells:
        aligned = [text.ljust(widths[n]) if n in left else text.rjust(widths[n]) for n, text in enumerate(line)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def imbalance(
    loads: Sequence[float], names: Sequence[str], cuts: Sequence[int], costs: Sequence[float], *, remedy: str
) -> str | None:
    """A line about the slowest stage, if its load is above TOLERATED times the mean: what causes it, and what to do.

    `loads` are the costs of the stages, `costs` those of the units.

    >>> imbalance([9, 3], ["embed", "a", "b", "c"], [1], [9, 1, 1, 1], remedy="split it into submodules")
    'uneven cuts: stage 1 of 2 has 1.50 times the mean cost: unit embed alone has 1.50 times; split it into submodules'
    """
    mean = fmean(loads)
    if not mean or max(loads) <= TOLERATED * mean:
        return None
    slowest = loads.index(max(loads))
    start, end = [0, *cuts][slowest], [*cuts, len(costs)][slowest]
    largest = max(range(start, end), key=lambda n: costs[n])
    size = costs[largest] / (sum(costs) / len(loads))
    fitting = int(len(loads) / size)
    fewer = f"use K={fitting} or fewer, or " if 1 < fitting < len(loads) else ""
    stage = f"uneven cuts: stage {slowest + 1} of {len(loads)} has {max(loads) / mean:.2f} times the mean cost"
    if size > 1:
        return f"{stage}: unit {names[largest]} alone has {size:.2f} times; {fewer}{remedy}"
    coarse = f"it has {end - start} units, the largest is {names[largest]} with {size:.2f} times"
    return f"{stage}: {coarse}; use a smaller K, or {remedy}"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if size >= 10 or size.is_integer() else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
