"""Learning curves: test error against epoch or time, a line a method, the median of its runs in a band of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")  # Okabe and Ito's
STYLES = ("-", "--", ":", "-.")  # for the methods after those
FITS = 28  # characters beside the picture in its usual letters
LOG_FROM = 8.0  # times that the largest error is above the smallest


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of a method after an epoch; those that had stopped by then are not in it."""

    epoch: int  # from 1
    middle: float
    lowest: float
    highest: float


def points(runs: Sequence[Sequence[float]]) -> list[Point]:
    """Median and range of the runs, epoch by epoch.

    >>> [(point.middle, point.lowest, point.highest) for point in points([[9.0, 5.0], [8.0, 2.0], [7.0]])]
    [(8.0, 7.0, 9.0), (3.5, 2.0, 5.0)]
    """
    found = []
    for epoch, column in enumerate(zip_longest(*runs), start=1):
        there = [value for value in column if value is not None]
        found.append(Point(epoch, median(there), min(there), max(there)))
    return found


def clock(times: Sequence[Sequence[float]]) -> list[float]:
    """When the runs of a method were behind each epoch: the median, in minutes.

    >>> clock([[60, 120], [120, 180], [180]])
    [2.0, 2.5]
    """
    return [point.middle / 60 for point in points(times)]


def curves_figure(
    runs: Mapping[str, Sequence[Sequence[float]]], *, title: str,
    times: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> Figure:  # fmt: skip
    """A line with the gid of its method, and a band "METHOD-band" where there are several runs.

    times   seconds of training behind each epoch, as the errors are in `runs`: draws against them, not the epoch
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(10.4, 5.6), dpi=100, facecolor="white")
    axes = figure.add_axes((0.075, 0.11, 0.66, 0.79), facecolor="white")
    every = [value for curves in runs.values() for curve in curves for value in curve]
    faint = 0.13 if len(runs) <= 4 else 0.07  # bands lie on each other
    for place, (name, curves) in enumerate(runs.items()):
        drawn = points(curves)
        if not drawn:
            continue
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % len(STYLES)]
        epochs = [point.epoch for point in drawn] if times is None else clock(times[name])
        axes.plot(epochs, [point.middle for point in drawn], color=colour, linestyle=style, linewidth=1.8, gid=name,
                  marker="o" if len(drawn) == 1 else "", label=f"{name}  {drawn[-1].middle:.2f} %")  # fmt: skip
        if len(curves) > 1:
            axes.fill_between(epochs, [point.lowest for point in drawn], [point.highest for point in drawn],
                              color=colour, alpha=faint, linewidth=0, gid=f"{name}-band")  # fmt: skip
    if every and min(every) > 0 and max(every) > LOG_FROM * min(every):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter() if max(every) < 100 * min(every) else NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=8)
    else:
        axes.set_ylim(bottom=0)
    if times is None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(which="both", axis="y", color="#EEEEEE")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("epoch" if times is None else "minutes of training")
    axes.set_ylabel("test error (%)")
    axes.set_title(title, loc="left", fontsize=12)
    if axes.lines:
        longest = max(len(str(line.get_label())) for line in axes.lines)
        figure.legend(loc="upper left", bbox_to_anchor=(0.745, 0.9), frameon=False, borderaxespad=0,
                      fontsize=10 if longest <= FITS else 8, title="median at the end", alignment="left")  # fmt: skip
    return figure


def curves_text(runs: Mapping[str, Sequence[Sequence[float]]], *, title: str) -> str:
    """The same as a table, a row an epoch and a column a method.

    >>> print(curves_text({"bp": [[9.0, 5.0], [8.0, 2.0]], "adl": [[9.5]]}, title="error"))
    error
    epoch | bp               | adl
    1     | 8.50 (8.00-9.00) | 9.50 (9.50-9.50)
    2     | 3.50 (2.00-5.00) |
    """
    columns = [
        [f"{point.middle:.2f} ({point.lowest:.2f}-{point.highest:.2f})" for point in points(curves)]
        for curves in runs.values()
    ]
    rows = [["epoch", *runs]]
    rows += [[str(epoch), *cells] for epoch, cells in enumerate(zip_longest(*columns, fillvalue=""), start=1)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *(line.rstrip() for line in lines)])
