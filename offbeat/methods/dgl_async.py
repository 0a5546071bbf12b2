"""DGL-async: decoupled greedy learning with a replay buffer between stages.

Belilovsky, Eickenberg, Oyallon, "Decoupled Greedy Learning of CNNs" (ICML 2020), Algorithm 2. A stage does not wait for
the previous one: it draws a batch from a buffer of those that it received last, the newest of the least used ones. A
new batch replaces the oldest. Which stage runs next is random, so a batch may be used twice, or never.

    K=2, buffer 2 (+t received, -t dropped)
    stage 1             | F0B0U    F1B1U          F2B2U
    stage 2             | +0       F0B0U +1       F1B1U F1B1U -0 +2

Order and draws are a pure function of the seed, so they are the same in every process. Locks: none. Staleness 0; the
age of the input is random. Held: the buffer, one graph, one version. Time per batch: F + B + A, with A the time of the
auxiliary classifier.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import count, islice, takewhile
from threading import Lock

from offbeat.errors import number
from offbeat.method import Method
from offbeat.methods import lags
from offbeat.methods.dgl import head
from offbeat.ops import Backward, Drop, Forward, Iteration, Operation, Program, Take, Update
from offbeat.seeds import derive

MOST_SHARED = 10_000  # largest number of batches whose draws are kept for the programs of other stages
MOST_TURNS = 8  # largest number of draws per stage between two batches that enter


class Buffer:
    """The batches that a stage can draw from, oldest first, each with the number of times that it was used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.uses: dict[int, int] = {}

    def add(self, t: int) -> tuple[Operation, ...]:
        """The operations that receive batch t, after dropping the oldest batch if the buffer is full."""
        self.uses.pop(t, None)
        oldest = next(iter(self.uses), None)
        dropped: tuple[Operation, ...] = ()
        if oldest is not None and len(self.uses) == self.size:
            del self.uses[oldest]
            dropped = (Drop(oldest),)
        self.uses[t] = 0
        return (*dropped, Take(t))

    def draw(self) -> int | None:
        """The newest of the least used batches; None while the buffer is empty."""
        if not self.uses:
            return None
        fewest = min(self.uses.values())
        t = next(t for t, uses in reversed(self.uses.items()) if uses == fewest)
        self.uses[t] += 1
        return t


@lru_cache(maxsize=1024)  # the programs of all stages in a process have the same turns
def turns(K: int, t: int, *, seed: int) -> tuple[int, ...]:
    """The stages that run after batch t-1 has entered, in order: drawn at random until stage 1 is drawn, which lets
    batch t enter."""
    draw = random.Random(derive(seed, "turns", t)).randint
    drawn = (draw(1, K) for _ in range(MOST_TURNS * K))
    return (*takewhile(lambda stage: stage != 1, drawn), 1)


Draws = dict[int, list[tuple[int, int]]]  # of each stage, the turns in which it runs and the batches that it draws


def draws(K: int, batches: Iterable[int], *, top: int, size: int, seed: int) -> Iterator[Draws]:
    """What the stages 1 to `top` draw after each batch has entered; stages above do not affect them."""
    buffers = {stage: Buffer(size) for stage in range(2, top + 1)}
    for t in batches:
        found: Draws = {}
        for turn, stage in enumerate(turns(K, t, seed=seed)):
            if stage > top or (drawn := t if stage == 1 else buffers[stage].draw()) is None:
                continue
            found.setdefault(stage, []).append((turn, drawn))
            if stage < top:
                buffers[stage + 1].add(drawn)
        yield found


class SharedDraws:
    """The draws of all stages for a range of batches, found once for the programs of all stages."""

    def __init__(self, K: int, batches: range, *, size: int, seed: int) -> None:
        self.found: list[Draws] = []
        self.lock = Lock()
        self.draws = partial(draws, K, batches, top=K, size=size, seed=seed)
        self.more: Iterator[Draws] = self.draws()

    def __iter__(self) -> Iterator[Draws]:
        for place in count():
            with self.lock:  # programs may run in threads
                if place == len(self.found) and not self._find():
                    return
            yield self.found[place]

    def _find(self) -> bool:
        """Find those of one more batch; False if there is none."""
        before = len(self.found)
        try:
            self.found += islice(self.more, 1)
        except BaseException:  # Ctrl-C, after which a generator yields nothing
            self.more = islice(self.draws(), len(self.found), None)
            raise
        return len(self.found) > before


_shared = lru_cache(maxsize=1)(SharedDraws)


def free_running(k: int, K: int, batches: Iterable[int], *, size: int, seed: int) -> Program:
    """The program of stage k, which computes the draws of the stages below as well and yields its own operations."""
    if isinstance(batches, range) and len(batches) <= MOST_SHARED:
        drawn: Iterable[Draws] = _shared(K, batches, size=size, seed=seed)
    else:  # of a training, which keeps none of them
        drawn = draws(K, batches, top=k, size=size, seed=seed)
    buffer = Buffer(size)
    for found in drawn:
        mine: list[Operation] = []
        received = ((turn, t, False) for turn, t in found.get(k - 1, ()))
        used = ((turn, t, True) for turn, t in found.get(k, ()))
        for _, t, uses in sorted((*received, *used)):
            mine += learn(t, buffered=k > 1) if uses else buffer.add(t)
        yield tuple(mine)


def learn(t: int, *, buffered: bool) -> Iteration:
    """Forward, backward on the local loss, update."""
    return Forward(t, buffered), Backward(t), Update(1)


def AsyncDGL(buffer: int = 2, *, seed: int = 0) -> Method:  # noqa: N802
    """Greedy learning from a buffer of batches between stages.

    >>> [" ".join(map(str, iteration)) for iteration in AsyncDGL(buffer=2).program(2, 2, range(4))]
    ['+0', '+1', '-0 +2', 'F2 B2 U -1 +3']
    """
    number(buffer, "buffer", "use an integer of at least 1 batch", lambda size: size >= 1, whole=True)

    def order(k: int, K: int, batches: Iterable[int]) -> Program:
        return free_running(k, K, batches, size=buffer, seed=seed)

    return Method(
        name="dgl-async",
        title="greedy learning from buffers",
        reference="Belilovsky et al. 2020",
        lag=lags.none,
        feedback="local",
        head=head,
        order=order,
        free_running=True,
    )
