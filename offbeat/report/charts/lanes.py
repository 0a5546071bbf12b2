"""The lanes of a timeline, which can be moved and zoomed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from offbeat.report.charts.data import chart_of, layered
from offbeat.report.charts.legend import WIDE, chosen, legend
from offbeat.report.style import LETTERS, SMALL, colour

KINDS = {
    "forward": "forward",
    "forward repeated": "repeated",
    "backward": "backward",
    "update": "update",
    "send": "send",
    "wait": "wait",
    "drain": "drain",
}  # with the names of their colours


@dataclass(frozen=True, slots=True)
class Box:
    """What one stage does, from when to when, in the unit of the axis.

    number   of the batch, written into the box where it fits; version: of the weights, written below
    """

    k: int
    kind: str
    start: float
    end: float
    number: int | None = None
    version: int | None = None


def lanes(drawn: Sequence[Box], *, K: int, unit: str, length: float | None = None) -> alt.LayerChart:
    """A lane for each stage, stage 1 at the bottom; a box for each operation, with its batch; can be moved and zoomed.

    unit: of time, as the axis calls it
    """
    stages = [f"stage {k}" for k in range(K, 0, -1)]
    shown = [kind for kind in KINDS if any(box.kind == kind for box in drawn)]
    versions = any(box.version is not None for box in drawn)
    step = (46 if versions else 36) if K <= 8 else 26 if K <= 16 else 18
    rows = _rows(drawn)
    end = length or max((box.end for box in drawn), default=1.0) or 1.0
    place = alt.Y(
        "stage:N",
        sort=stages,
        title=None,
        scale=alt.Scale(domain=stages, paddingInner=0.14),
        axis=alt.Axis(labelColor=colour("ink"), labelFontSize=LETTERS if step > 20 else SMALL, grid=False),
    )
    ground = [{"stage": stage} for stage in stages]
    lane = chart_of(ground).mark_bar(color=colour("lane"), x=0, x2=alt.ExprRef("width")).encode(y=place)
    pick, one = chosen("kind"), len(shown) < 2
    move = alt.selection_interval(
        name="move", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]"
    )
    chart = chart_of(rows).transform_calculate(took="datum.end - datum.start")
    only = chart if one else chart.transform_filter(pick)
    boxes, updates = _boxes(only, place, shown, unit=unit, end=end, versions=versions)
    layers = [lane, boxes.add_params(move, *([] if one else [pick])), updates]
    if step > 20:
        layers.append(_texts(only, place, "number", font_size=SMALL, dy=-6 if versions else 0))
    if versions and step > 30:
        layers.append(_texts(only, place, "version", font_size=10, fillOpacity=0.75, dy=9))
    return layered(layers, rows, ground, height=step * K)


def _rows(drawn: Sequence[Box]) -> list[dict[str, Any]]:
    """The boxes in the order of drawing: updates, which are narrow, are above the others."""
    return [
        {
            "stage": f"stage {box.k}",
            "kind": box.kind,
            "start": _short(box.start),
            "end": _short(box.end),
            "number": "" if box.number is None else str(box.number),
            **({} if box.version is None else {"version": f"v{box.version}"}),
        }
        for box in sorted(drawn, key=lambda box: list(KINDS).index(box.kind), reverse=True)
    ]


def _boxes(
    chart: alt.Chart, place: alt.Y, shown: list[str], *, unit: str, end: float, versions: bool
) -> tuple[alt.Chart, alt.Chart]:
    """The operations, and the updates, which have an outline so that short ones are seen."""
    scale = alt.Scale(domain=[0, end], nice=False)
    hue = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=shown, range=[colour(KINDS[kind]) for kind in shown]),
        legend=legend({kind: kind for kind in shown}, symbol="square"),
    )
    encoded: dict[str, Any] = {
        "x": alt.X("start:Q", title=f"time, {unit}", scale=scale, axis=alt.Axis(tickCount=8)),
        "x2": "end:Q",
        "y": place,
        "color": hue,
        "tooltip": [
            alt.Tooltip("stage:N"),
            alt.Tooltip("kind:N", title="does"),
            alt.Tooltip("number:N", title="batch"),
            *([alt.Tooltip("version:N", title="weights")] if versions else []),
            alt.Tooltip("start:Q", title="from", format=",.4~r"),
            alt.Tooltip("took:Q", title="takes", format=",.3~r"),
        ],
    }
    others = chart.transform_filter("datum.kind != 'update'")
    updates = chart.transform_filter("datum.kind == 'update'")
    return (
        others.mark_bar(clip=True, stroke=colour("page"), strokeWidth=0.7, cornerRadius=1).encode(**encoded),
        updates.mark_bar(clip=True, stroke=colour("update"), strokeWidth=1.6).encode(**encoded),
    )


def _texts(chart: alt.Chart, place: alt.Y, field: str, *, font_size: float, **style: Any) -> alt.Chart:
    """A field of the forwards and backwards, in the middle of those boxes that are wide enough for it."""
    letter = WIDE * font_size + (1 if field == "number" else 0.6)
    fits = f"(scale('x', datum.end) - scale('x', datum.start)) > {letter:.1f} * length(datum.{field}) + 3"
    texts = chart.transform_filter("(datum.kind == 'forward' || datum.kind == 'backward')")
    return (
        texts.transform_calculate(middle="(datum.start + datum.end) / 2")
        .mark_text(clip=True, fontSize=font_size, fill=colour("box"), **style)
        .encode(x=alt.X("middle:Q"), y=place, text=alt.condition(fits, f"{field}:N", alt.value("")))
    )


def _short(value: float) -> float:
    """With seven digits: a page holds thousands of them.

    >>> _short(12.345678912)
    12.34568
    """
    return float(f"{value:.7g}")
