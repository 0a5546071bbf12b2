"""Correctors: what a method can do about the delay of its gradients, one file per corrector.

Each corrector is a frozen dataclass that states what it changes (the weights of forwards or backwards, the gradient,
the learning rate or the step) and implements it. Delay is counted in updates: lag / M, or 1 where forwards use the
weights of the previous window. A corrector that would change nothing in a stage (horizon 0, lambda 0, beta 1, no delay)
is not applied there, so results stay identical bit for bit.

`corrector.py` has the interface, `optimizer_rules.py` what correctors need of each optimizer, `optimizer.py` what they
compute from it, `registry.py` the list of all. A new corrector is a new file and an entry in that list. `auto.py`
chooses correctors by optimizer and delay.

May import errors.
"""

from offbeat.correctors.auto import AutoCorrector
from offbeat.correctors.corrector import Corrector, StageContext, StageInfo
from offbeat.correctors.delay_compensation import DelayCompensation
from offbeat.correctors.discrepancy import Discrepancy
from offbeat.correctors.nesterov import NesterovMomentum
from offbeat.correctors.optimizer_rules import SelfCompensating
from offbeat.correctors.registry import CORRECTORS, CorrectorLike, as_text, by_stage, correctors, resolved
from offbeat.correctors.rescheduling import Rescheduling
from offbeat.correctors.shrink import Shrink
from offbeat.correctors.speculation import Speculation
from offbeat.correctors.spike_compensation import SpikeCompensation
from offbeat.correctors.step_lookahead import StepLookahead
from offbeat.correctors.weight_prediction import WeightPrediction

__all__ = [
    "CORRECTORS",
    "AutoCorrector",
    "Corrector",
    "CorrectorLike",
    "DelayCompensation",
    "Discrepancy",
    "NesterovMomentum",
    "Rescheduling",
    "SelfCompensating",
    "Shrink",
    "Speculation",
    "SpikeCompensation",
    "StageContext",
    "StageInfo",
    "StepLookahead",
    "WeightPrediction",
    "as_text",
    "by_stage",
    "correctors",
    "resolved",
]
