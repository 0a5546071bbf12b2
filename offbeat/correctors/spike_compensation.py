"""SC: spike compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.errors import nonnegative, number

if TYPE_CHECKING:
    from offbeat.correctors.optimizer_rules import Need


@dataclass(frozen=True)
class SpikeCompensation(Corrector):
    """SC: add what a gradient would already have contributed without its delay of D updates.

    Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021): v <- m v + g; theta <- theta - lr (a v + b g),
    with a = m^D and b = (1 - m^D)/(1 - m), so that the total weight of a gradient stays 1/(1-m). D = 0 is plain SGD,
    D = 1 is Nesterov's method. D is the delay unless it is given, plus `extra`: extra=1 adds Nesterov's method.

    For optimizers that average gradients, m <- b m + (1-b) g: d = a m + (1-a) g with a = b^D replaces m, and the total
    weight of a gradient stays 1. `optimizer_rules.py` has the step of each optimizer.

    >>> import offbeat
    >>> offbeat.ADL(M=4, corrector=offbeat.SpikeCompensation(extra=1.0)) == offbeat.ADL(M=4, corrector="sc:extra=1")
    True
    """

    name: ClassVar[str] = "sc"
    changes: ClassVar[tuple[str, ...]] = ("step",)
    needs: ClassVar[tuple[Need, ...]] = ("compensation",)
    delay: float | None = None
    extra: float = 0.0

    def __post_init__(self) -> None:
        if self.delay is not None:
            number(self.delay, "delay of the spike compensation", "use a finite number from 0 up", nonnegative)
        number(self.extra, "extra of the spike compensation", "use a finite number of updates from 0 up", nonnegative)

    def _D(self, context: StageContext) -> float:  # noqa: N802
        return (context.delay if self.delay is None else self.delay) + self.extra

    def active(self, context: StageContext) -> bool:
        return self._D(context) != 0

    def before_step(self, context: StageContext) -> Any:
        return context.rule.before_compensated_step(self._D(context))

    def after_step(self, context: StageContext, kept: Any) -> None:
        import torch

        with torch.no_grad():
            context.rule.after_compensated_step(self._D(context), kept)
