"""Look-ahead by steps, also called error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.correctors.optimizer import changes_since, kept_tensors, values_before_step
from offbeat.correctors.optimizer_rules import scaled
from offbeat.errors import nonnegative, number


@dataclass(frozen=True)
class StepLookahead(Corrector):
    """The parameters are kept ahead of the optimizer's trajectory by a multiple of its last step (error feedback).

    With s_t the change that update t makes to theta, by the optimizer and all other correctors of the step together:
    theta <- theta + k (s_t - s_(t-1)), s_0 = 0. So theta = w + k s_t, where w <- w + s_t. Unless it is given,
    k = max(fraction * delay, min(delay, least)) in updates. Works with every optimizer and keeps one tensor per
    parameter; `lwp`, which predicts the weights of forwards alone, needs a second copy of the weights.

    >>> import offbeat
    >>> offbeat.ADL(M=4, corrector="lookahead:fraction=0.25").correctors
    (StepLookahead(fraction=0.25, k=None, least=0.0),)
    """

    name: ClassVar[str] = "lookahead"
    changes: ClassVar[tuple[str, ...]] = ("weights after a step",)
    fraction: float = 0.5
    k: float | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        number(self.fraction, "fraction of the look-ahead", "use a finite part of the delay from 0 up", nonnegative)
        number(self.least, "least of the look-ahead", "use a finite number of updates from 0 up", nonnegative)
        if self.k is not None:
            number(self.k, "k of the look-ahead", "use a finite number of updates from 0 up", nonnegative)

    def _k(self, context: StageContext) -> float:
        if self.k is not None:
            return self.k
        delay = context.delay
        return max(self.fraction * delay, min(delay, self.least))

    def active(self, context: StageContext) -> bool:
        return self._k(context) != 0

    def before_step(self, context: StageContext) -> Any:
        return values_before_step(context)

    def after_step(self, context: StageContext, kept: Any) -> None:
        import torch

        parameters, steps = changes_since(kept)
        if not parameters:
            return
        last = kept_tensors(context, parameters, "lookahead_step")
        with torch.no_grad():
            torch._foreach_add_(parameters, scaled(torch._foreach_sub(steps, last), self._k(context)))
        torch._foreach_copy_(last, steps)
