"""T1 of PipeMare: learning rate rescheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.errors import UserError, nonnegative, number


@dataclass(frozen=True)
class Rescheduling(Corrector):
    """T1 of PipeMare: stages with a long delay start with a smaller learning rate.

    lr_k(s) = lr(s) / max(tau, 1)^p, p = 1 - min(l / updates, 1), with tau the delay and l the updates so far with late
    gradients: those of a synchronous start (staleness_warmup) do not count. With `power`, the rate of a stage is
    lr(s) * min(1, (1 + above) / (1 + tau))^power in all updates instead: it stays lr(s) up to a delay of `above`.

    >>> import offbeat
    >>> offbeat.ADL(corrector="t1:updates=500").correctors
    (Rescheduling(updates=500, power=None, above=0.0),)
    """

    name: ClassVar[str] = "t1"
    changes: ClassVar[tuple[str, ...]] = ("rate",)
    updates: int = 1000
    power: float | None = None
    above: float = 0.0

    def __post_init__(self) -> None:
        number(self.updates, "updates of rescheduling", "use a whole number from 1 up", lambda n: n >= 1, whole=True)
        if self.power is not None:
            number(self.power, "power of rescheduling", "use a finite number from 0 up", nonnegative)
        number(self.above, "above of rescheduling", "use a finite number of updates from 0 up", nonnegative)
        if self.above and self.power is None:
            raise UserError(f"above={self.above:g} of rescheduling without power: give both, as in t1:power=1:above=3")

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return self.power is not None  # else the factor changes from update to update

    def active(self, context: StageContext) -> bool:
        return context.delay > 1 if self.power is None else self.power > 0 and context.delay > self.above

    def rate(self, context: StageContext) -> float:
        if self.power is not None:
            return float(((1 + context.delay) / (1 + self.above)) ** -self.power)
        p = 1 - min(context.late_updates / self.updates, 1)
        return float(max(context.delay, 1) ** -p)
