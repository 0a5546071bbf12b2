"""How many slots a stage needs so that its operations can be recorded once and repeated.

A recording works on fixed memory: the input, the activations and the outputs of one batch (a *slot*), and the version
of the weights that it was recorded with. In steady state a version serves the M forwards of a window, so slots come in
groups of M that share the memory of one version, and the groups go round:

    M = 2, lag 3     batch     0  1  2  3  4  5  6  7  8 ...
                     slot      0  1  2  3  4  5  0  1  2
                     version   0  0  1  1  2  2  0  0  1      (ceil(3/2) + 1 = 3 are alive at once)

A slot is used again after the backward of its batch, when the neighbours have read what it last gave them: they are at
most `MAX_LEAD` turns later (see ticks.py), and read a gradient `gradient_delay` turns after it was made. The rings of
all stages divide a common period, after which everything recurs, also which slot gives to which. So some stages have
more slots than they need (the records of benchmarks/gpu.py have how many more).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from offbeat.method import Method

MAX_LEAD = 2  # turns by which a stage may be ahead of a neighbour


@dataclass(frozen=True)
class Ring:
    """The slots of one stage.

    groups   sets of slots, each with the memory of one version
    each     slots of a group
    gradient_delay    turns between a backward of this stage and that of the same batch in the stage below

    >>> from offbeat.methods import ADL
    >>> Ring.of(ADL(M=4), 1, 8, copies=True)  # lag 14: 15 batches in flight, 5 versions
    Ring(groups=6, each=4, gradient_delay=0)
    >>> Ring.of(ADL(M=4, weights="hybrid"), 1, 8, copies=False)
    Ring(groups=1, each=16, gradient_delay=0)
    """

    groups: int
    each: int
    gradient_delay: int

    @classmethod
    def of(cls, method: Method, k: int, K: int, *, copies: bool) -> Ring:
        """The ring of stage k of K; `copies`: whether its forwards run on copies of the weights."""
        delay, M = method.unused(k, K), method.M if copies else 1
        slots = _round(_period(method, K), _least(method, k, K, copies=copies), M)
        return cls(slots // M, M, delay) if copies else cls(1, slots, delay)

    @property
    def slots(self) -> int:
        return self.groups * self.each


def _least(method: Method, k: int, K: int, *, copies: bool) -> int:
    """The fewest slots that stage k can work with."""
    least = max(method.lag(k, K), method.unused(k, K)) + MAX_LEAD
    if not any(method.lag(j, K) for j in range(1, K + 1)):
        least = max(least, together(method, K))
    if not copies:
        return least
    versions = method.versions(k, K) + (method.forward == "before")  # one is made before the oldest is dropped
    return method.M * max(versions, -(-least // method.M))


def together(method: Method, K: int) -> int:
    """Turns of a method without lag that are launched at once (see windows.py): fewer than 2K, since memory grows with
    them, and such that a window is a whole number of them.

    >>> from offbeat.methods import BP
    >>> [together(BP(M=M), 8) for M in (1, 4, 32)], together(BP(M=4), 1)
    ([1, 4, 8], 1)
    """
    return max(n for n in range(1, 2 * K) if method.M % n == 0)


def _round(period: int, least: int, M: int) -> int:
    """The smallest divisor of the period that is enough, in whole groups of M."""
    return next(n for n in range(M, period + 1, M) if n >= least and period % n == 0)


@cache
def _period(method: Method, K: int) -> int:
    """Turns after which everything recurs: the period that needs fewest slots in all."""
    needs = [_least(method, k, K, copies=True) for k in range(1, K + 1)]
    most, M = max(needs), method.M
    return min(range(most, 2 * most + 1, M), key=lambda period: sum(_round(period, need, M) for need in needs))
