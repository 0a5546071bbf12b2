"""The kinds of chart in a report: lines, bars, shares of a whole, and the lanes of a timeline.

Each is a declaration for Vega-Lite, written with Altair, and holds its data. It has no width: the page makes it as wide
as its column, a file as wide as it is given. A click on a name in a legend leaves only what has that name.
"""

from __future__ import annotations

from offbeat.report.charts.bars import Bar, bars
from offbeat.report.charts.lanes import Box, lanes
from offbeat.report.charts.lines import Axis, Line, lines
from offbeat.report.charts.shares import shares

__all__ = ["Axis", "Bar", "Box", "Line", "bars", "lanes", "lines", "shares"]
