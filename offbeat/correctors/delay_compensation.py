"""DC: delay compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, nonnegative
from offbeat.errors import UserError, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DelayCompensation(Corrector):
    """DC: a first-order estimate of the gradient at the current weights, g + lambda g*g*(theta - theta_forward).

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017), eq. (10). It is
    applied to the gradient of each batch, before the mean over a window; g is the gradient of the mean loss of the
    batch. With `adaptive`, lambda is divided by sqrt(MS + 1e-7), MS <- 0.95 MS + 0.05 g*g; the paper then uses a lambda
    of about 2.
    """

    name: ClassVar[str] = "dc"
    changes: ClassVar[tuple[str, ...]] = ("gradient",)
    supported_weights: ClassVar[tuple[str, ...]] = ("stash",)
    lambda_: float = 0.04
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise UserError(f"adaptive={self.adaptive!r}: use True or False")
        number(self.lambda_, "lambda of the delay compensation", "use a number from 0 up", nonnegative)

    def active(self, context: StageContext) -> bool:
        return self.lambda_ != 0 and context.delay > 0

    def gradient(self, gradient: Tensor, parameter: Tensor, forwarded: Tensor, context: StageContext) -> Tensor:
        square = gradient * gradient
        factor: Any = self.lambda_
        if self.adaptive:
            memory = context.memory[parameter]
            if "mean_square" not in memory:
                memory["mean_square"] = square.new_zeros(square.shape)
            factor = self.lambda_ / memory["mean_square"].mul_(0.95).add_(square, alpha=0.05).add(1e-7).sqrt()
        return gradient + factor * square * (parameter.detach() - forwarded.detach())
