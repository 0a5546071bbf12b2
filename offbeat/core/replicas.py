"""Replicas of a stage: at the end of a window they add their gradients.

    replica 0   F0 B0 F1 B1 | sum | U       R replicas have the same weights and each its own batches. The gradients of
    replica 1   F0 B0 F1 B1 | sum | U       their windows are added in the order of the replicas, so the sum, and the
                                            update that each makes of it, are the same bits in all of them and engines

An update applies the mean of the R*M gradients, or its weighted mean where gradients are weighted by their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat.core.window import GradientWindow
from offbeat.errors import UserError


class WindowSum(Protocol):
    """One replica's part in the sum of its stage's windows.

    replicas    R
    request     a number above 0 that this replica sends with its next window, 0 for none
    requested   the last number that a replica sent: all replicas have it after the same operation
    complete    set by the worker while an update is under way: completes it

    Where `overlaps`, the worker continues between `start` and `finish` with what does not need the update.
    """

    overlaps: bool
    replicas: int
    request: int
    requested: int
    complete: Callable[[], None] | None

    def start(self, window: GradientWindow, *, update: int, over: int, unit: int) -> None:
        """Give the gradients of this replica's window, whose update divides by `over`; unit: see WindowFacts."""

    def ready(self) -> bool:
        """Whether `finish` would return at once."""

    def finish(self, window: GradientWindow) -> int:
        """Replace the window's gradients by the sum over all replicas, and return what one of them requests; UserError
        if theirs are for another update."""

    def end(self, window: GradientWindow, *, batches: int) -> None:
        """The end of an epoch or a drain, after that many batches; UserError if another replica is elsewhere."""


class WindowFacts(NamedTuple):
    """What a replica states about its window: the update and the number of gradients that it is for, how many it has
    and their excess (see GradientWindow), the samples of a gradient of weight 1, and the request.

    At the end of an epoch or a drain, `over` is 0 and `update` the number of batches."""

    update: int
    over: int
    gradients: int
    excess: float
    unit: int
    request: int


@dataclass(frozen=True)
class WindowShare:
    """What one replica adds: sums by parameter, None where it has no gradient; and how they count in the mean."""

    sums: list[Tensor | None]
    facts: WindowFacts

    @classmethod
    def of(cls, window: GradientWindow, *, update: int, over: int, unit: int, request: int) -> WindowShare:
        found = window.gradients()
        facts = WindowFacts(update, over, len(window.levels), window.excess(), unit, request)
        return cls([found.get(name) for name in window.parameters], facts)


def add_in_order(terms: Iterable[Tensor], facts: Sequence[WindowFacts]) -> Tensor:
    """((g0 + g1) + g2) + ..., in new memory, with the weights of all in the unit of replica 0."""
    first, *others = terms
    total = first.clone()
    for term, each in zip(others, facts[1:], strict=True):
        total += term if each.unit == facts[0].unit else term * (each.unit / facts[0].unit)
    return total


def excess_in_unit(facts: WindowFacts, unit: int) -> float:
    """The excess of a replica's window, if that many samples have weight 1."""
    if facts.unit == unit:
        return facts.excess
    return (facts.over + facts.excess) * facts.unit / unit - facts.over


def check_places(facts: Sequence[WindowFacts]) -> None:
    """Refuse replicas that are not at the same update, or end; facts: of each, in order."""
    for replica, each in enumerate(facts):
        if each[:2] != facts[0][:2]:
            raise UserError(
                f"replica {replica} is {_place(each)} where replica 0 is {_place(facts[0])}: call step() and drain() "
                "equally often in every process, and give every replica as many batches"
            )


def _place(facts: WindowFacts) -> str:
    if facts.over:
        return f"at update {facts.update} of {facts.over} gradients"
    return f"at the end of an epoch or a drain after {facts.update} batches"


def replace_sums(window: GradientWindow, sums: list[Tensor | None], facts: Sequence[WindowFacts]) -> None:
    """Make the window that of all replicas; facts: of each, in order."""
    gradients = sum(each.gradients for each in facts)
    excess = sum(excess_in_unit(each, facts[0].unit) for each in facts)
    named = {name: total for name, total in zip(window.parameters, sums, strict=True) if total is not None}
    window.combine(named, gradients=gradients, excess=excess)


def request_of(facts: Sequence[WindowFacts]) -> int:
    """What the first replica that has a request requests; 0 for nothing."""
    return next((each.request for each in facts if each.request), 0)


class LocalReplicas:
    """The replicas of a stage in one process: the last one that gives its window adds them."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.given: dict[int, WindowShare] = {}
        self.results: dict[int, tuple[list[Tensor | None], list[WindowShare]]] = {}

    def give(self, replica: int, share: WindowShare, parameters: list[Tensor]) -> None:
        self.given[replica] = share
        if len(self.given) < self.replicas:
            return
        shares = [self.given[r] for r in range(self.replicas)]
        self.given = {}
        columns = zip(*(share.sums for share in shares), strict=True)
        facts = [share.facts for share in shares]
        sums = [self._sum(terms, parameter, facts) for terms, parameter in zip(columns, parameters, strict=True)]
        self.results = dict.fromkeys(range(self.replicas), (sums, shares))

    def _sum(self, terms: tuple[Tensor | None, ...], parameter: Tensor, facts: Sequence[WindowFacts]) -> Tensor | None:
        if all(term is None for term in terms):
            return None
        return add_in_order((torch.zeros_like(parameter) if term is None else term for term in terms), facts)


class LocalWindowSum:
    """The sum over replicas of one process, see WindowSum."""

    overlaps = False  # all replicas wait for the last one, which adds at once
    complete: Callable[[], None] | None = None

    def __init__(self, stage: LocalReplicas, replica: int) -> None:
        self.stage, self.replica, self.replicas = stage, replica, stage.replicas
        self.request = self.requested = 0

    def start(self, window: GradientWindow, *, update: int, over: int, unit: int) -> None:
        share = WindowShare.of(window, update=update, over=over, unit=unit, request=self.request)
        self.request = 0
        self.stage.give(self.replica, share, list(window.parameters.values()))

    def ready(self) -> bool:
        return self.replica in self.stage.results

    def finish(self, window: GradientWindow) -> int:
        sums, shares = self.stage.results.pop(self.replica)
        facts = [share.facts for share in shares]
        check_places(facts)
        replace_sums(window, sums, facts)
        return request_of(facts)

    def end(self, window: GradientWindow, *, batches: int) -> None:
        """One call of step() trains all replicas."""
