"""Auto: the correctors that are recommended for the optimizer and the delay of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.correctors.optimizer_rules import (
    AdamRule,
    NAdamRule,
    OptimizerRule,
    SelfCompensatingRule,
    SGDRule,
    why_not,
)
from offbeat.correctors.rescheduling import Rescheduling
from offbeat.correctors.spike_compensation import SpikeCompensation
from offbeat.correctors.step_lookahead import StepLookahead

# What is recommended, and all constants of it. A corrector that is not active at the delay of a stage is left out
# there: without a delay all of them, and the rate up to a delay of 3 updates, from where it is lr * 4 / (1 + delay).
COMPENSATION = SpikeCompensation()
LOOKAHEAD = StepLookahead(fraction=0.5, least=1.0)
RATE = Rescheduling(power=1.0, above=3.0)
ADAPTIVE = (LOOKAHEAD, RATE, COMPENSATION)
BY_RULE: dict[type[OptimizerRule], tuple[Corrector, ...]] = {
    SGDRule: (COMPENSATION,),
    AdamRule: ADAPTIVE,
    NAdamRule: (),  # its own step already looks ahead: on a GPT all of these made it worse
    SelfCompensatingRule: ADAPTIVE,  # Muon, RotatedAdam
}
WITHOUT_RULE: tuple[Corrector, ...] = (RATE,)  # look-ahead works with them, but was worse with RMSprop


@dataclass(frozen=True)
class AutoCorrector(Corrector):
    """The correctors that are recommended for the optimizer and the delay of each stage.

    SGD with momentum gets `sc`. Adam, AdamW, Muon and RotatedAdam (and others that implement SelfCompensating) get
    `lookahead:least=1` (over half the delay, up to one update over all of it) and `sc`; stages whose gradients are more
    than 3 updates late also `t1:power=1:above=3`, the learning rate lr * 4 / (1 + delay). NAdam gets none, since its
    own step already looks ahead. Other optimizers get `t1` alone. Stages without a delay get none, so that synchronous
    methods stay as they are. `print(pipe)` and the records of a run show what was chosen for each stage.

    >>> import offbeat
    >>> offbeat.ADL(M=4, corrector=offbeat.AutoCorrector()) == offbeat.ADL(M=4, corrector="auto")
    True
    """

    name: ClassVar[str] = "auto"
    changes: ClassVar[tuple[str, ...]] = ("weights after a step", "rate", "step")

    def active(self, context: StageContext) -> bool:
        return False  # it is replaced by what it chooses

    def chosen(self, context: StageContext) -> tuple[Corrector, ...]:
        """The correctors for a stage, whose optimizer and rule are known."""
        found = WITHOUT_RULE if self.missing(context) else recommended(type(context.rule))
        return tuple(corrector for corrector in found if corrector.active(context))

    def missing(self, context: StageContext) -> str | None:
        """Why the optimizer of the stage gets only correctors that need no rule, or None."""
        return why_not(COMPENSATION.needs, context.optimizer, context.rule)


def recommended(rule: type[OptimizerRule] | None) -> tuple[Corrector, ...]:
    """The correctors for optimizers with that rule, at any delay."""
    kinds = rule.__mro__ if rule else ()
    return next((BY_RULE[kind] for kind in kinds if kind in BY_RULE), WITHOUT_RULE)
