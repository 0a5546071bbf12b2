"""The timeline of a method as text, from the same spans as the chart.

Stage 1 comes first, as in the documents:

    stage 1 | F0  F1  F2  .   B0  B0U .
    stage 2 | .   F0  B0  B0U F1  B1  B1U
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from offbeat.clock import draw
from offbeat.method import Method
from offbeat.ops import Update
from offbeat.report.gantt import Box, boxes, heading, unit
from offbeat.timeline import Costs

MOST_COLUMNS = 400


def timeline_text(method: Method, costs: Costs, *, batches: int = 8, title: str | None = None) -> str:
    """A line a stage, a column as long as the shortest operation; below it the tick table, where ticks say the same.

    An operation has at least one column, also where so many would be needed that columns are longer than that.

    >>> from offbeat.methods import FR
    >>> print(timeline_text(FR(), Costs([1, 1], [2, 2]), batches=2, title="FR"))
    FR
    a column is 1 F; F forward, B backward, R forward repeated for a backward, U update, . idle
    stage 1 | F0  .   F1  .   .   R0  B0  B0U R1  B1  B1U
    stage 2 | .   F0  B0  B0U F1  B1  B1U .   .   .   .
    """
    drawn = boxes(method, costs, batches)
    scale, name = unit(costs)
    lengths = [end - start for box in drawn for _, start, end in _parts(box) if end > start]
    column = max(min(lengths, default=1.0), max(box.span.end for box in drawn) / MOST_COLUMNS)
    lines = [_line([box for box in drawn if box.span.k == k], column) for k in range(1, costs.K + 1)]
    columns = max(map(len, lines))
    width = max(len(cell) for line in lines for cell in line)
    repeats = "R forward repeated for a backward, " if any(box.replayed for box in drawn) else ""
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


def _parts(box: Box) -> list[tuple[str, float, float]]:
    """(name, start, end) of what the box shows: a backward that repeats its forward is two."""
    span = box.span
    if isinstance(span.operation, Update):
        return []
    if not box.replayed:
        return [(str(span.operation), span.start, span.end)]
    middle = span.start + box.replayed
    return [(f"R{str(span.operation)[1:]}", span.start, middle), (str(span.operation), middle, span.end)]


def _line(drawn: Iterable[Box], column: float) -> list[str]:
    """The cells of one stage; an update that is shorter than half a column is appended to the cell before it."""
    cells: list[str] = []
    for box in drawn:
        if isinstance(box.span.operation, Update):
            length = _round((box.span.end - box.span.start) / column)
            cells += ["U"] * length
            if not length and cells:
                cells[-1] += "U"
        for name, start, end in _parts(box):
            cells += ["."] * (_round(start / column) - len(cells))
            cells += [name] * max(1, _round(end / column) - len(cells))
    return cells


def _round(columns: float) -> int:
    return math.floor(columns + 0.5 + 1e-6)  # halves always up, so that n columns stay n wherever they start
