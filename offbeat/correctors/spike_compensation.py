"""SC: spike compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, nonnegative
from offbeat.correctors.optimizer import updated_parameters
from offbeat.errors import number


@dataclass(frozen=True)
class SpikeCompensation(Corrector):
    """SC: add what a gradient would already have contributed without its delay of D updates.

    Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021): v <- m v + g; theta <- theta - lr (a v + b g),
    with a = m^D and b = (1 - m^D)/(1 - m), so that the total weight of a gradient stays 1/(1-m). D = 0 is plain SGD,
    D = 1 is Nesterov's method. D is the delay unless it is given.
    """

    name: ClassVar[str] = "sc"
    changes: ClassVar[tuple[str, ...]] = ("step",)
    reads_momentum: ClassVar[bool] = True
    delay: float | None = None

    def __post_init__(self) -> None:
        if self.delay is not None:
            number(self.delay, "delay of the spike compensation", "use a number from 0 up", nonnegative)

    def _D(self, context: StageContext) -> float:  # noqa: N802
        return context.delay if self.delay is None else self.delay

    def active(self, context: StageContext) -> bool:
        return self._D(context) != 0

    def before_step(self, context: StageContext, s: int) -> Any:
        """The gradients as SGD uses them, with weight decay."""
        return [
            (group, parameter, parameter.grad.add(parameter.detach(), alpha=group["weight_decay"]))
            for group, parameter in updated_parameters(context)
            if parameter.grad is not None
        ]

    def after_step(self, context: StageContext, kept: Any) -> None:
        """The step of SGD was -lr v; add the difference to -lr (a v + b g)."""
        import torch

        D = self._D(context)
        with torch.no_grad():
            for group, parameter, g in kept:
                m, lr = group["momentum"], group["lr"]
                a, b = m**D, (1 - m**D) / (1 - m)
                v = context.optimizer.state[parameter]["momentum_buffer"]
                if isinstance(lr, torch.Tensor):  # a tensor on the device: no copy to the host
                    parameter.add_(v * (lr * (1 - a))).sub_(g * (lr * b))
                else:
                    parameter.add_(v, alpha=lr * (1 - a)).add_(g, alpha=-lr * b)
