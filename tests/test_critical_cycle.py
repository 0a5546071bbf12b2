"""The critical cycle, against every cycle of small random schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from offbeat.critical_cycle import PeriodicEvent, longest_period

Sequences = list[list[PeriodicEvent]]


class Dependency(NamedTuple):
    """An event waits for that of `name`, `distance` periods before, and then takes `seconds`."""

    name: int
    seconds: float
    distance: int


def drawn(seed: int) -> Sequences:
    """Random sequences in which events wait, within a period, for events with lower names only."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    names = [sorted(rng.sample(range(n), n)[: rng.randint(1, n)])]
    names += [each for each in ([name for name in range(n) if name not in names[0]],) if each]
    found = []
    for sequence in names:
        made = []
        for name in sequence:
            waits_for = rng.choice([None, *range(name)])
            made.append(PeriodicEvent(name, rng.uniform(0, 3), rng.randint(0, 1), waits_for, rng.uniform(0, 2)))
        number = 0
        for place, event in enumerate(made):  # periods never fall along a sequence, and rise by 1 at most in all
            number = max(number, event.period)
            made[place] = event._replace(period=number)
        found.append(made)
    return found


def graph(sequences: Sequences) -> dict[int, list[Dependency]]:
    waits: dict[int, list[Dependency]] = {}
    for sequence in sequences:
        for place, event in enumerate(sequence):
            before = sequence[place - 1]
            distance = event.period - before.period + (place == 0)
            waits[event.name] = [Dependency(before.name, event.seconds, distance)]
            if event.waits_for is not None:
                waits[event.name].append(Dependency(event.waits_for, event.delay + event.seconds, 0))
    return waits


def cycles(waits: dict[int, list[Dependency]], path: list[int], edges: list[Dependency]) -> Iterator[list[Dependency]]:
    """The simple cycles through the first event of the path that have no smaller event."""
    for edge in waits[path[-1]]:
        if edge.name == path[0]:
            yield [*edges, edge]
        elif edge.name > path[0] and edge.name not in path:
            yield from cycles(waits, [*path, edge.name], [*edges, edge])


@pytest.mark.parametrize("seed", range(120))
def test_the_longest_period_is_the_largest_ratio_of_all_cycles(seed):
    sequences = drawn(seed)
    waits = graph(sequences)
    every = [cycle for event in waits for cycle in cycles(waits, [event], [])]
    lengths = [(sum(edge.seconds for edge in cycle), sum(edge.distance for edge in cycle)) for cycle in every]
    if any(distance <= 0 for _, distance in lengths):
        assert longest_period(sequences) is None
    else:
        longest = max(seconds / distance for seconds, distance in lengths)
        assert longest_period(sequences) == pytest.approx(longest, rel=1e-9)


def test_random_schedules_include_those_without_a_period():
    found = [longest_period(drawn(seed)) for seed in range(120)]
    assert 10 < found.count(None) < 110


def test_a_shift_of_the_periods_of_all_events_changes_nothing():
    for seed in range(20):
        sequences = drawn(seed)
        shifted = [[event._replace(period=event.period + 5) for event in each] for each in sequences]
        assert longest_period(shifted) == longest_period(sequences)


def test_events_that_wait_for_each_other_have_no_period():
    sequences = [[PeriodicEvent("a", 1.0, waits_for="b")], [PeriodicEvent("b", 1.0, waits_for="a")]]
    assert longest_period(sequences) is None
