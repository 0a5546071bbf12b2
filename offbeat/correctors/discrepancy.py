"""T2 of PipeMare: discrepancy correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, Tensors
from offbeat.correctors.optimizer import updated_parameters
from offbeat.errors import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Discrepancy(Corrector):
    """T2 of PipeMare: backwards use an estimate of the weights that the forward used.

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021). With tau the delay,
    delta <- gamma delta + (1 - gamma)(theta^(s+1) - theta^s), gamma = C^(1/tau), and backwards use theta - tau delta.
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
        back = []
        for parameter in parameters:
            drift = context.memory[parameter].get("drift")
            theta = parameter.detach()
            back.append(theta.clone() if drift is None else theta - context.delay * drift)
        return back

    def before_step(self, context: StageContext, s: int) -> Any:
        return [(parameter, parameter.detach().clone()) for _, parameter in updated_parameters(context)]

    def after_step(self, context: StageContext, kept: Any) -> None:
        gamma = self.C ** (1 / context.delay)
        for parameter, before in kept:
            step = (parameter.detach() - before).mul_(1 - gamma)
            memory = context.memory[parameter]
            memory["drift"] = memory["drift"].mul_(gamma).add_(step) if "drift" in memory else step
