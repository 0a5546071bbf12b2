"""LWP: linear weight prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offbeat.correctors.corrector import Corrector, StageContext, Tensors
from offbeat.correctors.optimizer import changes_since, extrapolate, kept_tensors, moved_along, values_before_step
from offbeat.errors import nonnegative, number, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.correctors.optimizer_rules import Need


@dataclass(frozen=True)
class WeightPrediction(Corrector):
    """LWP: forwards use the weights predicted for the update that applies the gradient.

    Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021). The horizon T is fraction * delay unless it is
    given.

        form "velocity"   theta - T lr v, with v the direction of the optimizer: SGD's momentum buffer,
                          m_hat / (sqrt(v_hat) + eps) of Adam (the forward of PipeOptim)
        form "weight"     theta^s + T (theta^s - theta^(s-1))

    lr is the rate of the stage's next update, with `t1` the smaller one. The two differ where rates change from update
    to update or another corrector changes the step, and by decoupled weight decay. After a synchronous start
    (staleness_warmup), "velocity" predicts from the last step of the start, "weight" only after one more.

    >>> import offbeat
    >>> offbeat.ADL(corrector=offbeat.WeightPrediction(form="weight")) == offbeat.ADL(corrector="lwp:form=weight")
    True
    """

    name: ClassVar[str] = "lwp"
    changes: ClassVar[tuple[str, ...]] = ("forward weights",)
    horizon: float | None = None
    form: Literal["velocity", "weight"] = "velocity"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.horizon is not None:
            number(
                self.horizon,
                "horizon of the weight prediction",
                "use a finite number of updates from 0 up",
                nonnegative,
            )
        number(
            self.fraction, "fraction of the weight prediction", "use a finite part of the delay from 0 up", nonnegative
        )
        if self.form not in ("velocity", "weight"):
            raise unknown("form", str(self.form), ("velocity", "weight"))

    @property
    def needs(self) -> tuple[Need, ...]:  # type: ignore[override]
        return ("direction",) if self.form == "velocity" else ()

    def _T(self, context: StageContext) -> float:  # noqa: N802
        return self.fraction * context.delay if self.horizon is None else self.horizon

    def active(self, context: StageContext) -> bool:
        return self._T(context) != 0

    def forward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        if self.form == "velocity":
            return extrapolate(parameters, context, self._T(context))
        return moved_along(parameters, context, "last_step", self._T(context))

    def before_step(self, context: StageContext) -> Any:
        return values_before_step(context) if self.form == "weight" else None

    def after_step(self, context: StageContext, kept: Any) -> None:
        import torch

        if kept is None:
            return
        parameters, steps = changes_since(kept)
        if parameters:
            torch._foreach_copy_(kept_tensors(context, parameters, "last_step"), steps)
