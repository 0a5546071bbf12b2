"""Shares of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from offbeat.report.charts.data import chart_of, layered
from offbeat.report.style import LETTERS, SMALL, colour, shade


def shares(rows: Sequence[tuple[str, Sequence[float]]]) -> alt.LayerChart:
    """A row for each quantity, cut into the stages by their share of it; the stages are named above the first."""
    boxes = [box for quantity, values in rows for box in _boxes(quantity, values, first=quantity == rows[0][0])]
    chart = chart_of(boxes)
    place = alt.Y(
        "quantity:N",
        sort=None,
        title=None,
        scale=alt.Scale(paddingInner=0.2, paddingOuter=0.1),
        axis=alt.Axis(labelColor=colour("ink"), labelFontSize=LETTERS, grid=False),
    )
    boxed = chart.mark_bar(cornerRadius=2, stroke=colour("page"), strokeWidth=2).encode(
        x=alt.X("start:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1])),
        x2="end:Q",
        y=place,
        color=alt.Color("shade:N", scale=None),
        tooltip=[alt.Tooltip("stage:N"), alt.Tooltip("quantity:N", title="of"), alt.Tooltip("share:Q", format=".1%")],
    )
    middle, wide = alt.X("middle:Q"), "(scale('x', datum.end) - scale('x', datum.start))"
    texts = chart.transform_calculate(middle="(datum.start + datum.end) / 2", percent="format(datum.share, '.0%')")
    inside = texts.mark_text(fontSize=SMALL, fontWeight=600).encode(
        x=middle,
        y=place,
        text=alt.condition(f"{wide} > 34", "percent:N", alt.value("")),
        color=alt.condition("datum.dark", alt.value(colour("page")), alt.value(colour("ink"))),
    )
    above = texts.transform_filter("datum.first").mark_text(fontSize=SMALL, fill=colour("soft"), dy=-25)
    names = [
        above.encode(x=middle, y=place, text=alt.condition(fits, name, alt.value("")))
        for fits, name in ((f"{wide} > 52", "stage:N"), (f"{wide} > 14 && {wide} <= 52", "k:N"))
    ]
    return layered([boxed, inside, *names], boxes, height=36 * len(rows))


def _boxes(quantity: str, values: Sequence[float], *, first: bool) -> list[dict[str, Any]]:
    """One for each stage, beside each other."""
    boxes, total, at = [], sum(values) or 1.0, 0.0
    for k, value in enumerate(values, start=1):
        share = value / total
        boxes.append(
            {
                "quantity": quantity,
                "stage": f"stage {k}",
                "k": k,
                "share": share,
                "start": at,
                "end": at + share,
                "shade": colour(shade(k, len(values))),
                "dark": 2 * (k - 1) < max(1, len(values) - 1),
                "first": first,
            }
        )
        at += share
    return boxes
