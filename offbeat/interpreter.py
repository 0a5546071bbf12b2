"""The interpreter of programs, without tensors: what every operation of a stage receives, sends and computes with.

All of this follows from the order of the stage's own operations. The clock (clock.py) assigns the steps of all stages
to ticks, the timeline (timeline.py) to seconds; plans, tables and pictures read the results. A stage that trains counts
the same quantities during the run; tests/test_interpreter.py compares the two.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import NamedTuple, Protocol

from offbeat.ops import LESSON, Backward, Forward, Operation, Program, Update, WindowRule

WINDOWS = 2  # windows of steady state that are interpreted: later ones repeat them
LONGEST = 10_000  # local iterations that are interpreted of a program with an order of its own


class Declaration(Protocol):
    """What the interpreter needs of a method; `offbeat.method.Method` implements it."""

    @property
    def order(self) -> object: ...

    @property
    def M(self) -> int: ...  # noqa: N802

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program: ...

    def receives(self, operation: Operation, k: int, K: int) -> int | None: ...

    def sends(self, operation: Operation, k: int, K: int) -> int | None: ...

    def forward_version(self, forwards: int, newest: int) -> int: ...

    def backward_version(self, forwarded: int, newest: int) -> int: ...

    def versions_kept(self) -> int: ...

    def full(self, k: int, K: int, *, in_flight: int, forwards: int) -> bool: ...

    def plain_lag(self, k: int, K: int) -> int | None: ...

    def drained(self, k: int, K: int) -> int | None: ...

    @property
    def m(self) -> int: ...

    @property
    def window(self) -> WindowRule: ...

    def __hash__(self) -> int: ...


class Step(NamedTuple):
    """One operation of stage k.

    receives    the stage whose message it uses: k-1 for an input (0: the data), k+1 for a gradient; None for no message
    sends       the stage that it sends a message to: k+1 for an output, k-1 for a gradient; None for no message
    version     of the weights that it computes with, counted in updates; for an update the version that it makes
    forwarded   version that the forward of its batch used
    staleness   for a backward: number of updates from that version to the newest
    steady      whether that forward ran in steady state, with as many batches in flight as the lag
    versions    number of versions of the weights that the stage holds after the operation, including the newest
    in_flight   number of batches (micro-batches) between forward and backward after the operation
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


def steps(method: Declaration, k: int, K: int, batches: Iterable[int]) -> Iterator[tuple[Step, ...]]:
    """Interpret the program of stage k, one local iteration at a time.

    Versions are counted in two ways. `updates` counts all windows that were closed. `newest` counts only those that had
    gradients and so changed the weights; aligned windows have none while the stage fills.

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
    updates = newest = forwards = gradients = 0  # gradients: in the open window
    in_flight: dict[int, tuple[int, int, bool]] = {}  # batch -> version in updates, its number, whether steady
    needed: dict[int, int] = {}  # number of a version -> batches in flight that were forwarded with it
    kept = method.versions_kept()
    for iteration in method.program(k, K, batches):
        done = []
        for operation in iteration:
            kind = type(operation)
            version = forwarded = updates
            steady, staleness = False, 0
            if kind is Forward:
                age = newest - method.forward_version(forwards, newest)
                steady = method.full(k, K, in_flight=len(in_flight), forwards=forwards)
                version = forwarded = updates - age
                in_flight[operation.t] = forwarded, newest - age, steady  # type: ignore[union-attr]
                needed[newest - age] = needed.get(newest - age, 0) + 1
                forwards += 1
            elif kind is Backward:
                forwarded, number, steady = in_flight.pop(operation.t)  # type: ignore[union-attr]
                version, staleness = method.backward_version(forwarded, updates), updates - forwarded
                needed[number] -= 1
                if not needed[number]:
                    del needed[number]
                gradients += 1
            elif kind is Update:
                updates = version = updates + 1
                newest += gradients > 0
                gradients = 0
            versions = 1
            if kept:
                versions = len(needed)
                for number in range(max(0, newest + 1 - kept), newest + 1):
                    versions += number not in needed
            receives, sends = method.receives(operation, k, K), method.sends(operation, k, K)
            held = len(in_flight)
            done.append(Step(k, operation, receives, sends, version, forwarded, staleness, steady, versions, held))
        yield tuple(done)


@dataclass(frozen=True)
class SteadyState:
    """Stage k of K in steady state.

    fill        local iterations before its first forward in steady state
    levels      staleness of its gradients, in updates, over a few whole windows
    versions    largest number of versions of the weights that it holds, including the newest
    held        largest number of batches (micro-batches) between forward and backward
    resting     number of them between two local iterations, after 0, 1, 2, ... local iterations
    """

    fill: int
    levels: tuple[int, ...]
    versions: int
    held: int
    resting: tuple[int, ...]

    @property
    def staleness(self) -> float:
        """Mean staleness of the gradients, in updates."""
        return sum(self.levels) / max(1, len(self.levels))

    @property
    def square_staleness(self) -> float:
        """Mean of the squared staleness."""
        return sum(level * level for level in self.levels) / max(1, len(self.levels))


@lru_cache(maxsize=4096)
def steady_state(method: Declaration, k: int, K: int) -> SteadyState:
    """Stage k of K in steady state: by its lag alone where that is enough, otherwise by interpreting its program.

    >>> from offbeat.methods import TwoBW
    >>> steady_state(TwoBW(M=3), 1, 4)
    SteadyState(fill=3, levels=(1, 1, 1, 1, 1, 1), versions=2, held=4, resting=(0, 1, 2, 3))
    """
    if (held := method.drained(k, K)) is not None:
        return SteadyState(0, (0,) * (WINDOWS * method.M * method.m), 1, held, (0,))
    lag = method.plain_lag(k, K)
    if lag is None:
        return interpreted(method, k, K)
    return lagged_state(lag, method.M, kept=method.versions_kept(), window=method.window)


@lru_cache(maxsize=4096)
def lagged_state(lag: int, M: int, *, kept: int, window: WindowRule = "count") -> SteadyState:
    """The steady state of `ops.lagged`, which `interpreted` finds as well; but hundreds of stages take long to fill.
    `kept` is that of `versions_kept`, at most 1 with aligned windows.

    Gradient t is computed after floor(t/M) updates, and its forward ran after floor((t-lag)/M). With two versions kept,
    forwards use that of the previous window, floor(t/M) - 1, if it is there. A window is in steady state if t >= lag
    for its first gradient, and with two versions t >= M. With aligned windows this holds for the local iteration t of
    the gradient, which is that of batch t-lag: a window is in steady state if t >= 2 lag.

    >>> lagged_state(3, 2, kept=1)
    SteadyState(fill=3, levels=(2, 1, 2, 1), versions=3, held=4, resting=(0, 1, 2, 3))
    >>> lagged_state(1, 2, kept=2)
    SteadyState(fill=2, levels=(1, 1, 1, 1), versions=2, held=2, resting=(0, 1, 1))
    >>> lagged_state(3, 2, kept=1, window="aligned").levels
    (2, 1, 2, 1)
    """
    least = int(kept == 2)  # staleness
    fill = max(lag, M) if least else lag
    updates = -(-fill // M)  # until the first window in steady state
    first = M * (updates if window == "count" else -(-2 * lag // M))
    levels = tuple(max(least, t // M - (t - lag) // M) for t in range(first, first + WINDOWS * M))
    resting = tuple(min(iteration, lag) for iteration in range(fill + 1))
    return SteadyState(fill, levels, updates + 1 if kept else 1, lag + 1, resting)


def interpreted(method: Declaration, k: int, K: int) -> SteadyState:
    """Interpret the program of stage k until it has closed a few windows whose gradients are all of steady state."""
    fill: int | None = None
    windows, versions, held, resting = 0, 1, 0, [0]
    levels: list[int] = []
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
    return SteadyState(fill or 0, tuple(levels), versions, held, tuple(resting))


@lru_cache(maxsize=4096)
def unused(method: Declaration, k: int, K: int) -> int:
    """Largest number of gradients sent by stage k and not yet used by stage k-1, after equally many local iterations.

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


class Messages:
    """Messages in flight between stages, in order, each with the time from which it can be used."""

    def __init__(self) -> None:
        self.links: defaultdict[tuple[int, int], deque[tuple[int, float]]] = defaultdict(deque)

    def receive(self, step: Step, by: float = float("inf")) -> float | None:
        """Take the message of a step: the time at which it arrived, or None if it has not arrived by the given time.

        A step without a message can run from time 0 on.
        """
        if not step.receives:
            return 0.0
        link = self.links[step.receives, step.k]
        if not link or link[0][1] > by:
            return None
        t, when = link.popleft()
        assert t == step.operation.t, f"stage {step.k} is at {step.operation} but received batch {t}"  # type: ignore[union-attr]
        return when

    def send(self, step: Step, when: float) -> None:
        """Send the message of a step, if it has one; it arrives at the given time."""
        if step.sends:
            self.links[step.k, step.sends].append((step.operation.t, when))  # type: ignore[union-attr]
