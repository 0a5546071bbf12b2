"""The critical cycle of a periodic schedule: the cycle of dependencies that limits its rate.

In a schedule that repeats with a period, every event waits for events of the same period or of earlier ones:
time(v, n) >= time(u, n - distance) + seconds. In the long run a period takes as long as the largest ratio of seconds to
distance over the cycles of these dependencies. It is found by Howard's policy iteration (Cochet-Terrasson et al.,
"Numerical computation of spectral elements in max-plus algebra", 1998), without running the schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

TOLERANCE = 1e-12  # relative to the longest dependency


class Dependency(NamedTuple):
    """An event waits for `event`, which happened `distance` periods before, and then takes `seconds`."""

    event: Hashable
    seconds: float
    distance: int


def longest_period(waits_for: Mapping[Hashable, Sequence[Dependency]]) -> float | None:
    """Seconds per period, from the dependencies of every event; None if events wait for each other without end.

    >>> longest_period({"a": [Dependency("a", 2.0, 1), Dependency("b", 1.0, 1)], "b": [Dependency("a", 4.0, 0)]})
    5.0
    """
    number = {event: place for place, event in enumerate(waits_for)}
    edges = [[(number[event], seconds, distance) for event, seconds, distance in each] for each in waits_for.values()]
    tolerance = TOLERANCE * max(seconds for each in edges for _, seconds, _ in each)
    chosen = [each[0] for each in edges]
    order = list(range(len(edges)))
    while (evaluated := _evaluate(chosen)) is not None:
        ratio, value = evaluated
        improved = False
        order.reverse()  # alternate the direction: a sweep propagates improvements along it
        for place in order:
            for edge in edges[place]:
                source, seconds, distance = edge
                later = value[source] + seconds - ratio[source] * distance
                more = ratio[source] - ratio[place]
                if more > tolerance or (more >= -tolerance and later > value[place] + tolerance * len(edges)):
                    ratio[place], value[place] = ratio[source], later
                    chosen[place], improved = edge, True
        if not improved:
            return max(ratio)
    return None


def _evaluate(chosen: Sequence[tuple[int, float, int]]) -> tuple[list[float], list[float]] | None:
    """For one chosen dependency per event: the ratio of the cycle that each event leads to, and its relative time."""
    ratio, value = [0.0] * len(chosen), [0.0] * len(chosen)
    seen = [-1] * len(chosen)  # the walk that reached it
    for start in range(len(chosen)):
        path, here = list[int](), start
        while seen[here] < 0:
            seen[here] = start
            path.append(here)
            here = chosen[here][0]
        if seen[here] == start:  # a new cycle, from `here` to the end of the path
            cycle = [chosen[place] for place in path[path.index(here) :]]
            distance = sum(edge[2] for edge in cycle)
            if distance <= 0:
                return None
            ratio[here] = sum(edge[1] for edge in cycle) / distance
        for place in reversed(path):
            source, seconds, distance = chosen[place]
            ratio[place] = ratio[source]
            if place != here:
                value[place] = value[source] + seconds - ratio[source] * distance
    return ratio, value
