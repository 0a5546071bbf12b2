"""The correctors of one stage: those that have an effect there, and when they are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.correctors import AutoCorrector, Corrector, StageContext, as_text, resolved
from offbeat.correctors.optimizer import scaled_rates
from offbeat.correctors.optimizer_rules import Need, rule_of, why_not
from offbeat.errors import UserError
from offbeat.method import Method


class Corrections:
    """The method's correctors at stage k, without those that change nothing there."""

    def __init__(self, method: Method, k: int, K: int, optimizer: torch.optim.Optimizer | None) -> None:
        self.place = _context(method, k, K, optimizer)
        self.active: list[Corrector] = []
        self.prepared: set[Need] = set()  # what the optimizer keeps for correctors
        if optimizer is None:
            return
        rule, given = self.place.rule, resolved(method.correctors, self.place)
        self.active = [corrector for corrector in given if corrector.active(self.place)]
        for corrector in given:
            reason = why_not(corrector.needs, optimizer, rule)
            if reason:
                raise UserError(f"corrector {corrector.name} with {reason}")
        self.prepared = {need for corrector in self.active for need in corrector.needs}
        if rule is not None:
            rule.prepare(self.prepared)

    def prepare_for(self, later: Corrections) -> None:
        """Let the optimizer keep what it must have when these follow."""
        self.prepared |= later.prepared
        if self.place.rule is not None:
            self.place.rule.prepare(self.prepared)

    def _answering(self, question: str) -> list[Corrector]:
        return [corrector for corrector in self.active if question in corrector.changes]

    def forward_weights(self, parameters: dict[str, Tensor]) -> Callable[[], list[Tensor]] | None:
        """What forwards use instead of the parameters, if anything."""
        for corrector in self._answering("forward weights"):
            return partial(self._predicted, corrector.forward_weights, parameters)
        return None

    def backward_weights(self, parameters: dict[str, Tensor]) -> Callable[[], list[Tensor]] | None:
        """What backwards use instead of the parameters, if anything."""
        for corrector in self._answering("backward weights"):
            return partial(self._predicted, corrector.backward_weights, parameters)
        return None

    def _predicted(
        self, predict: Callable[[list[Tensor], StageContext], list[Tensor]], parameters: dict[str, Tensor]
    ) -> list[Tensor]:
        with self._at_its_rates():
            return predict(list(parameters.values()), self.place)

    def _at_its_rates(self) -> AbstractContextManager[None]:
        """The optimizer with the learning rates of the stage's next update."""
        for corrector in self._answering("rate"):
            return scaled_rates(self.place, corrector.rate(self.place))
        return nullcontext()

    def incoming(self, gradient: Tensor) -> Tensor:
        """The gradient from above."""
        for corrector in self._answering("incoming gradient"):
            gradient = corrector.incoming(gradient)
        return gradient

    def gradients(
        self, gradients: list[Tensor | None], parameters: list[Tensor], forwarded: list[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of one batch, whose forward ran on `forwarded`."""
        for corrector in self._answering("gradient"):
            known = [(g, p, old) for g, p, old in zip(gradients, parameters, forwarded, strict=True) if g is not None]
            if known:
                given, theirs, before = (list(tensors) for tensors in zip(*known, strict=True))
                corrected = iter(corrector.gradients(given, theirs, before, self.place))
                gradients = [None if gradient is None else next(corrected) for gradient in gradients]
        return gradients

    def step(self) -> None:
        """The optimizer's step, between the correctors' before_step and, in reverse order, after_step."""
        if self.place.rule is not None:
            self.place.rule.before_step()
        with self._at_its_rates():
            kept = [(corrector, corrector.before_step(self.place)) for corrector in self.active]
            self.place.optimizer.step()
            for corrector, returned in reversed(kept):
                corrector.after_step(self.place, returned)

    def kept(self) -> Any:
        """The tensors that correctors keep."""
        return [dict(memory) for memory in self.place.memory.values()]


def correctors_as_text(method: Method, k: int, K: int, optimizer: torch.optim.Optimizer | None) -> str:
    """The correctors that are active in stage k, and what `auto` left out because of the optimizer."""
    place = _context(method, k, K, optimizer)
    if optimizer is None:
        return as_text(())
    text = as_text(corrector for corrector in resolved(method.correctors, place) if corrector.active(place))
    for auto in (corrector for corrector in method.correctors if isinstance(corrector, AutoCorrector)):
        missing = auto.missing(place)
        text += f" (without sc, which does not work with {missing})" if place.delay and missing else ""
    return text


def _context(method: Method, k: int, K: int, optimizer: torch.optim.Optimizer | None) -> StageContext:
    place = method.stage_context(k, K)
    place.optimizer, place.rule = optimizer, None if optimizer is None else rule_of(optimizer)
    return place
