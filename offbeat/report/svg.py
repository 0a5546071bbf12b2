"""Drawing in SVG: a canvas, scales, ticks. Colours are CSS classes, so that a page can be light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

SMALL, SIZE = 11.5, 12.5  # pixels of letters: ticks, labels
WIDE = 0.56  # of its size, that a letter is wide on average, generously


def text_width(text: str, size: float = SIZE) -> float:
    """Pixels, about: no browser is asked."""
    return len(text) * WIDE * size


def shorten(text: str, pixels: float, size: float = SIZE) -> str:
    """As much of a text as fits.

    >>> shorten("resnet56-adl-k4", 1000), shorten("resnet56-adl-k4", 70)
    ('resnet56-adl-k4', 'resnet56…')
    """
    if text_width(text, size) <= pixels:
        return text
    return text[: max(1, int(pixels / (WIDE * size)) - 1)] + "…"


def number(value: float) -> str:
    """Short, for an axis.

    >>> [number(value) for value in (0, 0.25, 12, 1500, 250000, 3e6, 0.00002)]
    ['0', '0.25', '12', '1,500', '250k', '3M', '2e-05']
    """
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:,.0f}" if size >= 1000 else f"{value:g}" if size >= 1e-4 or not size else f"{value:.0e}"


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers in a range: steps of 1, 2 or 5, at most so many.

    >>> ticks(0, 9.5, 5), ticks(1, 3, 8, whole=True), ticks(0, 0.3, 4)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0], [0.0, 0.1, 0.2, 0.3])
    """
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / max(1, most)))
    if whole:
        step = max(1.0, step)
    while True:
        for factor in (1, 2, 5):
            first = math.ceil(low / (step * factor) - 1e-9)
            last = math.floor(high / (step * factor) + 1e-9)
            if last - first + 1 <= most:
                return [float(f"{place * step * factor:.12g}") for place in range(first, last + 1)]
        step *= 10


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 of every decade, or the decades alone where those would be too many.

    >>> log_ticks(3, 120, 8), log_ticks(0.01, 1e4, 6)
    ([5.0, 10.0, 20.0, 50.0, 100.0], [0.01, 1.0, 100.0, 10000.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    if len(found) > most:
        found = [10.0**power for power in decades if low * 0.999 <= 10.0**power <= high * 1.001]
        found = found[:: -(-len(found) // max(1, most))]
    return [float(f"{value:.12g}") for value in found] or [low]


def doublings(low: float, high: float, most: int) -> list[float]:
    """Powers of two in a range, at most so many.

    >>> doublings(1, 16, 8), doublings(1, 256, 5)
    ([1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 4.0, 16.0, 64.0, 256.0])
    """
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    found = [2.0**power for power in powers]
    return found[:: -(-len(found) // max(1, most))] or [low]


@dataclass(frozen=True)
class Scale:
    """From a value to a place on the canvas."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(max(value, self.low * 1e-9)) if self.log else value
        return self.start + (self.end - self.start) * ((place - low) / (high - low) if high != low else 0.5)


@dataclass
class Canvas:
    """The parts of one picture; y grows downwards."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{css}"/>')

    def path(
        self, points: Sequence[tuple[float, float]], css: str, *, closed: bool = False, opacity: float = 1
    ) -> None:
        drawn = "M" + "L".join(f"{_n(x)},{_n(y)}" for x, y in points) + ("Z" if closed else "")
        faint = f' opacity="{opacity:.2g}"' if opacity < 1 else ""
        self.parts.append(f'<path d="{drawn}" class="{css}"{faint}/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, *, tip: str = "", radius: float = 0,
             opacity: float = 1) -> None:  # fmt: skip
        more = (f' rx="{_n(radius)}"' if radius else "") + (f' opacity="{opacity:.2g}"' if opacity < 1 else "")
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(height)}"'
        self.parts.append(f'<rect {place} class="{css}"{more}{_inner("rect", tip)}')

    def dot(self, x: float, y: float, radius: float, css: str, *, tip: str = "", opacity: float = 1) -> None:
        faint = f' opacity="{opacity:.2g}"' if opacity < 1 else ""
        place = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self.parts.append(f'<circle {place} class="{css}"{faint}{_inner("circle", tip)}')

    def text(self, x: float, y: float, text: str, css: str = "", *, anchor: str = "start") -> None:
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        css = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{where}{css}>{escape(text)}</text>')

    def svg(self, label: str, *, css: str = "") -> str:
        """The element, to stand in a page."""
        return (
            f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" '
            f'height="{_n(self.height)}" role="img" aria-label="{escape(label)}"{css}>{"".join(self.parts)}</svg>'
        )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _inner(tag: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"


@dataclass(frozen=True)
class Picture:
    """Something that can be drawn at any width: in a page twice, for large and small screens, or in a file.

    name   of its files
    across how many such pictures stand side by side where there is room
    """

    name: str
    title: str
    draw: Callable[[int], Canvas]
    caption: str = ""
    across: int = 1
