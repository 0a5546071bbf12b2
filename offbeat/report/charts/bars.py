"""Bars, with their spread, what they are compared with, and what they cannot exceed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from offbeat.report.charts.data import Rows, chart_of, layered
from offbeat.report.charts.legend import chosen, legend
from offbeat.report.style import LETTERS, SMALL, colour


@dataclass(frozen=True)
class Bar:
    """A value in a row of its own.

    text     the value as it is written at the end of the bar
    group    which of the legend's names it belongs to
    mark     another value, to compare it with
    spread   the lowest and the highest
    faint    whether it is drawn lighter
    """

    label: str
    value: float
    text: str
    group: str = ""
    mark: float | None = None
    spread: tuple[float, float] | None = None
    faint: bool = False


def bars(
    drawn: Sequence[Bar],
    *,
    title: str,
    groups: Mapping[str, str] | None = None,
    mark: str = "",
    limit: float | None = None,
    limit_name: str = "",
    whole: float | None = None,
    form: str = ",.4~r",
    above: bool = False,
) -> alt.LayerChart:
    """A row for each bar: its name, its length, its value in words.

    groups   colours of the groups, by their names; `mark` is the name of the upright strokes
    limit    a value that no bar can exceed: a dashed line, with its name
    whole    the most that a value can be, 1 for a share: drawn as the ground of all bars
    above    whether the names stand above their bars, because they are long
    """
    groups = dict(groups or {"": colour(0)})
    names = {**groups, **({mark: colour("ink")} if mark else {})}
    rows: list[dict[str, Any]] = [
        {
            "label": bar.label,
            "value": bar.value,
            "text": bar.text,
            "group": bar.group,
            "opacity": 0.45 if bar.faint else 1,
            "mark": bar.mark,
            "low": bar.spread[0] if bar.spread else None,
            "high": bar.spread[1] if bar.spread else None,
            "end": max(bar.value, bar.mark or 0.0, *(bar.spread or ())),
        }
        for bar in drawn
    ]
    most = whole or max([row["end"] for row in rows] + [limit or 0.0]) or 1.0
    step = (42 if above else 26) if len(rows) <= 12 else (36 if above else 19)
    place = alt.Y(
        "label:N",
        sort=None,
        title=None,
        scale=alt.Scale(domain=[bar.label for bar in drawn], paddingInner=0.3, paddingOuter=0.15),
        axis=None if above else alt.Axis(labelColor=colour("ink"), labelFontSize=LETTERS, labelLimit=150, grid=False),
    )
    across = alt.X(
        "value:Q",
        title=title,
        stack=None,
        scale=alt.Scale(domain=[0, most * 1.16], nice=False),
        axis=alt.Axis(tickCount=4, grid=True, format="%" if whole == 1 else alt.Undefined),
    )
    shown = legend({name: name for name in names}, symbol="square") if len(names) > 1 else None
    scale = alt.Scale(domain=list(names), range=list(names.values()))
    hue: Any = alt.Color("group:N", scale=scale, legend=shown)
    lighter = alt.FillOpacity("opacity:Q", scale=None)
    tip = [
        alt.Tooltip("label:N", title="row" if above else "stage"),
        alt.Tooltip("value:Q", title=title, format=".1%" if whole == 1 else form),
    ]
    if mark:
        tip.append(alt.Tooltip("mark:Q", title=mark, format=".1%" if whole == 1 else form))
    if any(bar.spread for bar in drawn):
        tip += [alt.Tooltip("low:Q", title="lowest", format=form), alt.Tooltip("high:Q", title="highest", format=form)]
    chart = chart_of(rows)
    pick = chosen("group")
    below = 9 if above else 0
    thick: Any = {"size": 15} if above else {}
    only = chart.transform_filter(pick) if shown is not None else chart
    layers: list[alt.Chart] = []
    sources: list[Rows] = [rows]
    if whole is not None:
        layers.append(
            chart.mark_bar(color=colour("lane"), yOffset=below, **thick).encode(
                y=place, x=alt.datum(0, type="quantitative"), x2=alt.datum(whole)
            )
        )
    main = len(layers)
    layers.append(
        only.mark_bar(cornerRadiusEnd=2, yOffset=below, **thick).encode(
            x=across, y=place, color=hue, fillOpacity=lighter, tooltip=tip
        )
    )
    if any(bar.spread for bar in drawn):
        spread = only.transform_filter("isValid(datum.low)")
        layers.append(
            spread.mark_rule(yOffset=below, y2Offset=below, strokeWidth=1.3).encode(x="low:Q", x2="high:Q", y=place)
        )
        layers += [
            spread.mark_tick(yOffset=below, thickness=1.3, size=9).encode(x=f"{end}:Q", y=place)
            for end in ("low", "high")
        ]
    if mark:
        strokes = chart.transform_filter("isValid(datum.mark)").transform_calculate(group=json.dumps(mark))
        strokes = strokes.transform_filter(pick) if shown is not None else strokes
        layers.append(strokes.mark_tick(thickness=2.4, size=step - 6).encode(x="mark:Q", y=place, color=hue))
    if above:
        layers.append(
            only.mark_text(align="left", baseline="middle", dy=-9).encode(
                x=alt.datum(0, type="quantitative"), y=place, text="label:N"
            )
        )
    if limit is not None:
        bound = [{"value": limit, "name": limit_name}]
        sources.append(bound)
        line = chart_of(bound)
        right = limit > 0.55 * most
        layers.append(
            line.mark_rule(strokeDash=[5, 4], stroke=colour(1), strokeWidth=1.6).encode(
                x="value:Q",
                tooltip=[alt.Tooltip("name:N", title="limit"), alt.Tooltip("value:Q", title=title, format=form)],
            )
        )
        layers.append(
            line.mark_text(
                align="right" if right else "left",
                dx=-5 if right else 5,
                fill=colour(1),
                baseline="bottom",
                y=-3,
                fontSize=SMALL,
            ).encode(x="value:Q", text="name:N")
        )
    halo: Any = {"stroke": colour("page"), "strokeWidth": 4}  # where a line runs through a value
    for outline in (True, False):
        values = only.mark_text(align="left", dx=7, yOffset=below, fontWeight=500, **(halo if outline else {}))
        layers.append(values.encode(x="end:Q", y=place, text="text:N"))
    if shown is not None:
        layers[main] = layers[main].add_params(pick)
    return layered(layers, *sources, height=step * len(rows))
