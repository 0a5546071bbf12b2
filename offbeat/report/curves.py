"""Learning curves of several runs of a method as one: the median after each epoch, with the lowest and the highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median


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
    """Minutes of training after each epoch, the median of the runs.

    >>> clock([[60, 120], [120, 180], [180]])
    [2.0, 2.5]
    """
    return [point.middle / 60 for point in points(times)]
