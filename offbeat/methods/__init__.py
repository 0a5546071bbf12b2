"""Every method by name: one file a paper, listed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from offbeat.errors import UserError, unknown
from offbeat.method import Method
from offbeat.methods.adl import ADL
from offbeat.methods.adl_1f1b import ADL1F1B
from offbeat.methods.asgd import ASGD
from offbeat.methods.bp import BP
from offbeat.methods.dc_asgd import DCASGD
from offbeat.methods.ddg import DDG
from offbeat.methods.dgl import DGL
from offbeat.methods.dgl_async import AsyncDGL
from offbeat.methods.dni import DNI
from offbeat.methods.dsp import DSP
from offbeat.methods.fdg import FDG
from offbeat.methods.fr import FR
from offbeat.methods.gpipe import GPipe
from offbeat.methods.mostafa import Mostafa
from offbeat.methods.nag_async import NAGAsync
from offbeat.methods.pb import PB
from offbeat.methods.pipedream import PipeDream
from offbeat.methods.pipemare import PipeMare
from offbeat.methods.predsim import Pred, PredSim, Sim
from offbeat.methods.spectrain import SpecTrain
from offbeat.methods.two_bw import TwoBW

METHODS: dict[str, Callable[..., Method]] = {
    "bp": BP,
    "gpipe": GPipe,
    "ddg": DDG,
    "fr": FR,
    "fdg": FDG,
    "dsp": DSP,
    "adl": ADL,
    "dgl": DGL,
    "dgl-async": AsyncDGL,
    "dni": DNI,
    "mostafa": Mostafa,
    "pred": Pred,
    "sim": Sim,
    "predsim": PredSim,
    "asgd": ASGD,
    "dc-asgd": DCASGD,
    "pipedream": PipeDream,
    "2bw": TwoBW,
    "adl-1f1b": ADL1F1B,
    "pipemare": PipeMare,
    "spectrain": SpecTrain,
    "pb": PB,
    "nag-async": NAGAsync,
}


# Those whose time the clock foretells, also without the barriers that data flow does not need.
DECLARED: dict[str, Callable[..., Method]] = {
    **{name: make for name, make in METHODS.items() if make().workers == 1},  # others keep the model whole
    "ddg-dataflow": lambda: replace(DDG(barrier=False), name="ddg-dataflow"),
    "fr-dataflow": lambda: replace(FR(barrier=False), name="fr-dataflow"),
}


def named(name: str, **answers: Any) -> Method:
    """The method of that name; answers that are None keep the method's own default.

    An answer that the method does not take is refused, unless it is what the method does anyway. `corrector` goes to
    any method whose gradients are late.

    >>> named("adl", M=2, weights=None).M, named("dsp", weights="replay").weights
    (2, 'replay')
    """
    if name not in METHODS:
        raise unknown("method", str(name), METHODS)
    make = METHODS[name]
    given = {answer: value for answer, value in answers.items() if value is not None}
    takes = inspect.signature(make).parameters
    corrector = None if "corrector" in takes else given.pop("corrector", None)
    method = make(**{answer: value for answer, value in given.items() if answer in takes})
    for answer, value in given.items():
        if answer not in takes and getattr(method, answer, None) != value:
            allowed = f"it takes {', '.join(takes)}" if takes else "it has no settings"
            raise UserError(f"{name} takes no {answer} (given: {value}): leave it out; {allowed}")
    return method.corrected(corrector) if corrector else method


__all__ = [
    "ADL", "ADL1F1B", "ASGD", "BP", "DCASGD", "DDG", "DECLARED", "DGL", "DNI", "DSP", "FDG", "FR", "METHODS", "PB",
    "AsyncDGL", "GPipe", "Mostafa", "NAGAsync", "PipeDream", "PipeMare", "Pred", "PredSim", "Sim", "SpecTrain", "TwoBW",
    "named",
]  # fmt: skip
