"""Colours and letters of the report, the same for its text and its charts, light and dark.

A chart names a colour as a CSS variable, var(--ink) for instance: on the page the style sheet gives its value, for the
screen's light or dark and for paper; in a file it is the light one.
"""

from __future__ import annotations

import re
from typing import Any

# Okabe and Ito's hues, which the colour-blind can distinguish, darkened (or lightened) until letters in them can be
# read: a contrast of at least 4.5 : 1 with the page. All colours are for light mode and for dark mode.
SERIES = (
    ("#0067A8", "#5AB4EC"),
    ("#BC4B00", "#F19055"),
    ("#00795A", "#40C79B"),
    ("#A43E7C", "#E595C5"),
    ("#8A6100", "#E3B54A"),
    ("#5A4BB5", "#AA9EF2"),
    ("#0F7884", "#62CBD5"),
    ("#59606C", "#A6AEBB"),
)
PAIRS = {
    "page": ("#FFFFFF", "#14171B"),
    "ink": ("#1B1F24", "#E8EAED"),
    "soft": ("#5C6470", "#A0A7B2"),
    "rule": ("#C9CED6", "#454C57"),
    "grid": ("#E9ECF0", "#272C33"),
    "lane": ("#F3F5F7", "#1D2127"),
    "forward": ("#7FC4EE", "#4C9FD0"),
    "repeated": ("#B9DDF3", "#2F6384"),
    "backward": ("#F2B75B", "#D69A3C"),
    "update": ("#1B1F24", "#F4F5F7"),
    "send": ("#8E7CC3", "#A594DA"),
    "wait": ("#DADFE6", "#333A44"),
    "drain": ("#9CCFB8", "#4F9478"),
    "box": ("#1B1F24", "#0D0F12"),
    "warn": ("#8A4B00", "#F0B267"),
    **{f"c{place}": pair for place, pair in enumerate(SERIES)},
}
LIGHT, DARK = ({name: pair[mode] for name, pair in PAIRS.items()} for mode in (0, 1))
COLOURS = len(SERIES)
SHADES = 8


def _mixed(one: str, other: str, share: float) -> str:
    """A colour between two.

    >>> _mixed("#000000", "#FF8000", 0.5)
    '#804000'
    """
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in pairs)


for _theme in (LIGHT, DARK):  # of the stages of one network: s0 is the first, the others grow faint
    _theme |= {f"s{at}": _mixed(_theme["c0"], _theme["page"], 0.62 * at / (SHADES - 1)) for at in range(SHADES)}
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans","Liberation Sans",sans-serif'


def colour(name: str | int) -> str:
    """The variable of a named colour, or of the n-th series.

    >>> colour("ink"), colour(9)
    ('var(--ink)', 'var(--c1)')
    """
    return f"var(--{name if isinstance(name, str) else f'c{name % COLOURS}'})"


def shade(k: int, K: int) -> str:
    """The name of the colour of stage k of K.

    >>> shade(1, 4), shade(4, 4), shade(1, 1)
    ('s0', 's7', 's0')
    """
    return f"s{round((SHADES - 1) * (k - 1) / max(1, K - 1))}"


def variables(colours: dict[str, str]) -> str:
    """The colours as CSS declarations."""
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


def without_variables(specification: Any) -> Any:
    """The specification of a chart with the light colours in place of the variables.

    >>> without_variables({"fill": "var(--page)", "marks": ["var(--c0)", 3]})
    {'fill': '#FFFFFF', 'marks': ['#0067A8', 3]}
    """
    if isinstance(specification, dict):
        return {key: without_variables(value) for key, value in specification.items()}
    if isinstance(specification, list):
        return [without_variables(value) for value in specification]
    named = re.fullmatch(r"var\(--(\w+)\)", specification) if isinstance(specification, str) else None
    return LIGHT[named[1]] if named else specification


SMALL, LETTERS = 11.5, 12.5  # pixels
CONFIG: dict[str, Any] = {
    "aria": False,  # screen readers get the title and the table, not every mark
    "background": None,
    "font": FONT,
    "padding": 0,
    "view": {"stroke": None},
    "title": {
        "anchor": "start",
        "color": colour("ink"),
        "fontSize": 15,
        "fontWeight": 600,
        "offset": 14,
        "subtitleColor": colour("soft"),
        "subtitleFontSize": LETTERS,
        "subtitlePadding": 4,
    },
    "axis": {
        "labelColor": colour("soft"),
        "titleColor": colour("soft"),
        "titleFontWeight": 400,
        "labelFontSize": SMALL,
        "titleFontSize": SMALL,
        "gridColor": colour("grid"),
        "domainColor": colour("rule"),
        "tickColor": colour("rule"),
        "tickSize": 4,
        "labelPadding": 5,
        "titlePadding": 8,
        "labelOverlap": True,
    },
    "axisX": {"grid": False, "titleAnchor": "end"},
    "axisY": {
        "domain": False,
        "ticks": False,
        "titleAngle": 0,
        "titleAnchor": "end",
        "titleAlign": "left",
        "titleBaseline": "bottom",
        "titleX": 0,
        "titleY": -9,
    },
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "title": None,
        "labelColor": colour("ink"),
        "labelLimit": 0,
        "labelFontSize": LETTERS,
        "symbolSize": 110,
        "symbolStrokeWidth": 2.2,
        "columnPadding": 16,
        "rowPadding": 3,
    },
    "text": {"fill": colour("ink"), "fontSize": LETTERS},
    "rule": {"stroke": colour("ink")},
    "tick": {"fill": colour("ink")},
}
