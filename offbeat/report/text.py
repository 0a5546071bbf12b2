"""Pictures as text: the timeline of a method, staleness against M, learning curves.

A timeline is of the same spans as the chart. Stage 1 comes first, as in the documents:

    stage 1 | F0  F1  F2  .   B0  B0U .
    stage 2 | .   F0  B0  B0U F1  B1  B1U
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from offbeat.clock import draw
from offbeat.method import Method
from offbeat.ops import Update
from offbeat.report.curves import points
from offbeat.timeline import Costs, Span, timeline

MOST_COLUMNS = 400


def heading(method: Method, costs: Costs, batches: int) -> str:
    """What is drawn, in a line."""
    letters = f"K={costs.K}" + (f", M={method.M}" if method.M > 1 else "")
    if method.m > 1:
        return f"{method.name}, {letters}, {batches} batches of m={method.m} micro-batches (numbered through)"
    return f"{method.name}, {letters}, {batches} batches"


def unit(costs: Costs) -> tuple[float, str]:
    """Seconds that the axis counts as one, and their name: the forward where all forwards cost 1, otherwise ms."""
    return (1.0, "F") if all(forward == 1 for forward in costs.forward) else (0.001, "ms")


def timeline_text(method: Method, costs: Costs, *, batches: int = 8, title: str | None = None) -> str:
    """A line per stage, a column as long as the shortest operation; below it the tick table, where it is the same.

    An operation has at least one column, also where a limit on the columns makes them longer than that.

    >>> from offbeat.methods import FR
    >>> print(timeline_text(FR(), Costs([1, 1], [2, 2]), batches=2, title="FR"))
    FR
    a column is 1 F; F forward, B backward, R forward repeated for a backward, U update, . idle
    stage 1 | F0  .   F1  .   .   R0  B0  B0U R1  B1  B1U
    stage 2 | .   F0  B0  B0U F1  B1  B1U .   .   .   .
    """
    spans = timeline(method, batches, costs)
    scale, name = unit(costs)
    lengths = [end - start for span in spans for _, start, end in _parts(span) if end > start]
    column = max(min(lengths, default=1.0), max(span.end for span in spans) / MOST_COLUMNS)
    lines = [_line([span for span in spans if span.k == k], column) for k in range(1, costs.K + 1)]
    columns = max(map(len, lines))
    width = max(len(cell) for line in lines for cell in line)
    repeats = "R forward repeated for a backward, " if any(span.replayed for span in spans) else ""
    text = [
        title or heading(method, costs, batches),
        f"a column is {column / scale:.4g} {name}; F forward, B backward, {repeats}U update, . idle",
    ]
    for k, line in enumerate(lines, start=1):
        cells = line + ["."] * (columns - len(line))
        text.append(f"{f'stage {k}':<{len(f'stage {costs.K}')}} | " + " ".join(cell.ljust(width) for cell in cells))
    if not method.barrier and method.m == 1:
        text += ["", draw(method, costs.K, range(batches))]
    return "\n".join(line.rstrip() for line in text)


def _parts(span: Span) -> list[tuple[str, float, float]]:
    """(name, start, end) of what is shown of it: a backward that repeats its forward is two."""
    if isinstance(span.operation, Update):
        return []
    if not span.replayed:
        return [(str(span.operation), span.start, span.end)]
    middle = span.start + span.replayed
    return [(f"R{str(span.operation)[1:]}", span.start, middle), (str(span.operation), middle, span.end)]


def _line(spans: Iterable[Span], column: float) -> list[str]:
    """The cells of one stage; an update that is shorter than half a column is appended to the cell before it."""
    cells: list[str] = []
    for span in spans:
        if isinstance(span.operation, Update):
            length = _round((span.end - span.start) / column)
            cells += ["U"] * length
            if not length and cells:
                cells[-1] += "U"
        for name, start, end in _parts(span):
            cells += ["."] * (_round(start / column) - len(cells))
            cells += [name] * max(1, _round(end / column) - len(cells))
    return cells


def _round(columns: float) -> int:
    return math.floor(columns + 0.5 + 1e-6)  # halves always up, so that n columns stay n wherever they start


# ---- the other pictures


def staleness_of_stages(method_of_M: Callable[[int], Method], K: int, largest_M: int) -> list[list[float]]:
    """Mean staleness in updates (the paper's eq. 19): a row for each stage, a column for each M.

    >>> from offbeat.methods import ADL
    >>> staleness_of_stages(ADL, 3, 4)
    [[4.0, 2.0, 1.3333333333333333, 1.0], [2.0, 1.0, 0.6666666666666666, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    methods = [method_of_M(M) for M in range(1, largest_M + 1)]
    return [[method.staleness(k, K) for method in methods] for k in range(1, K + 1)]


def staleness_text(method_of_M: Callable[[int], Method], K: int, *, largest_M: int = 16) -> str:
    """The paper's Fig. 2 as a table, a row for each M and a column for each stage.

    >>> from offbeat.methods import ADL
    >>> print(staleness_text(ADL, 3, largest_M=4))
    adl, K=3: mean staleness in updates
    M | stage 1 | stage 2 | stage 3
    1 |    4.00 |    2.00 |    0.00
    2 |    2.00 |    1.00 |    0.00
    3 |    1.33 |    0.67 |    0.00
    4 |    1.00 |    0.50 |    0.00
    """
    rows = staleness_of_stages(method_of_M, K, largest_M)
    names = [f"stage {k}" for k in range(1, K + 1)]
    width = len(str(largest_M))
    lines = [
        f"{method_of_M(1).name}, K={K}: mean staleness in updates",
        " | ".join(["M".ljust(width), *names]),
    ]
    for M in range(1, largest_M + 1):
        values = [f"{row[M - 1]:.2f}".rjust(len(name)) for row, name in zip(rows, names, strict=True)]
        lines.append(" | ".join([str(M).ljust(width), *values]))
    return "\n".join(lines)


def curves_text(runs: Mapping[str, Sequence[Sequence[float]]], *, title: str) -> str:
    """Learning curves as a table, a row for each epoch and a column for each method.

    >>> print(curves_text({"bp": [[9.0, 5.0], [8.0, 2.0]], "adl": [[9.5]]}, title="error"))
    error
    epoch | bp               | adl
    1     | 8.50 (8.00-9.00) | 9.50 (9.50-9.50)
    2     | 3.50 (2.00-5.00) |
    """
    columns = [
        [f"{point.middle:.2f} ({point.lowest:.2f}-{point.highest:.2f})" for point in points(curves)]
        for curves in runs.values()
    ]
    rows = [["epoch", *runs]]
    rows += [[str(epoch), *cells] for epoch, cells in enumerate(zip_longest(*columns, fillvalue=""), start=1)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *(line.rstrip() for line in lines)])
