"""Every method by name: one file a paper, listed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.errors import unknown
from offbeat.method import Method
from offbeat.methods.adl import ADL
from offbeat.methods.bp import BP

METHODS: dict[str, Callable[..., Method]] = {"bp": BP, "adl": ADL}


def named(name: str, **answers: Any) -> Method:
    """The method of that name; answers that are None keep the method's own default.

    >>> named("adl", M=2, weights=None).M
    2
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](**{answer: value for answer, value in answers.items() if value is not None})


__all__ = ["ADL", "BP", "METHODS", "named"]
