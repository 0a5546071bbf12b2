"""Lines, with the range of what they are the median of, and measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt

from offbeat.report.charts.data import chart_of, layered
from offbeat.report.charts.legend import chosen, legend
from offbeat.report.style import COLOURS, colour

DASHES = ([1, 0], [6, 4], [2, 3], [8, 3, 2, 3])  # of the first COLOURS lines, the next COLOURS, ...
LOG_FROM = 8.0  # times that the largest value is above the smallest
CROWD = 5  # lines from which half of that is enough: their ends are closer together
MOST_DOTS = 30  # points of a line that are drawn as dots
MOST_TIPS = 60  # and that can be pointed at
MOST_TEXTS = 16  # and whose values are written
MOST_TICKS = 10  # of an axis of whole numbers, each of which is named


@dataclass(frozen=True)
class Line:
    """A series of points; `band` holds the lowest and the highest at each, where it stands for several runs.

    end        what the legend adds to the name, the last value for instance
    colour     its number in the palette, or a name; by default its place among the lines
    measured   circles without a line between them
    written    whether its values are written at its points
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()
    end: str = ""
    colour: int | str | None = None
    dash: int | None = None
    measured: bool = False
    written: bool = False


@dataclass(frozen=True)
class Axis:
    """What one axis shows.

    log: None where the values decide; doubling: a logarithmic scale with powers of two, from 0 on where `zero`;
    whole: only whole numbers; zero: 0 is on it; most: it goes from 0 to there; each: a tick at every value
    """

    title: str
    log: bool | None = False
    doubling: bool = False
    whole: bool = False
    zero: bool = False
    each: bool = False
    format: str = ".2f"
    most: float | None = None


def lines(
    drawn: Sequence[Line],
    *,
    x: Axis,
    y: Axis,
    height: int = 300,
    width: int | None = None,
    shared_legend: Sequence[Line] = (),
) -> alt.LayerChart:
    """A line for each series, in a band where it stands for several runs; its points can be pointed at.

    width: in a file, where nothing can be clicked
    shared_legend: the lines of all charts that have one legend, each with its own label; default: these
    """
    drawn = [line for line in drawn if line.points]
    if not drawn:
        empty = [{"text": "nothing recorded yet"}]
        return layered([chart_of(empty).mark_text(fill=colour("soft")).encode(text="text:N")], empty, height=height)
    rows = [row for line in drawn for row in _rows(line)]
    named = shared_legend or drawn
    names = {line.label: f"{line.label}  {line.end}".rstrip() for line in named}
    shown = legend(names, symbol="stroke", offset=30, width=width)  # above the title of the y axis
    hue, dash = _looks(named, list(names), shown)
    chart = chart_of(rows)
    pick = chosen("series")
    interactive = width is None and shown is not None
    if interactive:
        chart = chart.transform_filter(pick)
    heights = [row[name] for row in rows for name in ("y", "low", "high") if name in row]
    up = _decided(y, heights, len(drawn))
    at: dict[str, Any] = {
        "x": alt.X("x:Q", scale=_scale(x, [row["x"] for row in rows]), axis=_axis(x, [row["x"] for row in rows])),
        "y": alt.Y("y:Q", scale=_scale(up, heights), axis=_axis(up, heights)),
    }
    layers = []
    if any(line.band for line in drawn):
        band = chart.transform_filter("isValid(datum.low)").mark_area(opacity=0.15, clip=True)
        layers.append(band.encode(x=at["x"], y=alt.Y("low:Q"), y2="high:Q", color=hue))
    if any(line.band and len(line.points) == 1 for line in drawn):  # whose band has no width
        spread = chart.transform_filter("datum.alone").mark_rule(strokeWidth=2, opacity=0.5, clip=True)
        layers.append(spread.encode(x=at["x"], y=alt.Y("low:Q"), y2="high:Q", color=hue))
    joined = chart.transform_filter("!datum.measured").mark_line(strokeWidth=2, strokeJoin="round", clip=True)
    layers.append(joined.encode(**at, color=hue, strokeDash=dash))
    layers.append(chart.transform_filter("datum.dot").mark_circle(size=22, opacity=1).encode(**at, color=hue))
    if any(line.measured for line in drawn):
        rings = chart.transform_filter("datum.measured")
        rings = rings.mark_point(size=64, strokeWidth=2, fill=colour("page"), opacity=1)
        layers.append(rings.encode(**at, color=hue))
    if width is None:
        touch = chart.transform_filter("datum.tip").mark_circle(size=260, opacity=0)
        touch = touch.encode(**at, tooltip=_tooltip(x, y, band=any(line.band for line in drawn)))
        layers.append(touch.add_params(pick) if interactive else touch)
    if any(line.written for line in drawn):
        texts = chart.transform_filter("isValid(datum.text)").mark_text(align="left", dx=5, dy=-8, fontWeight=600)
        layers.append(texts.encode(**at, color=hue, text="text:N"))
    return layered(layers, rows, height=height)


def _rows(line: Line) -> list[dict[str, Any]]:
    """The points of a line, with what is drawn at each."""
    count = len(line.points)
    return [
        {
            "series": line.label,
            "x": a,
            "y": b,
            **({"low": line.band[at][0], "high": line.band[at][1]} if line.band else {}),
            **({"alone": True} if line.band and count == 1 else {}),
            **({"text": f"{round(b, 2):g}"} if line.written and at % -(-count // MOST_TEXTS) == 0 else {}),
            **({"measured": True} if line.measured else {"dot": True} if count <= MOST_DOTS else {}),
            **({"tip": True} if (count - 1 - at) % -(-count // MOST_TIPS) == 0 else {}),
        }
        for at, (a, b) in enumerate(line.points)
    ]


def _looks(drawn: Sequence[Line], names: list[str], shown: alt.Legend | None) -> tuple[Any, alt.StrokeDash]:
    """Colour and dashes of each line: no two of many lines look the same."""
    places = [at if line.colour is None else line.colour for at, line in enumerate(drawn)]
    dashes = [
        DASHES[(line.dash or (place // COLOURS if isinstance(place, int) else 0)) % len(DASHES)]
        for place, line in zip(places, drawn, strict=True)
    ]
    colours = alt.Scale(domain=names, range=[colour(place) for place in places])
    return (
        alt.Color("series:N", scale=colours, legend=shown),
        alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=dashes), legend=shown),
    )


def _decided(axis: Axis, values: Sequence[float], count: int) -> Axis:
    """The axis with a logarithmic scale where the values of its lines are far apart, unless that is given."""
    log = axis.log
    if log is None:
        far = LOG_FROM if count < CROWD else LOG_FROM / 2
        log = bool(values) and min(values) > 0 and max(values) > far * min(values)
    return replace(axis, title=axis.title + (", log scale" if log and not axis.doubling else ""), log=log)


def _tooltip(x: Axis, y: Axis, *, band: bool) -> list[alt.Tooltip]:
    ends = (("lowest", "low"), ("highest", "high")) if band else ()
    return [
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("x:Q", title=x.title, format=x.format if not x.whole else "d"),
        alt.Tooltip("y:Q", title=y.title, format=y.format),
        *(alt.Tooltip(f"{end}:Q", title=name, format=y.format) for name, end in ends),
    ]


def _scale(axis: Axis, values: Sequence[float]) -> alt.Scale:
    if axis.doubling and axis.zero:
        return alt.Scale(type="symlog", constant=1, nice=False, padding=8)
    if axis.doubling:
        return alt.Scale(type="log", base=2, nice=False, padding=8)
    if axis.log:
        return alt.Scale(type="log", nice=False, padding=6)
    if axis.most is not None:
        return alt.Scale(domain=[0, axis.most], nice=False)
    near = bool(values) and 0 <= min(values) < 0.35 * max(values)
    if axis.whole:
        return alt.Scale(zero=False, nice=False, padding=6)
    return alt.Scale(zero=axis.zero or near, nice=True)


def _axis(axis: Axis, values: Sequence[float]) -> alt.Axis:
    more: dict[str, Any] = {}
    if values and axis.each:
        more = {"values": sorted(set(values)), "format": ",~g"}
    elif values and axis.doubling:
        low, high = min(values), max(values)
        ticks = [0.0, *doublings(max(low, 1.0), max(high, 1.0))] if axis.zero else doublings(low, high)
        more = {"values": ticks, "format": ",~g"}
    elif values and axis.log:
        more = {"values": log_ticks(min(values), max(values)), "format": ",~g"}
    elif axis.whole and values and max(values) - min(values) <= MOST_TICKS:
        more = {"values": list(range(math.ceil(min(values)), math.floor(max(values)) + 1)), "format": "d"}
    elif axis.whole:
        more = {"tickMinStep": 1, "format": "d"}
    return alt.Axis(title=axis.title, tickCount=6, **more)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade; the decades alone where those would be too many, more where they are too few.

    >>> log_ticks(3, 120), log_ticks(0.01, 1e4)
    ([5.0, 10.0, 20.0, 50.0, 100.0], [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0])
    >>> log_ticks(0.0547, 0.085), log_ticks(0.0547, 0.0561)
    ([0.06, 0.07, 0.08], [0.0547, 0.0561])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), range(1, 10)):
        if len(found) < 2:
            found = [float(f"{factor}e{power}") for power in decades for factor in factors]
            found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    if len(found) < 2:
        return sorted({float(f"{low:.3g}"), float(f"{high:.3g}")})
    return found if len(found) <= 8 else [value for value in found if f"{value:e}"[0] == "1"]


def doublings(low: float, high: float) -> list[float]:
    """Powers of two in a range, every second where they are many.

    >>> doublings(1, 16), doublings(1, 256)
    ([1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 4.0, 16.0, 64.0, 256.0])
    """
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    return [2.0**power for power in powers][:: 1 if len(powers) <= 7 else 2]
