"""T2 of PipeMare: discrepancy correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, Tensors
from offbeat.correctors.optimizer import changes_since, kept_tensors, moved_along, values_before_step
from offbeat.correctors.optimizer_rules import scaled
from offbeat.errors import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Discrepancy(Corrector):
    """T2 of PipeMare: backwards use an estimate of the weights that the forward used.

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021). With tau the delay,
    delta <- gamma delta + (1 - gamma)(theta^(s+1) - theta^s), gamma = C^(1/tau), and backwards use theta - tau delta.

    >>> import offbeat
    >>> offbeat.ADL(weights="hybrid", corrector="t2:C=0.2").correctors
    (Discrepancy(C=0.2),)
    """

    name: ClassVar[str] = "t2"
    changes: ClassVar[tuple[str, ...]] = ("backward weights",)
    supported_weights: ClassVar[tuple[str, ...]] = ("hybrid",)
    C: float = 0.135

    def __post_init__(self) -> None:
        number(self.C, "C of the discrepancy correction", "use a number between 0 and 1", lambda C: 0 < C < 1)

    def active(self, context: StageContext) -> bool:
        return context.delay > 0

    def backward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        return moved_along(parameters, context, "drift", -context.delay)

    def before_step(self, context: StageContext) -> Any:
        return values_before_step(context)

    def after_step(self, context: StageContext, kept: Any) -> None:
        import torch

        gamma = self.C ** (1 / context.delay)
        parameters, steps = changes_since(kept)
        if parameters:
            drifts = kept_tensors(context, parameters, "drift")
            torch._foreach_mul_(drifts, gamma)
            torch._foreach_add_(drifts, scaled(steps, 1 - gamma))
