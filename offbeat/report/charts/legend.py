"""Legends, which can be clicked, and how wide letters are."""

from __future__ import annotations

import json
from collections.abc import Mapping

import altair as alt

from offbeat.report.style import LETTERS

WIDE = 0.56  # of its size, that a letter is wide on average


def legend(labels: Mapping[str, str], *, symbol: str, offset: int = 14, width: int | None = None) -> alt.Legend | None:
    """The names of a chart in as many columns as there is room for; None where there is but one name.

    labels: what is written for each name; width: of the chart, where it cannot change
    """
    if len(labels) < 2:
        return None
    column = round(max(map(len, labels.values())) * WIDE * LETTERS + 44)
    # The width without the axis changes while Vega lays out the chart; that of the place on the page does not.
    room = "(isFinite(containerSize()[0]) ? containerSize()[0] - 40 : width)"
    columns = (
        max(1, min(len(labels), width // column))
        if width
        else alt.ExprRef(f"max(1, min({len(labels)}, floor({room} / {column})))")
    )
    return alt.Legend(
        columns=columns,
        symbolType=symbol,
        labelExpr=f"({json.dumps(dict(labels))})[datum.value]",
        symbolOpacity=1,
        offset=offset,
    )


def chosen(field: str) -> alt.Parameter:
    """What has been clicked in the legend; nothing is everything."""
    return alt.selection_point(name="chosen", fields=[field], bind="legend", toggle="true")
