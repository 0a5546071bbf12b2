"""The critical cycle of a periodic schedule: the cycle of dependencies that limits its rate.

Events run in sequences, one for each stage, which repeat every period. An event waits for the previous one of its
sequence, and may wait for one of another sequence: a message. In the long run a period takes as long as the largest
ratio of seconds to periods over the cycles of these dependencies.

It is found by policy iteration (Howard; Cochet-Terrasson et al., "Numerical computation of spectral elements in
max-plus algebra", 1998), without running the schedule: of the two that an event may wait for, one is chosen; the cycles
of what was chosen give a period, and times that follow from it; an event that then waits longer for the other one
chooses that. Whole sequences are compared at once, as a running maximum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-12  # relative to the longest dependency, per event

Floats = NDArray[np.float64]
Places = NDArray[np.intp]


class PeriodicEvent(NamedTuple):
    """One event of a sequence.

    seconds     that it takes
    period      number of the period that it belongs to
    waits_for   name of the event of the same period, of any sequence, that it waits for, too
    delay       seconds from the end of that event until this one can start
    """

    name: Hashable
    seconds: float
    period: int = 0
    waits_for: Hashable | None = None
    delay: float = 0.0


class EventArrays(NamedTuple):
    """The events of all sequences, one sequence after the other.

    lengths   of the sequences
    source    place of the event that each one waits for, too; -1 for none
    """

    lengths: list[int]
    seconds: Floats
    period: Places
    source: Places
    delay: Floats

    @classmethod
    def of(cls, sequences: Sequence[Sequence[PeriodicEvent]]) -> EventArrays:
        events = list(chain.from_iterable(sequences))
        place = {event.name: number for number, event in enumerate(events)}
        return cls(
            [len(sequence) for sequence in sequences],
            np.array([event.seconds for event in events], np.float64),
            np.array([event.period for event in events], np.intp),
            np.array([-1 if event.waits_for is None else place[event.waits_for] for event in events], np.intp),
            np.array([event.delay for event in events], np.float64),
        )


def longest_period(
    sequences: EventArrays | Sequence[Sequence[PeriodicEvent]], *, within: float | None = None, least: float = 0.0
) -> float | None:
    """Seconds per period in the long run; None if events wait for each other without end.

    With `within` it only has to be decided whether the period is longer: what is returned is `within` if not, and
    otherwise at most the period. `least` is known not to be more than the period: the closer it is, the fewer cycles
    are looked at.

    >>> ping = [PeriodicEvent("send", 1.0), PeriodicEvent("use", 2.0, waits_for="reply", delay=0.5)]
    >>> sequences = [ping, [PeriodicEvent("reply", 4.0, waits_for="send", delay=0.5)]]
    >>> longest_period(sequences), longest_period(sequences, within=9.0)
    (8.0, 9.0)
    """
    policy = _Policy(sequences if isinstance(sequences, EventArrays) else EventArrays.of(sequences))
    most = math.inf if within is None else within
    policy.period = max(policy.period, within or 0.0, least)
    while policy.period <= most and policy.sweep():
        if not policy.evaluate():
            return None
        if policy.switch() and not policy.evaluate():
            return None
    return policy.period


class _Policy:
    """What each event waits for, the period of the slowest cycle of this, and the end of each event in its period.

    remote   whether an event waits for that of another sequence rather than for the previous one of its own
    wraps    sequences in whose next sweep the last event delays the first one of the next period
    """

    def __init__(self, events: EventArrays) -> None:
        count = len(events.seconds)
        bounds = np.cumsum([0, *events.lengths])
        self.slices = [slice(int(start), int(stop)) for start, stop in pairwise(bounds)]
        self.first, self.last = bounds[:-1], bounds[1:] - 1
        self.seconds, self.delay, self.source = events.seconds, events.delay, events.source
        self.messages = self.source >= 0
        self.ahead = np.where(self.messages, events.period - events.period[self.source], 0)  # periods
        self.previous: Places = np.arange(count) - 1
        self.previous[self.first] = self.last
        self.next_period = np.zeros(count, np.intp)
        self.next_period[self.first] = 1
        self.within = np.concatenate([np.cumsum(self.seconds[each]) for each in self.slices])  # ends, from 0
        self.ends = self.within
        self.period = float(self.within[self.last].max())
        self.remote = np.zeros(count, bool)
        self.wraps = np.zeros(len(events.lengths), bool)
        self.tolerance = TOLERANCE * count * float(max(self.seconds.max(), self.delay.max()))

    def _arrivals(self) -> Floats:
        """When the message of each event arrives; -inf for those without one."""
        arrived = self.ends[self.source] + self.delay + self.period * self.ahead
        return np.where(self.messages, arrived, -np.inf)

    def sweep(self) -> bool:
        """Delay events that have to wait longer, sequence by sequence, up and down; whether there were any.

        The last event of a sequence delays the first one of the next period only where it does so most. In all
        sequences at once, each would close a short cycle of its own before the long ones are found.
        """
        delayed = False
        lag = np.where(self.messages, self.delay + self.period * self.ahead, -np.inf) - (self.within - self.seconds)
        ends = self.ends = self.ends.copy()
        for number in chain(range(len(self.slices)), reversed(range(len(self.slices)))):
            each = self.slices[number]
            arrived = ends[self.source[each]] + lag[each]  # less what the sequence computes before
            begun = np.maximum.accumulate(np.maximum(arrived, ends[each] - self.within[each]))
            if self.wraps[number]:
                begun = np.maximum(begun, ends[self.last[number]] - self.period)
            later = self.within[each] + begun
            late = later > ends[each] + self.tolerance
            if late.any():
                delayed = True
                self.remote[each][late] = (arrived >= begun - self.tolerance)[late]
                ends[each][late] = later[late]
        late_by = ends[self.last] - self.period - (ends[self.first] - self.seconds[self.first])
        most = late_by.max()
        self.wraps = late_by >= most / 2 if most > self.tolerance else np.ones(len(late_by), bool)
        return delayed or bool(most > self.tolerance)

    def switch(self) -> bool:
        """Choose for all events at once what they wait for longer, by the present times; whether any was delayed.

        A sweep delays the later events of a sequence before their messages; this corrects its choice for them.
        """
        arrived, done = self._arrivals(), self.ends[self.previous] - self.period * self.next_period
        late = np.maximum(arrived, done) + self.seconds > self.ends + self.tolerance
        self.remote[late] = (arrived >= done - self.tolerance)[late]
        return bool(late.any())

    def evaluate(self) -> bool:
        """The period and the times that follow from the choices; False if events wait for each other without end."""
        before = np.where(self.remote, self.source, self.previous)
        distance = np.where(self.remote, -self.ahead, self.next_period)
        seconds = self.seconds + np.where(self.remote, self.delay, 0.0)
        cycles = _cycles(before)
        for cycle in cycles:
            periods = int(distance[cycle].sum())
            if periods <= 0:
                return False
            self.period = max(self.period, math.fsum(seconds[cycle].tolist()) / periods)
        roots = [cycle[-1] for cycle in cycles]
        taken = seconds - self.period * distance
        taken[roots], before[roots] = 0.0, roots
        while True:  # along twice as many dependencies each time, up to one event of a cycle, which keeps its time
            taken = taken + taken.take(before)
            further = before.take(before)
            if np.array_equal(further, before):
                break
            before = further
        self.ends = self.ends[before] + taken
        return True


def _cycles(before: Places) -> list[Places]:
    """The cycles of a graph in which every event has one that comes before it: of each the events, in increasing order.

    After as many steps as there are events, all are on a cycle. The last event of a cycle then becomes its name.
    """
    reached, steps = before, 1
    while steps < len(before):
        reached, steps = reached.take(reached), 2 * steps
    on_cycle = np.zeros(len(before), bool)
    on_cycle[reached] = True
    events = np.flatnonzero(on_cycle)
    step, last, steps = np.searchsorted(events, before[events]), np.arange(len(events)), 1
    while steps < len(events):
        last, step, steps = np.maximum(last, last.take(step)), step.take(step), 2 * steps
    by_cycle = last.argsort(kind="stable")
    return np.split(events[by_cycle], np.flatnonzero(np.diff(last[by_cycle])) + 1)
