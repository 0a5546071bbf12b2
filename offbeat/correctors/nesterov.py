"""NAG: Nesterov's method with a momentum close to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.errors import number

if TYPE_CHECKING:
    from offbeat.correctors.optimizer_rules import Need


@dataclass(frozen=True)
class NesterovMomentum(Corrector):
    """Nesterov's method with a momentum close to 1, so that its look-ahead covers the delay.

    Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (ICML 2025), for SGD:
    v <- gamma v + g; theta <- theta - lr (1-gamma)/(1-m) (g + gamma v). theta is stored at the look-ahead point. m is
    the momentum given to the optimizer; its effective learning rate lr/(1-m) stays the same. NAdam gets beta1 = gamma,
    and Muon momentum = gamma with Nesterov's method; both average gradients, so that the rate stays. What Muon leaves
    to AdamW has Nesterov's method with the beta1 of AdamW.

    >>> import offbeat
    >>> offbeat.PipeDream(corrector=offbeat.NesterovMomentum(gamma=0.98)).correctors
    (NesterovMomentum(gamma=0.98),)
    """

    name: ClassVar[str] = "nag"
    changes: ClassVar[tuple[str, ...]] = ("step",)
    needs: ClassVar[tuple[Need, ...]] = ("nesterov",)
    gamma: float = 0.99

    def __post_init__(self) -> None:
        number(self.gamma, "gamma of Nesterov's method", "use a number between 0 and 1", lambda gamma: 0 < gamma < 1)

    def before_step(self, context: StageContext) -> Any:
        own = []
        for group in context.optimizer.param_groups:
            changed = context.rule.nesterov_options(group, self.gamma)
            own.append({name: group[name] for name in changed})
            group.update(changed)
        return own

    def after_step(self, context: StageContext, kept: Any) -> None:
        for group, own in zip(context.optimizer.param_groups, kept, strict=True):
            group.update(own)
