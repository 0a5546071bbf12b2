"""All correctors by name, and how they are given as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from offbeat.correctors.corrector import CHANGES, Corrector
from offbeat.correctors.delay_compensation import DelayCompensation
from offbeat.correctors.discrepancy import Discrepancy
from offbeat.correctors.look_ahead import LookAhead
from offbeat.correctors.rescheduling import Rescheduling
from offbeat.correctors.shrink import Shrink
from offbeat.correctors.speculation import Speculation
from offbeat.correctors.spike_compensation import SpikeCompensation
from offbeat.correctors.weight_prediction import WeightPrediction
from offbeat.errors import UserError, unknown

CORRECTORS: dict[str, type[Corrector]] = {
    kind.name: kind
    for kind in (
        WeightPrediction,
        SpikeCompensation,
        DelayCompensation,
        Rescheduling,
        Discrepancy,
        LookAhead,
        Shrink,
        Speculation,
    )
}

CorrectorLike = str | Corrector | Sequence[Corrector] | None


def correctors(given: CorrectorLike) -> tuple[Corrector, ...]:
    """Correctors from objects or from text such as "lwp+sc" or "dc:0.1", in the order in which they are applied.

    >>> correctors("sc+t1:500")
    (Rescheduling(updates=500), SpikeCompensation(delay=None))
    """
    if given is None:
        return ()
    if isinstance(given, str):
        found = [_parse(part.strip(), given) for part in given.split("+")] if given.strip() else []
    else:
        found = list(given) if isinstance(given, Iterable) else [given]
    for corrector in found:
        if not isinstance(corrector, Corrector):
            raise UserError(f"corrector {corrector!r}: use an object such as offbeat.SpikeCompensation(), or a name")
    for change in CHANGES:
        same = [corrector.name for corrector in found if change in corrector.changes]
        if len(same) > 1:
            raise UserError(f"correctors {' and '.join(same)} both set the {change}: use one of them")
    return tuple(sorted(found, key=lambda corrector: CHANGES.index(corrector.changes[0])))


def _parse(text: str, whole: str) -> Corrector:
    name, colon, value = text.partition(":")
    if not name:
        raise UserError(f"corrector {whole!r}: a name is missing, write it as in lwp+sc")
    if name not in CORRECTORS:
        raise unknown("corrector", name, CORRECTORS)
    kind = CORRECTORS[name]
    if not colon:
        return kind()
    if not fields(kind):
        raise UserError(f"corrector {text!r}: {name} takes no number")
    first = fields(kind)[0]
    number = int if first.type == "int" else float
    try:
        return kind(**{first.name: number(value)})
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        allowed = "a whole number" if number is int else "a number"
        raise UserError(f"corrector {text!r}: give {allowed} after the colon, the {first.name} of {name}") from None
