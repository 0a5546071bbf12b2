"""NAG: Nesterov look-ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.correctors.optimizer import set_learning_rates
from offbeat.errors import number


@dataclass(frozen=True)
class LookAhead(Corrector):
    """Nesterov's method with a momentum close to 1, so that the look-ahead covers the delay.

    Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (ICML 2025), for SGD:
    v <- gamma v + g; theta <- theta - lr (1-gamma)/(1-m) (g + gamma v). theta is stored at the look-ahead point. m is
    the momentum given to the optimizer; its effective learning rate lr/(1-m) stays the same.
    """

    name: ClassVar[str] = "nag"
    changes: ClassVar[tuple[str, ...]] = ("step",)
    reads_momentum: ClassVar[bool] = True
    gamma: float = 0.99

    def __post_init__(self) -> None:
        number(self.gamma, "gamma of the look-ahead", "use a number between 0 and 1", lambda gamma: 0 < gamma < 1)

    def before_step(self, context: StageContext, s: int) -> Any:
        own = [(group["momentum"], group["nesterov"]) for group in context.optimizer.param_groups]
        rates = [group["lr"] for group in context.optimizer.param_groups]
        for group, (m, _) in zip(context.optimizer.param_groups, own, strict=True):
            group.update(lr=group["lr"] * (1 - self.gamma) / (1 - m), momentum=self.gamma, nesterov=True)
        return rates, own

    def after_step(self, context: StageContext, kept: Any) -> None:
        rates, own = kept
        for group, (momentum, nesterov) in zip(context.optimizer.param_groups, own, strict=True):
            group.update(momentum=momentum, nesterov=nesterov)
        set_learning_rates(context, rates)
