"""Bars, with their spread, a value to compare with, and a limit that they cannot exceed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from offbeat.report.charts.data import chart_of, layered
from offbeat.report.charts.legend import chosen, legend
from offbeat.report.style import LETTERS, SMALL, colour


@dataclass(frozen=True)
class Bar:
    """A value in a row of its own.

    text     the value as it is written at the end of the bar
    group    its name in the legend
    mark     another value to compare with
    spread   the lowest and the highest
    faint    drawn lighter
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
    """A row for each bar: its name, its length, its value as text.

    groups   colours of the groups, by their names; `mark` is the name of the upright strokes
    limit    a value that no bar can exceed: a dashed line, with its name
    whole    the largest value possible, 1 for a share: drawn as the background of all bars
    above    whether the names are above their bars, because they are long
    """
    form = ".1%" if whole == 1 else form
    rows = [_row(bar) for bar in drawn]
    step = (42 if above else 26) if len(drawn) <= 12 else (36 if above else 19)  # pixels of a row
    most = whole or max([row["end"] for row in rows] + [limit or 0.0]) or 1.0
    has_spread = any(bar.spread for bar in drawn)
    colours = {**(groups or {"": colour(0)}), **({mark: colour("ink")} if mark else {})}
    shown, pick = legend({name: name for name in colours}, symbol="square"), chosen("group")
    hue = alt.Color("group:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=shown)
    labels = alt.Axis(labelColor=colour("ink"), labelFontSize=LETTERS, labelLimit=150, grid=False)
    scale = alt.Scale(domain=[bar.label for bar in drawn], paddingInner=0.3, paddingOuter=0.15)
    place = alt.Y("label:N", sort=None, title=None, scale=scale, axis=None if above else labels)
    offset: dict[str, Any] = {"yOffset": 9 if above else 0}  # where a bar is in its row
    size: dict[str, Any] = {"size": 15} if above else {}
    start = alt.datum(0, type="quantitative")

    def picked(of: alt.Chart) -> alt.Chart:
        """What the legend shows of it."""
        return of.transform_filter(pick) if shown else of

    chart = chart_of(rows)
    only, layers = picked(chart), []
    if whole is not None:
        background = chart.mark_bar(color=colour("lane"), **offset, **size)
        layers.append(background.encode(y=place, x=start, x2=alt.datum(whole)))
    across = alt.X(
        "value:Q",
        title=title,
        stack=None,
        scale=alt.Scale(domain=[0, most * 1.16], nice=False),
        axis=alt.Axis(tickCount=4, grid=True, format="%" if whole == 1 else alt.Undefined),
    )
    lighter = alt.FillOpacity("opacity:Q", scale=None)
    tip = [alt.Tooltip("label:N", title="row" if above else "stage")]
    values = [("value", title)] + [("mark", mark)] * bool(mark) + [("low", "lowest"), ("high", "highest")] * has_spread
    tip += [alt.Tooltip(f"{name}:Q", title=told, format=form) for name, told in values]
    bar = only.mark_bar(cornerRadiusEnd=2, **offset, **size)
    bar = bar.encode(x=across, y=place, color=hue, fillOpacity=lighter, tooltip=tip)
    layers.append(bar.add_params(pick) if shown else bar)
    if has_spread:
        known = only.transform_filter("isValid(datum.low)")
        rule = known.mark_rule(y2Offset=offset["yOffset"], strokeWidth=1.3, **offset)
        layers.append(rule.encode(x="low:Q", x2="high:Q", y=place))
        tick = known.mark_tick(thickness=1.3, size=9, **offset)
        layers += [tick.encode(x=f"{end}:Q", y=place) for end in ("low", "high")]
    if mark:
        marked = chart.transform_filter("isValid(datum.mark)").transform_calculate(group=json.dumps(mark))
        strokes = picked(marked).mark_tick(thickness=2.4, size=step - 6)
        layers.append(strokes.encode(x="mark:Q", y=place, color=hue))
    if above:
        names = only.mark_text(align="left", baseline="middle", dy=-9)
        layers.append(names.encode(x=start, y=place, text="label:N"))
    bound = [] if limit is None else [{"value": limit, "name": limit_name}]
    if limit is not None:
        layers += _limit(chart_of(bound), title, form, right=limit > 0.55 * most)
    halo: dict[str, Any] = {"stroke": colour("page"), "strokeWidth": 4}  # below the text, where a line runs through it
    for more in (halo, {}):
        text = only.mark_text(align="left", dx=7, fontWeight=500, **offset, **more)
        layers.append(text.encode(x="end:Q", y=place, text="text:N"))
    return layered(layers, rows, *([bound] if bound else []), height=step * len(rows))


def _row(bar: Bar) -> dict[str, Any]:
    low, high = bar.spread or (None, None)
    return {
        "label": bar.label,
        "value": bar.value,
        "text": bar.text,
        "group": bar.group,
        "opacity": 0.45 if bar.faint else 1,
        "mark": bar.mark,
        "low": low,
        "high": high,
        "end": max(bar.value, bar.mark or 0.0, *(bar.spread or ())),
    }


def _limit(line: alt.Chart, title: str, form: str, *, right: bool) -> list[alt.Chart]:
    """The dashed line, and its name on one of its sides."""
    tip = [alt.Tooltip("name:N", title="limit"), alt.Tooltip("value:Q", title=title, format=form)]
    rule = line.mark_rule(strokeDash=[5, 4], stroke=colour(1), strokeWidth=1.6)
    side: dict[str, Any] = {"align": "right", "dx": -5} if right else {"align": "left", "dx": 5}
    name = line.mark_text(**side, fill=colour(1), baseline="bottom", y=-3, fontSize=SMALL)
    return [rule.encode(x="value:Q", tooltip=tip), name.encode(x="value:Q", text="name:N")]
