"""The interpreter of programs, without tensors: what every operation of a stage receives, sends and computes with.

All of it follows from the order of the stage's own operations. The clock (clock.py) puts the steps of all stages into
ticks, the timeline (timeline.py) gives them seconds; plans, tables and pictures read them. A stage that trains counts
the same while it runs; tests/test_interpreter.py compares the two.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import NamedTuple, Protocol

from offbeat.ops import LESSON, Backward, Forward, Operation, Program, Update

WINDOWS = 2  # of steady state that are looked at: all that comes later is the same again
LONGEST = 10_000  # local iterations that are looked at of a program with an order of its own


class Declaration(Protocol):
    """What the interpreter asks a method; see `offbeat.method.Method`, which answers."""

    @property
    def order(self) -> object: ...

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program: ...

    def receives(self, operation: Operation, k: int, K: int) -> int | None: ...

    def sends(self, operation: Operation, k: int, K: int) -> int | None: ...

    def forward_version(self, forwards: int, newest: int) -> int: ...

    def backward_version(self, forwarded: int, newest: int) -> int: ...

    def versions_kept(self) -> int: ...

    def full(self, k: int, K: int, *, in_flight: int, forwards: int) -> bool: ...

    def __hash__(self) -> int: ...


class Step(NamedTuple):
    """One operation of stage k.

    receives    the stage whose message it takes: k-1 for an input (0: the data), k+1 for a gradient; None for nothing
    sends       the stage that it sends a message to: k+1 an output, k-1 a gradient; None for nobody
    version     of the weights that it computes with, counted in updates; for an update the one that it makes
    forwarded   version that the forward of its batch used
    staleness   for a backward: updates between that version and the newest
    steady      whether that forward found the stage full, as it is from then on
    versions    of the weights that the stage holds after the operation, the newest included
    in_flight   batches (micro-batches) between forward and backward that it then holds
    """

    k: int
    operation: Operation
    receives: int | None
    sends: int | None
    version: int
    forwarded: int
    staleness: int
    steady: bool
    versions: int
    in_flight: int


Used = tuple[int, int, bool]  # by a forward: version in updates, its number (see Interpreter), whether steady


class Interpreter:
    """Stage k of K as its program goes on.

    Updates count all windows that were closed; only those with gradients in them make weights that differ, which have
    numbers of their own. (Aligned windows are empty while the stage fills.)
    """

    def __init__(self, method: Declaration, k: int, K: int) -> None:
        self.method, self.k, self.K = method, k, K
        self.updates = self.newest = 0  # and the number of the newest version
        self.forwards = self.gradients = 0  # so far, and in the open window
        self.in_flight: dict[int, Used] = {}
        self.needed: dict[int, int] = {}  # batches in flight by the number of the version that they were forwarded on
        self.kept = method.versions_kept()

    def step(self, operation: Operation) -> Step:
        """Do the next operation of the program."""
        method, kind = self.method, type(operation)
        version = forwarded = self.updates
        steady, staleness = False, 0
        if kind is Forward:
            forwarded, number, steady = used = self._used()
            version = forwarded
            self.in_flight[operation.t] = used  # type: ignore[union-attr]
            self.needed[number] = self.needed.get(number, 0) + 1
            self.forwards += 1
        elif kind is Backward:
            forwarded, number, steady = self.in_flight.pop(operation.t)  # type: ignore[union-attr]
            version, staleness = method.backward_version(forwarded, self.updates), self.updates - forwarded
            self.needed[number] -= 1
            if not self.needed[number]:
                del self.needed[number]
            self.gradients += 1
        elif kind is Update:
            self.updates = version = self.updates + 1
            self.newest += 1 if self.gradients else 0
            self.gradients = 0
        receives, sends = method.receives(operation, self.k, self.K), method.sends(operation, self.k, self.K)
        return Step(
            self.k,
            operation,
            receives,
            sends,
            version,
            forwarded,
            staleness,
            steady,
            self._versions(),
            len(self.in_flight),
        )

    def _used(self) -> Used:
        """What the next forward uses."""
        age = self.newest - self.method.forward_version(self.forwards, self.newest)
        full = self.method.full(self.k, self.K, in_flight=len(self.in_flight), forwards=self.forwards)
        return self.updates - age, self.newest - age, full

    def _versions(self) -> int:
        if not self.kept:
            return 1
        held = len(self.needed)
        for number in range(max(0, self.newest + 1 - self.kept), self.newest + 1):
            held += number not in self.needed
        return held


def steps(method: Declaration, k: int, K: int, batches: Iterable[int]) -> Iterator[tuple[Step, ...]]:
    """The program of stage k, one local iteration at a time.

    >>> from offbeat.methods import ADL
    >>> for iteration in steps(ADL(M=1), 1, 2, range(4)):
    ...     print(*(f"{step.operation}@v{step.version}, {step.versions} held" for step in iteration), sep="; ")
    F0@v0, 1 held
    F1@v0, 1 held
    F2@v0, 1 held; B0@v0, 1 held; U@v1, 2 held
    F3@v1, 2 held; B1@v0, 2 held; U@v2, 3 held
    B2@v0, 2 held; U@v3, 2 held
    B3@v1, 1 held; U@v4, 1 held
    """
    interpreter = Interpreter(method, k, K)
    for iteration in method.program(k, K, batches):
        yield tuple(map(interpreter.step, iteration))


@dataclass(frozen=True)
class SteadyState:
    """Stage k of K in steady state.

    fill        local iterations before its first forward in that state
    staleness   mean level of staleness of its gradients, in updates
    versions    most versions of the weights that it holds, the newest included
    held        most batches (micro-batches) between forward and backward
    resting     those that it holds between two local iterations, after 0, 1, 2, ... of them
    """

    fill: int
    staleness: float
    versions: int
    held: int
    resting: tuple[int, ...]


@lru_cache(maxsize=4096)
def steady_state(method: Declaration, k: int, K: int) -> SteadyState:
    """Go through the program of stage k until it has closed a few windows in which nothing is left of the fill.

    >>> from offbeat.methods import TwoBW
    >>> steady_state(TwoBW(M=3), 1, 4)
    SteadyState(fill=3, staleness=1.0, versions=2, held=4, resting=(0, 1, 2, 3))
    """
    fill: int | None = None
    windows, versions, held, resting = 0, 1, 0, [0]
    levels: list[int] = []  # of whole windows in steady state
    window: list[Step] = []
    for done, iteration in enumerate(steps(method, k, K, range(LONGEST) if method.order else count())):
        for step in iteration:
            versions, held = max(versions, step.versions), max(held, step.in_flight)
            if isinstance(step.operation, Forward) and step.steady and fill is None:
                fill = done
            elif isinstance(step.operation, Backward):
                window.append(step)
            elif isinstance(step.operation, Update):
                if window and all(backward.steady for backward in window):
                    levels += [backward.staleness for backward in window]
                    windows += 1
                window = []
        if fill is None or done < fill:
            resting.append(iteration[-1].in_flight if iteration else resting[-1])
        if windows >= WINDOWS:
            break
    return SteadyState(fill or 0, sum(levels) / max(1, len(levels)), versions, held, tuple(resting))


@lru_cache(maxsize=4096)
def unused(method: Declaration, k: int, K: int) -> int:
    """Most gradients from stage k that stage k-1 has still to use when both have done as many local iterations.

    >>> from offbeat.methods import ADL, DNI, PipeDream
    >>> unused(ADL(), 2, 4), unused(PipeDream(), 2, 4), unused(DNI(), 2, 4)
    (2, 1, 2)
    """
    left = most = 0
    pairs = zip(steps(method, k, K, count()), steps(method, k - 1, K, count()), strict=False)
    fill = max(steady_state(method, stage, K).fill for stage in (k - 1, k))
    for here, below in islice(pairs, fill + LESSON + 1):
        left += sum(step.sends == k - 1 for step in here) - sum(step.receives == k for step in below)
        most = max(most, left)
    return most


def reach(method: Declaration, K: int, t: int) -> int:
    """Local iterations, after that of batch t, until a mark that enters ahead of batch t has reached every stage.

    A mark travels with the messages to the stage above: a stage that receives one sends it ahead of its next output.

    >>> from offbeat.methods import ADL, AsyncDGL
    >>> reach(ADL(), 4, 10), reach(AsyncDGL(), 4, 10)
    (0, 2)
    """
    arrived = carrier = 0  # the mark is ahead of that message from below, counted from batch t on
    for k in range(1, K + 1):
        received = sent = 0
        iterations = enumerate(steps(method, k, K, count(t)))
        while received <= carrier:
            arrived, iteration = next(iterations)
            for step in iteration:
                received += step.receives == k - 1
                sent += step.sends == k + 1 and received <= carrier
        carrier = sent
    return arrived


class Mail:
    """Messages between stages: in order, each with the time from which it can be used."""

    def __init__(self) -> None:
        self.links: defaultdict[tuple[int, int], deque[tuple[int, float]]] = defaultdict(deque)

    def take(self, step: Step, by: float = float("inf")) -> float | None:
        """The time from which the message of a step could be used, which is taken then; None if it is not there by that
        time. A step that needs none can be done from time 0 on."""
        if not step.receives:
            return 0.0
        link = self.links[step.receives, step.k]
        if not link or link[0][1] > by:
            return None
        t, when = link.popleft()
        assert t == step.operation.t, f"stage {step.k} is at {step.operation} but was sent {t}"  # type: ignore[union-attr]
        return when

    def send(self, step: Step, when: float) -> None:
        """What a step sends can be used from then on."""
        if step.sends:
            self.links[step.k, step.sends].append((step.operation.t, when))  # type: ignore[union-attr]
