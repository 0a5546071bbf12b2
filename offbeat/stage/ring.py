"""How many slots a stage needs so that its operations can be recorded once and repeated for ever.

A recording works on fixed memory: the input, the activations and the outputs of one batch (a *slot*), and the version
of the weights that it was recorded with. In steady state a version serves the M forwards of a window, so slots come in
groups of M that share the memory of one version, and the groups go round:

    M = 2, lag 3     batch     0  1  2  3  4  5  6  7  8 ...
                     slot      0  1  2  3  4  5  0  1  2
                     version   0  0  1  1  2  2  0  0  1      (ceil(3/2) + 1 = 3 are alive at once)

A slot is used again when its batch has come back, and when the neighbours have read what it last gave them: they are at
most `BEHIND` turns behind (see engines/streams.py), and read a gradient `below` turns after it was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.method import Method

BEHIND = 2  # turns by which a stage may be ahead of a neighbour


@dataclass(frozen=True)
class Ring:
    """The slots of one stage.

    groups   sets of slots, each with the memory of one version
    each     slots of a group
    below    turns between a backward of this stage and that of the same batch in the stage below

    >>> from offbeat.methods import ADL
    >>> Ring.of(ADL(M=4), 1, 8, copies=True)  # lag 14: 15 batches in flight, 5 versions
    Ring(groups=5, each=4, below=0)
    >>> Ring.of(ADL(M=4, weights="hybrid"), 1, 8, copies=False)
    Ring(groups=1, each=16, below=0)
    """

    groups: int
    each: int
    below: int

    @classmethod
    def of(cls, method: Method, k: int, K: int, *, copies: bool) -> Ring:
        """The ring of stage k of K; `copies` says whether its forwards run on copies of the weights."""
        lag = method.lag(k, K)
        below = method.lag(k - 1, K) - lag if k > 1 else 0
        least = max(lag, below) + BEHIND
        if not copies:
            return cls(1, least, below)
        versions = method.versions(k, K) + (method.forward == "before")  # one is made before the oldest goes
        return cls(max(versions, -(-least // method.M)), method.M, below)

    @property
    def slots(self) -> int:
        return self.groups * self.each
