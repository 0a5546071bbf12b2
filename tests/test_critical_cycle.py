"""The critical cycle, against every cycle of small random graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from offbeat.critical_cycle import Dependency, longest_period

Graph = dict[int, list[Dependency]]


def drawn(seed: int) -> Graph:
    """A random graph whose dependencies within a period point from lower to higher events, so that none waits for
    itself."""
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    graph: Graph = {event: [Dependency(event, rng.uniform(0, 3), rng.randint(1, 2))] for event in range(n)}
    for _ in range(2 * n):
        source, target = rng.randrange(n), rng.randrange(n)
        graph[target].append(Dependency(source, rng.uniform(0, 3), rng.randint(0 if source < target else 1, 3)))
    return graph


def cycles(graph: Graph, path: list[int], edges: list[Dependency]) -> Iterator[list[Dependency]]:
    """The simple cycles through the first event of the path that have no smaller event."""
    for edge in graph[path[-1]]:
        if edge.event == path[0]:
            yield [*edges, edge]
        elif edge.event > path[0] and edge.event not in path:
            yield from cycles(graph, [*path, edge.event], [*edges, edge])


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_period_is_the_largest_ratio_of_all_cycles(seed):
    graph = drawn(seed)
    ratios = [
        sum(edge.seconds for edge in cycle) / sum(edge.distance for edge in cycle)
        for event in graph
        for cycle in cycles(graph, [event], [])
    ]
    assert longest_period(graph) == pytest.approx(max(ratios), rel=1e-9)


def test_a_shift_of_the_periods_of_an_event_changes_nothing():
    graph = drawn(4)
    shifted = {
        event: [edge._replace(distance=edge.distance + 5 * (event == 1) - 5 * (edge.event == 1)) for edge in each]
        for event, each in graph.items()
    }
    assert longest_period(shifted) == pytest.approx(longest_period(graph))


def test_events_that_wait_for_each_other_have_no_period():
    assert longest_period({"a": [Dependency("b", 1.0, 0)], "b": [Dependency("a", 1.0, 0)]}) is None
