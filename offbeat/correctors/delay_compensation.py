"""DC: delay compensation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, Tensors
from offbeat.correctors.optimizer import kept_tensors
from offbeat.correctors.optimizer_rules import as_given, as_real
from offbeat.errors import UserError, nonnegative, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DelayCompensation(Corrector):
    """DC: a first-order estimate of the gradient at the current weights, g + lambda g*g*(theta - theta_forward).

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017), eq. (10). It is
    applied to the gradient of each batch, before the mean over a window; g is the gradient of the mean loss of the
    batch. With `adaptive`, lambda is divided by sqrt(MS + 1e-7), MS <- 0.95 MS + 0.05 g*g; the paper then uses a lambda
    of about 2.

    >>> import offbeat
    >>> offbeat.ADL(M=4, corrector=offbeat.DelayCompensation(lambda_=0.1)).correctors
    (DelayCompensation(lambda_=0.1, adaptive=False),)
    """

    name: ClassVar[str] = "dc"
    changes: ClassVar[tuple[str, ...]] = ("gradient",)
    supported_weights: ClassVar[tuple[str, ...]] = ("stash",)
    lambda_: float = 0.04
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise UserError(f"adaptive={self.adaptive!r}: use True or False")
        number(self.lambda_, "lambda of the delay compensation", "use a finite number from 0 up", nonnegative)

    def active(self, context: StageContext) -> bool:
        return self.lambda_ != 0 and context.delay > 0

    def gradients(
        self, gradients: Tensors, parameters: Tensors, forwarded: Tensors, context: StageContext
    ) -> Sequence[Tensor]:
        import torch

        own = as_real(gradients)
        squares = torch._foreach_mul(own, own)
        factors = squares
        if self.adaptive:
            means = as_real(kept_tensors(context, parameters, "mean_square"))
            torch._foreach_mul_(means, 0.95)
            torch._foreach_add_(means, squares, alpha=0.05)
            roots = torch._foreach_add(means, 1e-7)
            torch._foreach_sqrt_(roots)
            torch._foreach_reciprocal_(roots)
            torch._foreach_mul_(roots, self.lambda_)
            factors = torch._foreach_mul(roots, squares)
        else:
            torch._foreach_mul_(factors, self.lambda_)
        now, then = (as_real([tensor.detach() for tensor in tensors]) for tensors in (parameters, forwarded))
        torch._foreach_mul_(factors, torch._foreach_sub(now, then))
        return as_given(torch._foreach_add(own, factors), gradients)
