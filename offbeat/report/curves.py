"""Learning curves of several runs of a method as one: the median after each epoch, with the lowest and the highest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import NamedTuple


class Point(NamedTuple):
    """The runs of a method after an epoch; those that had stopped by then are not in it."""

    middle: float
    lowest: float
    highest: float


def points(runs: Sequence[Sequence[float]]) -> list[Point]:
    """Median and range of the runs, epoch by epoch.

    >>> [tuple(point) for point in points([[9.0, 5.0], [8.0, 2.0], [7.0]])]
    [(8.0, 7.0, 9.0), (3.5, 2.0, 5.0)]
    """
    epochs = [[value for value in column if value is not None] for column in zip_longest(*runs)]
    return [Point(median(values), min(values), max(values)) for values in epochs]
