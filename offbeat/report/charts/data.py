"""The rows that a chart shows, kept once under a name that its layers share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import altair as alt

Rows = Sequence[dict[str, Any]]


def named(rows: Rows) -> str:
    """A name that other rows do not have, so that charts can be put side by side."""
    return f"rows-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}"


def chart_of(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.NamedData(named(rows)))


def layered(layers: Sequence[alt.Chart], *sources: Rows, height: int) -> alt.LayerChart:
    """One chart of several layers, with the rows of all of them."""
    return alt.LayerChart(layer=list(layers), height=height, datasets={named(rows): list(rows) for rows in sources})
