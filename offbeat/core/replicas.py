"""Replicas of a stage: at the end of a window they add their gradients.

    replica 0   F0 B0 F1 B1 | sum | U       R replicas have the same weights and each its own batches. The gradients of
    replica 1   F0 B0 F1 B1 | sum | U       their windows are added in the order of the replicas, so the sum, and the
                                            update that each makes of it, are the same bits in all of them and engines

An update applies the mean of the R*M gradients, or its weighted mean where gradients are weighted by their samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat.core.window import GradientWindow


class WindowSum(Protocol):
    """One replica's part in the sum of its stage's windows.

    replicas    R
    request     a number above 0 that replica 0 sends with its next window, 0 for none
    requested   the last number that replica 0 sent: all replicas have it after the same update
    """

    replicas: int
    request: int
    requested: int

    def start(self, window: GradientWindow) -> None:
        """Give the gradients of this replica's window."""

    def ready(self) -> bool:
        """Whether `finish` would return at once."""

    def finish(self, window: GradientWindow) -> None:
        """Replace the window's gradients by the sum over all replicas."""


@dataclass(frozen=True)
class Share:
    """What one replica adds: sums by parameter, None where it has no gradient; and how they count in the mean."""

    sums: list[Tensor | None]
    gradients: int
    excess: float
    request: int = 0

    @classmethod
    def of(cls, window: GradientWindow, request: int) -> Share:
        found = window.gradients()
        return cls([found.get(name) for name in window.parameters], len(window.levels), window.excess(), request)


def add_in_order(terms: Iterable[Tensor]) -> Tensor:
    """((g0 + g1) + g2) + ..., in new memory."""
    first, *others = terms
    total = first.clone()
    for term in others:
        total += term
    return total


def replace_sums(window: GradientWindow, sums: list[Tensor | None], shares: Iterable[tuple[int, float]]) -> None:
    """Make the window that of all replicas; shares: (gradients, excess) of each, in order."""
    gradients, excess = 0, 0.0
    for count, more in shares:
        gradients, excess = gradients + count, excess + more
    named = {name: total for name, total in zip(window.parameters, sums, strict=True) if total is not None}
    window.combine(named, gradients=gradients, excess=excess)


class LocalReplicas:
    """The replicas of a stage in one process: the last one that gives its window adds them."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.given: dict[int, Share] = {}
        self.results: dict[int, tuple[list[Tensor | None], list[Share]]] = {}

    def give(self, replica: int, share: Share, parameters: list[Tensor]) -> None:
        self.given[replica] = share
        if len(self.given) < self.replicas:
            return
        shares = [self.given[r] for r in range(self.replicas)]
        self.given = {}
        columns = zip(*(share.sums for share in shares), strict=True)
        sums = [self._sum(terms, parameter) for terms, parameter in zip(columns, parameters, strict=True)]
        self.results = dict.fromkeys(range(self.replicas), (sums, shares))

    def _sum(self, terms: tuple[Tensor | None, ...], parameter: Tensor) -> Tensor | None:
        if all(term is None for term in terms):
            return None
        return add_in_order(torch.zeros_like(parameter) if term is None else term for term in terms)


class LocalWindowSum:
    """The sum over replicas of one process, see WindowSum."""

    def __init__(self, stage: LocalReplicas, replica: int) -> None:
        self.stage, self.replica, self.replicas = stage, replica, stage.replicas
        self.request = self.requested = 0

    def start(self, window: GradientWindow) -> None:
        share, self.request = Share.of(window, self.request), 0
        self.stage.give(self.replica, share, list(window.parameters.values()))

    def ready(self) -> bool:
        return self.replica in self.stage.results

    def finish(self, window: GradientWindow) -> None:
        sums, shares = self.stage.results.pop(self.replica)
        self.requested = shares[0].request or self.requested
        replace_sums(window, sums, [(share.gradients, share.excess) for share in shares])
