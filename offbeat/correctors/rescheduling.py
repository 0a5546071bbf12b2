"""T1 of PipeMare: learning rate rescheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.correctors.optimizer import scale_learning_rates, set_learning_rates
from offbeat.errors import number


@dataclass(frozen=True)
class Rescheduling(Corrector):
    """T1 of PipeMare: stages with a long delay start with a smaller learning rate.

    lr_k(s) = lr(s) / max(tau, 1)^p, p = 1 - min(s / updates, 1), with tau the delay.
    """

    name: ClassVar[str] = "t1"
    changes: ClassVar[tuple[str, ...]] = ("rate",)
    recordable: ClassVar[bool] = False  # the factor changes with s
    updates: int = 1000

    def __post_init__(self) -> None:
        number(self.updates, "updates of rescheduling", "use a whole number from 1 up", lambda n: n >= 1, whole=True)

    def active(self, context: StageContext) -> bool:
        return context.delay > 1

    def before_step(self, context: StageContext, s: int) -> Any:
        p = 1 - min(s / self.updates, 1)
        return scale_learning_rates(context, max(context.delay, 1) ** -p)

    def after_step(self, context: StageContext, kept: Any) -> None:
        set_learning_rates(context, kept)
