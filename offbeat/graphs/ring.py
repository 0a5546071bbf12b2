"""How many slots a stage needs so that its operations can be recorded once and repeated.

A recording works on fixed memory: the input, the activations and the outputs of one batch (a *slot*), and the version
of the weights that it was recorded with. In steady state a version serves the M forwards of a window, so slots come in
groups of M that share the memory of one version, and the groups go round:

    M = 2, lag 3     batch     0  1  2  3  4  5  6  7  8 ...
                     slot      0  1  2  3  4  5  0  1  2
                     version   0  0  1  1  2  2  0  0  1      (ceil(3/2) + 1 = 3 are alive at once)

A slot is used again after the backward of its batch, when the neighbours have read what it last gave them: they are at
most `MAX_LEAD` turns later, and read a gradient `unused` turns after it was made. Within a launch of several turns they
may be later, but what each operation waits for implies the same (see ticks.py). There, batches and targets are copied
into their slots before all of them, and losses are read after all of them: the first and the last stage have slots for
that. The rings of all stages divide a common period, after which everything recurs, also which slot gives to which. So
some stages have more slots than they need (the records of benchmarks/gpu.py have how many more).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from offbeat.method import Method

MAX_LEAD = 2  # turns by which a stage may be ahead of a neighbour
CHAINED_TURNS = 4  # launched at once where forwards wait for the stage below: more are hardly faster, and need memory


@dataclass(frozen=True)
class Ring:
    """The slots of one stage.

    groups   sets of slots, each with the memory of one version
    each     slots of a group
    rest     turns from a backward until its slot may be used again

    >>> from offbeat.methods import ADL
    >>> Ring.of(ADL(M=4), 1, 8, copies=True)  # lag 14: 15 batches in flight, 5 versions
    Ring(groups=6, each=4, rest=0)
    >>> Ring.of(ADL(M=4, weights="hybrid"), 1, 8, copies=False)
    Ring(groups=1, each=16, rest=0)
    """

    groups: int
    each: int
    rest: int

    @classmethod
    def of(cls, method: Method, k: int, K: int, *, copies: bool) -> Ring:
        """The ring of stage k of K; `copies`: whether its forwards run on copies of the weights."""
        M = method.M if copies else 1
        slots = _round(_period(method, K), _least(method, k, K, copies=copies), M)
        rest = max(method.unused(k, K) + MAX_LEAD - method.lag(k, K), _copied_ahead(method, k, K))
        return cls(slots // M, M, rest) if copies else cls(1, slots, rest)

    @property
    def slots(self) -> int:
        return self.groups * self.each


def _least(method: Method, k: int, K: int, *, copies: bool) -> int:
    """The fewest slots that stage k can work with."""
    waiting = method.held(k, K) - 1  # the lag, or in a pipelined window fewer than M
    least = max(waiting + MAX_LEAD, method.unused(k, K) + MAX_LEAD, waiting + _copied_ahead(method, k, K))
    if not has_lag(method, K):
        least = max(least, together(method, K))
    if not copies:
        return least
    versions = method.versions(k, K) + (method.forward == "before")  # one is made before the oldest is dropped
    return method.M * max(versions, -(-least // method.M))


def has_lag(method: Method, K: int) -> bool:
    """Whether any of K stages backwards a batch later than it forwards it."""
    return any(method.lag(k, K) for k in range(1, K + 1))


def room(method: Method, K: int) -> int:
    """Turns between the backwards of a batch in two neighbouring stages, at least."""
    return min((method.unused(k, K) for k in range(2, K + 1)), default=2)


def together(method: Method, K: int) -> int:
    """Turns that are launched at once.

    Without lag (see windows.py) they are fewer than 2K, since memory grows with them, and such that a window is a whole
    number of them. With lag several are launched where each forward waits for the one below (see ticks.py).

    >>> from offbeat.methods import ADL, ADL1F1B, BP
    >>> [together(BP(M=M), 8) for M in (1, 4, 32)], together(BP(M=4), 1)
    ([1, 4, 8], 1)
    >>> together(ADL(M=4), 8), together(ADL1F1B(M=4), 8)
    (1, 4)
    """
    if has_lag(method, K):
        return CHAINED_TURNS if room(method, K) == 1 else 1
    return max(n for n in range(1, 2 * K) if method.M % n == 0)


def _copied_ahead(method: Method, k: int, K: int) -> int:
    """Turns by which batches or targets may be copied into slots of stage k before work that was queued earlier."""
    turns = together(method, K) if k in (1, K) and has_lag(method, K) else 1
    return turns if turns > 1 else 0


def _round(period: int, least: int, M: int) -> int:
    """The smallest divisor of the period that is enough, in whole groups of M."""
    return next(n for n in range(M, period + 1, M) if n >= least and period % n == 0)


@cache
def _period(method: Method, K: int) -> int:
    """Turns after which everything recurs: the period that needs fewest slots in all."""
    needs = [_least(method, k, K, copies=True) for k in range(1, K + 1)]
    M = method.M
    step = math.lcm(M, together(method, K)) if has_lag(method, K) else M
    most = -(-max(needs) // step) * step
    return min(range(most, 2 * most + 1, step), key=lambda period: sum(_round(period, need, M) for need in needs))
