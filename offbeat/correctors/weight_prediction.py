"""LWP: linear weight prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offbeat.correctors.corrector import Corrector, StageContext, Tensors, nonnegative
from offbeat.correctors.optimizer import extrapolate, updated_parameters
from offbeat.errors import number, unknown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightPrediction(Corrector):
    """LWP: forwards use the weights predicted for the update that applies the gradient.

    Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021). The horizon T is the delay unless it is given.

    form "velocity"   theta - T lr v, with v the momentum buffer of SGD
    form "weight"     theta^s + T (theta^s - theta^(s-1))

    The two differ when another corrector changes the step.
    """

    name: ClassVar[str] = "lwp"
    changes: ClassVar[tuple[str, ...]] = ("forward weights",)
    horizon: float | None = None
    form: Literal["velocity", "weight"] = "velocity"

    def __post_init__(self) -> None:
        if self.horizon is not None:
            number(self.horizon, "horizon of the weight prediction", "use a number of updates from 0 up", nonnegative)
        if self.form not in ("velocity", "weight"):
            raise unknown("form", str(self.form), ("velocity", "weight"))

    @property
    def reads_momentum(self) -> bool:  # type: ignore[override]
        return self.form == "velocity"

    def _T(self, context: StageContext) -> float:  # noqa: N802
        return context.delay if self.horizon is None else self.horizon

    def active(self, context: StageContext) -> bool:
        return self._T(context) != 0

    def forward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        if self.form == "velocity":
            return extrapolate(parameters, context, self._T(context))
        ahead = []
        for parameter in parameters:
            step = context.memory[parameter].get("last_step")
            theta = parameter.detach()
            ahead.append(theta.clone() if step is None else theta + self._T(context) * step)
        return ahead

    def before_step(self, context: StageContext, s: int) -> Any:
        if self.form == "weight":
            return [(parameter, parameter.detach().clone()) for _, parameter in updated_parameters(context)]
        return ()

    def after_step(self, context: StageContext, kept: Any) -> None:
        for parameter, before in kept:
            step, memory = parameter.detach() - before, context.memory[parameter]
            memory["last_step"] = memory["last_step"].copy_(step) if "last_step" in memory else step
