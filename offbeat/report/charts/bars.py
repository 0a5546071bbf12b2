"""Bars, with their spread, a value to compare with, and a limit that they cannot exceed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    chart = _Bars(drawn, title, dict(groups or {"": colour(0)}), mark, whole, ".1%" if whole == 1 else form, above)
    rows = chart.rows
    most = whole or max([row["end"] for row in rows] + [limit or 0.0]) or 1.0
    bound = [{"value": limit, "name": limit_name}]
    layers = [] if whole is None else [chart.background(whole)]
    layers += [chart.main(most), *chart.spreads(), *chart.marks(), *chart.names()]
    layers += [] if limit is None else _limit(chart_of(bound), title, form, right=limit > 0.55 * most)
    layers += chart.values()
    return layered(layers, rows, *([] if limit is None else [bound]), height=chart.step * len(rows))


@dataclass(frozen=True)
class _Bars:
    """The layers of the chart."""

    drawn: Sequence[Bar]
    title: str
    groups: dict[str, str]
    mark: str
    whole: float | None
    form: str
    above: bool

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [
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
            for bar in self.drawn
        ]

    @cached_property
    def chart(self) -> alt.Chart:
        return chart_of(self.rows)

    @cached_property
    def step(self) -> int:
        """Pixels of a row."""
        return (42 if self.above else 26) if len(self.drawn) <= 12 else (36 if self.above else 19)

    @cached_property
    def place(self) -> alt.Y:
        labels = alt.Axis(labelColor=colour("ink"), labelFontSize=LETTERS, labelLimit=150, grid=False)
        scale = alt.Scale(domain=[bar.label for bar in self.drawn], paddingInner=0.3, paddingOuter=0.15)
        return alt.Y("label:N", sort=None, title=None, scale=scale, axis=None if self.above else labels)

    @cached_property
    def colours(self) -> dict[str, str]:
        """Of the groups and of the strokes, by the names in the legend."""
        return {**self.groups, **({self.mark: colour("ink")} if self.mark else {})}

    @cached_property
    def legend(self) -> alt.Legend | None:
        names = {name: name for name in self.colours}
        return legend(names, symbol="square") if len(names) > 1 else None

    @cached_property
    def hue(self) -> Any:
        scale = alt.Scale(domain=list(self.colours), range=list(self.colours.values()))
        return alt.Color("group:N", scale=scale, legend=self.legend)

    @cached_property
    def pick(self) -> alt.Parameter:
        return chosen("group")

    def filtered(self, chart: alt.Chart) -> alt.Chart:
        """What the legend shows of it."""
        return chart if self.legend is None else chart.transform_filter(self.pick)

    @property
    def offset(self) -> dict[str, Any]:
        """Where a bar is in its row."""
        return {"yOffset": 9 if self.above else 0}

    @property
    def thickness(self) -> dict[str, Any]:
        return {"size": 15} if self.above else {}

    def background(self, whole: float) -> alt.Chart:
        bar = self.chart.mark_bar(color=colour("lane"), **self.offset, **self.thickness)
        return bar.encode(y=self.place, x=alt.datum(0, type="quantitative"), x2=alt.datum(whole))

    def main(self, most: float) -> alt.Chart:
        """The bars themselves, with what is shown when one is pointed at."""
        across = alt.X(
            "value:Q",
            title=self.title,
            stack=None,
            scale=alt.Scale(domain=[0, most * 1.16], nice=False),
            axis=alt.Axis(tickCount=4, grid=True, format="%" if self.whole == 1 else alt.Undefined),
        )
        tip = [alt.Tooltip("label:N", title="row" if self.above else "stage")]
        tip.append(alt.Tooltip("value:Q", title=self.title, format=self.form))
        tip += [alt.Tooltip("mark:Q", title=self.mark, format=self.form)] if self.mark else []
        for name, end in (("lowest", "low"), ("highest", "high")):
            tip += [alt.Tooltip(f"{end}:Q", title=name, format=self.form)] if self.has_spread else []
        bar = self.filtered(self.chart).mark_bar(cornerRadiusEnd=2, **self.offset, **self.thickness)
        lighter = alt.FillOpacity("opacity:Q", scale=None)
        made = bar.encode(x=across, y=self.place, color=self.hue, fillOpacity=lighter, tooltip=tip)
        return made if self.legend is None else made.add_params(self.pick)

    @property
    def has_spread(self) -> bool:
        return any(bar.spread for bar in self.drawn)

    def spreads(self) -> list[alt.Chart]:
        if not self.has_spread:
            return []
        known = self.filtered(self.chart).transform_filter("isValid(datum.low)")
        rule = known.mark_rule(y2Offset=self.offset["yOffset"], strokeWidth=1.3, **self.offset)
        tick = known.mark_tick(thickness=1.3, size=9, **self.offset)
        ends = [tick.encode(x=f"{end}:Q", y=self.place) for end in ("low", "high")]
        return [rule.encode(x="low:Q", x2="high:Q", y=self.place), *ends]

    def marks(self) -> list[alt.Chart]:
        if not self.mark:
            return []
        chart = self.chart.transform_filter("isValid(datum.mark)")
        strokes = self.filtered(chart.transform_calculate(group=json.dumps(self.mark)))
        return [strokes.mark_tick(thickness=2.4, size=self.step - 6).encode(x="mark:Q", y=self.place, color=self.hue)]

    def names(self) -> list[alt.Chart]:
        if not self.above:
            return []
        text = self.filtered(self.chart).mark_text(align="left", baseline="middle", dy=-9)
        return [text.encode(x=alt.datum(0, type="quantitative"), y=self.place, text="label:N")]

    def values(self) -> list[alt.Chart]:
        """Twice: below with a halo, where a line runs through a value."""
        only = self.filtered(self.chart)
        halo: dict[str, Any] = {"stroke": colour("page"), "strokeWidth": 4}
        texts = [only.mark_text(align="left", dx=7, fontWeight=500, **self.offset, **more) for more in (halo, {})]
        return [text.encode(x="end:Q", y=self.place, text="text:N") for text in texts]


def _limit(line: alt.Chart, title: str, form: str, *, right: bool) -> list[alt.Chart]:
    """The dashed line, and its name on one of its sides."""
    tip = [alt.Tooltip("name:N", title="limit"), alt.Tooltip("value:Q", title=title, format=form)]
    rule = line.mark_rule(strokeDash=[5, 4], stroke=colour(1), strokeWidth=1.6)
    side: dict[str, Any] = {"align": "right", "dx": -5} if right else {"align": "left", "dx": 5}
    name = line.mark_text(**side, fill=colour(1), baseline="bottom", y=-3, fontSize=SMALL)
    return [rule.encode(x="value:Q", tooltip=tip), name.encode(x="value:Q", text="name:N")]
