"""Clipping the gradient of an update by its norm: over the parameters of a stage, or of the whole model.

Over the model, the norm is that of the gradients of all stages:

    without lag   stages wait for each other anyway. They exchange the norms of their windows before an update, which is
                  exactly torch.nn.utils.clip_grad_norm_ of the unsplit model
    with lag      no stage waits. Every message of training carries the newest norms that its sender knows: up with the
                  activations, down with the gradients. A stage clips by the norm of its own window and those of the
                  other stages that have arrived: a window old, or older where the lag is longer than a window
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

ClipOver = Literal["stage", "model"]


class NormExchange(Protocol):
    """One stage's part in the exchange of norms before an update of a method without lag."""

    def start(self, norms: list[float]) -> None:
        """Give the norms of this stage's gradients."""

    def ready(self) -> bool:
        """Whether `finish` would return at once."""

    def finish(self) -> list[list[float]]:
        """The norms of all stages, in order."""


class LocalNorms:
    """The stages of one process: the last one that gives its norms completes the exchange."""

    def __init__(self, K: int) -> None:
        self.K = K
        self.given: dict[int, list[float]] = {}
        self.results: dict[int, list[list[float]]] = {}

    def give(self, k: int, norms: list[float]) -> None:
        self.given[k] = norms
        if len(self.given) == self.K:
            ordered = [self.given[stage] for stage in range(1, self.K + 1)]
            self.given, self.results = {}, dict.fromkeys(range(1, self.K + 1), ordered)


class LocalNormExchange:
    """See NormExchange."""

    def __init__(self, stages: LocalNorms, k: int) -> None:
        self.stages, self.k = stages, k

    def start(self, norms: list[float]) -> None:
        self.stages.give(self.k, norms)

    def ready(self) -> bool:
        return self.k in self.stages.results

    def finish(self) -> list[list[float]]:
        return self.stages.results.pop(self.k)


class Clipping:
    """Clips the gradients of a stage.

    norm        the largest norm; None: no clipping
    over        the parameters that the norm is of
    over_model  whether the norm is that of several stages: exchanged, or carried
    carried     whether norms travel with the messages of training
    known       by stage, over the model: its update, and norms whose norm is that of its gradient
    updates     clipped so far, which number the norms of this stage
    """

    def __init__(self, k: int, K: int, *, norm: float | None, over: ClipOver, synchronous: bool) -> None:
        self.k, self.norm, self.over = k, norm, over
        self.over_model = norm is not None and over == "model" and K > 1
        self.exchanged, self.carried = self.over_model and synchronous, self.over_model and not synchronous
        self.known: dict[int, tuple[int, list[float]]] = {}
        self.updates = 0

    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Clip the gradients of the parameters, which are those of the next update."""
        if self.norm is None:
            return
        parameters = list(parameters)
        if not (self.exchanged or self.carried):
            nn.utils.clip_grad_norm_(parameters, self.norm)
            return
        self.updates += 1
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return
        if self.carried:
            own = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
            self.known[self.k] = self.updates, [own]
        total = self.total(gradients[0].dtype).to(gradients[0].device)
        torch._foreach_mul_(gradients, torch.clamp(self.norm / (total + 1e-6), max=1.0))  # as torch computes it

    def total(self, dtype: torch.dtype) -> Tensor:
        """The norm over all stages, as far as it is known."""
        norms = [norm for k in sorted(self.known) for norm in self.known[k][1]]
        return torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype))

    def finite(self) -> bool:
        """Whether the norms that were exchanged are: otherwise no stage makes the update."""
        return not self.exchanged or bool(self.total(torch.float64).isfinite())

    def exchange(self, norms: list[list[float]]) -> None:
        """The norms of the gradients of all stages for the next update."""
        self.known = {k: (self.updates, each) for k, each in enumerate(norms, start=1)}

    # ---- with messages

    def table(self) -> list[Any]:
        """What is known, to be sent."""
        return [[k, updates, norms] for k, (updates, norms) in self.known.items()]

    def learn(self, table: Iterable[Any]) -> None:
        """What another stage knows; newer norms replace older ones."""
        for k, updates, norms in table:
            if k not in self.known or self.known[k][0] < updates:
                self.known[k] = updates, list(norms)

    def save(self) -> dict[str, Any]:
        return {"updates": self.updates, "known": self.table()}

    def load(self, saved: dict[str, Any]) -> None:
        self.updates, self.known = saved["updates"], {}
        self.learn(saved["known"])
