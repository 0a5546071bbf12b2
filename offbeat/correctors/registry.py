"""All correctors by name, and how they are given as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from itertools import chain, groupby
from typing import Any

from offbeat.correctors.auto import AutoCorrector
from offbeat.correctors.corrector import CHANGES, Corrector, StageContext
from offbeat.correctors.delay_compensation import DelayCompensation
from offbeat.correctors.discrepancy import Discrepancy
from offbeat.correctors.nesterov import NesterovMomentum
from offbeat.correctors.rescheduling import Rescheduling
from offbeat.correctors.shrink import Shrink
from offbeat.correctors.speculation import Speculation
from offbeat.correctors.spike_compensation import SpikeCompensation
from offbeat.correctors.step_lookahead import StepLookahead
from offbeat.correctors.weight_prediction import WeightPrediction
from offbeat.errors import UserError, unknown

CORRECTORS: dict[str, type[Corrector]] = {
    kind.name: kind
    for kind in (
        AutoCorrector,
        WeightPrediction,
        SpikeCompensation,
        DelayCompensation,
        Rescheduling,
        Discrepancy,
        StepLookahead,
        NesterovMomentum,
        Shrink,
        Speculation,
    )
}

NONE = "none"  # the text of no corrector

CorrectorLike = str | Corrector | Sequence[Corrector] | None


def correctors(given: CorrectorLike) -> tuple[Corrector, ...]:
    """Correctors from objects or from text such as "lwp+sc" or "dc:0.1", in the order in which they are applied.

    Settings follow a colon each: the first one by its value alone, or any by name.

    >>> correctors("sc:extra=1+t1:500")
    (Rescheduling(updates=500, power=None, above=0.0), SpikeCompensation(delay=None, extra=1.0))
    >>> correctors("lwp:fraction=0.5:form=weight")
    (WeightPrediction(horizon=None, form='weight', fraction=0.5),)
    >>> correctors("none")
    ()
    """
    if given is None:
        return ()
    if isinstance(given, str):
        parts = [] if given.strip() in ("", NONE) else given.split("+")
        found = [_parse(part.strip(), given) for part in parts]
    else:
        found = list(given) if isinstance(given, Iterable) else [given]
    for corrector in found:
        if not isinstance(corrector, Corrector):
            raise UserError(f"corrector {corrector!r}: use an object such as offbeat.SpikeCompensation(), or a name")
        corrector.check()
    for change in CHANGES:
        same = [corrector.name for corrector in found if change in corrector.changes]
        if len(same) > 1:
            raise UserError(f"correctors {' and '.join(same)} both set the {change}: use one of them")
    return tuple(sorted(found, key=lambda corrector: CHANGES.index(corrector.changes[0])))


def resolved(given: Iterable[Corrector], context: StageContext) -> tuple[Corrector, ...]:
    """The correctors of a stage whose optimizer is known, with those that `auto` chooses in its place."""
    chosen = (
        (corrector.chosen(context) if isinstance(corrector, AutoCorrector) else (corrector,)) for corrector in given
    )
    return correctors(tuple(chain.from_iterable(chosen)))


def as_text(given: Iterable[Corrector]) -> str:
    """Correctors as text that `correctors` reads, without settings at their defaults.

    >>> as_text(correctors("sc:extra=1+t1:power=1")), as_text(())
    ('t1:power=1+sc:extra=1', 'none')
    """
    return "+".join(_text(corrector) for corrector in given) or NONE


def by_stage(texts: Iterable[str]) -> str:
    """The correctors of all stages, given as text, in one line.

    >>> by_stage(["lookahead+sc", "lookahead+sc", "none"])
    'stages 1-2 lookahead+sc, stage 3 none'
    """
    parts, first = [], 1
    for text, same in groupby(texts):
        last = first + len(list(same)) - 1
        parts.append(f"stage {first} {text}" if first == last else f"stages {first}-{last} {text}")
        first = last + 1
    return ", ".join(parts)


def _text(corrector: Corrector) -> str:
    values = {name: (getattr(corrector, field.name), field) for name, field in settings_of(type(corrector)).items()}
    settings = (f":{name}={_written(value)}" for name, (value, field) in values.items() if value != field.default)
    return corrector.name + "".join(settings)


def _written(value: Any) -> str:
    """The value of a setting as text that `_read` reads, without loss."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("+", "")  # which would begin another corrector


def _parse(text: str, whole: str) -> Corrector:
    name, *parts = (part.strip() for part in text.split(":"))
    if not name:
        raise UserError(f"corrector {whole!r}: a name is missing, write it as in lwp+sc")
    if name not in CORRECTORS:
        raise unknown("corrector", name, CORRECTORS)
    kind = CORRECTORS[name]
    settings = settings_of(kind)
    if parts and not settings:
        raise UserError(f"corrector {text!r}: {name} takes no number")
    given: dict[str, Any] = {}
    for position, part in enumerate(parts):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if position:
                raise UserError(f"corrector {text!r}: give only the first number without a name, as in sc:2:extra=1")
            setting, value = next(iter(settings)), part
        if setting not in settings:
            raise unknown(f"setting of corrector {name}", setting, settings)
        if setting in given:
            raise UserError(f"corrector {text!r}: give each setting once")
        given[settings[setting].name] = _read(settings[setting], value, text)
    return kind(**given)


def settings_of(kind: type[Corrector]) -> dict[str, Field[Any]]:
    """The settings of a corrector by their names in text.

    >>> list(settings_of(WeightPrediction)), list(settings_of(DelayCompensation))
    (['horizon', 'form', 'fraction'], ['lambda', 'adaptive'])
    """
    return {field.name.rstrip("_"): field for field in fields(kind)}


def _read(field: Field[Any], value: str, text: str) -> Any:
    """The value of a setting from its text."""
    kind = str(field.type)
    if kind.startswith("Literal"):
        return value
    if kind == "bool":
        if value.lower() not in ("yes", "no"):
            raise UserError(f"corrector {text!r}: use yes or no for {field.name}")
        return value.lower() == "yes"
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        allowed, name = "a whole number" if kind == "int" else "a number", field.name.rstrip("_")
        raise UserError(f"corrector {text!r}: give {allowed} as the {name} of {text.split(':')[0]}") from None
