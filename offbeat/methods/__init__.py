"""Every method by name: one file a paper, listed here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from offbeat.errors import unknown
from offbeat.method import Method
from offbeat.methods.adl import ADL
from offbeat.methods.bp import BP
from offbeat.methods.ddg import DDG
from offbeat.methods.dsp import DSP
from offbeat.methods.fr import FR
from offbeat.methods.gpipe import GPipe

METHODS: dict[str, Callable[..., Method]] = {"bp": BP, "adl": ADL}  # those that can be trained with

# Those whose programs and costs are known to the clock, with the settings of their papers.
DECLARED: dict[str, Callable[..., Method]] = {
    "bp": BP,
    "ddg": DDG,
    "ddg-dataflow": partial(DDG, barrier=False),
    "fr": FR,
    "dsp": DSP,
    "gpipe": GPipe,
    "adl": ADL,
}


def named(name: str, **answers: Any) -> Method:
    """The method of that name; answers that are None keep the method's own default.

    >>> named("adl", M=2, weights=None).M
    2
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](**{answer: value for answer, value in answers.items() if value is not None})


__all__ = ["ADL", "BP", "DDG", "DECLARED", "DSP", "FR", "METHODS", "GPipe", "named"]
