"""method="auto": the lag, the number of micro-batches per update and the correctors that are recommended.

One stage: back-propagation. Otherwise ADL on the 1F1B lag with corrector "auto"; ADL's own lag if a message takes
longer than a stage computes, since only that lag hides it. An update of B samples is split into M micro-batches: with a
larger M gradients are less late, and with smaller micro-batches the device is used less well. M is the largest power of
two whose measured time per sample is at most EFFICIENT times the shortest one, and no larger than DELAY needs. If stage
1 is then more than LATE updates late, the first SYNCHRONOUS updates are those of back-propagation (staleness_warmup);
of a run whose length is known, at most one in ONE_IN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.correctors import Corrector, StageContext, as_text, by_stage, correctors
from offbeat.correctors.auto import recommended as correctors_for
from offbeat.correctors.optimizer_rules import RULES, SelfCompensatingRule
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.methods import AUTO, LATENCY, parsed, settings_of, with_settings

EFFICIENT = 1.15  # times the shortest time per sample
DELAY = 0.25  # updates: if the gradients of stage 1 are no later than this, a larger M is not needed
LATE = 0.5  # updates: if the gradients of stage 1 are later than this, training begins with synchronous updates
# A tenth of the updates of a GPT in 12 stages, 150 of 1,500, reduced its difference to back-propagation with Muon from
# 0.079 to 0.019 nats at a delay of 2.75 updates and from 0.255 to 0.112 at 11, and with AdamW from 0.029 to 0.009 at
# 0.69 (docs/staleness.md). A tenth of those of ResNet-18 on Imagenette in 8 stages, 300 of 2,960, left a difference of
# 0.33 points, and 150 one of 0.65 (reproduction-imagenette-40-epochs-starts.json). Longer starts were tried with a
# small GPT alone, 150 of 400 updates; 300 of 3,000 were not tried with a GPT.
SYNCHRONOUS = 300
ONE_IN = 10  # at most one of so many updates of a run is synchronous
NORMALIZED = 16  # samples: smallest micro-batch of a model with BatchNorm, whose statistics are those of a micro-batch

Seconds = Callable[[int], float]  # of forward and backward of the whole model, for a number of samples
Updates = Callable[[], int]  # of a whole run


@dataclass(frozen=True)
class MicroBatches:
    """An update of M micro-batches of `size` samples.

    seconds   per sample, forward and backward of the whole model
    delay     of the gradients of stage 1, in updates
    """

    M: int
    size: int
    seconds: float
    delay: float


@dataclass(frozen=True)
class Recommendation:
    """The recommended method, and the measurements that it follows from; none if there was nothing to choose.

    limited_start
                 whether a short run has fewer synchronous updates than `method`, since its length is not known here
    """

    method: Method
    measured: tuple[MicroBatches, ...] = ()
    limited_start: bool = False

    @property
    def M(self) -> int:  # noqa: N802
        return self.method.M

    def as_text(self) -> str:
        """The method in one line."""
        chosen = next((row for row in self.measured if row.M == self.M), None)
        late = f"stage 1 is {chosen.delay:g} update{'s' * (chosen.delay != 1)} late" if chosen else ""
        size = f" of {chosen.size} samples, {late}" if chosen else ""
        corrector = f", corrector {as_text(self.method.correctors)}" if self.method.correctors else ""
        warmup = "".join(
            f", after {updates} updates of {first.name}" for first, updates in self.method.staleness_warmup
        )
        share = f" (at most {100 // ONE_IN} % of a run)" if self.limited_start else ""
        return f"{self.method.name}, M={self.M}{size}{corrector}{warmup}{share}"


def correctors_by_optimizer(method: Method, K: int) -> dict[str, str]:
    """What corrector "auto" chooses for the stages of the method, by the optimizers that it distinguishes.

    >>> correctors_by_optimizer(with_settings("adl-1f1b", {"M": 4, "corrector": "auto"}), 4)["SGD with momentum"]
    'stages 1-3 sc, stage 4 none'
    """
    from offbeat import optim

    own = [name for name in optim.__all__ if hasattr(getattr(optim, name), "direction")]
    rules = {f"{name} {rule.condition}".strip(): rule for name, rule in RULES.items()}
    rules |= dict.fromkeys(own, SelfCompensatingRule)
    names: dict[tuple[Corrector, ...], list[str]] = {}
    for name, rule in rules.items():
        names.setdefault(correctors_for(rule), []).append(name)
    names.setdefault(correctors_for(None), []).append("others")
    stages = [method.stage_context(k, K) for k in range(1, K + 1)]

    def chosen(found: tuple[Corrector, ...], stage: StageContext) -> str:
        return as_text(correctors(tuple(one for one in found if one.active(stage))))

    return {", ".join(those): by_stage(chosen(found, stage) for stage in stages) for found, those in names.items()}


def parsed_auto(text: object, **besides: Any) -> dict[str, Any] | None:
    """The settings in the text of method auto and those given as arguments; None if it is another method.

    >>> parsed_auto("auto:weights=hybrid", M=4), parsed_auto("adl", M=4)
    ({'weights': 'hybrid', 'M': 4}, None)
    """
    if not isinstance(text, str) or text.partition(":")[0].strip() != AUTO:
        return None
    settings = parsed(text, **besides)[1]
    check_settings(settings)
    return settings


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that method auto does not have, and an M that no method has.

    >>> check_settings({"m": 4})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    offbeat.errors.UserError: auto takes no m (given: 4): leave it out; its settings are M, window, weights, ...
    """
    takes = settings_of(AUTO)
    for name, value in settings.items():
        if name not in takes:
            raise UserError(
                f"{AUTO} takes no {name} (given: {value!r}): leave it out; its settings are {', '.join(takes)}"
            )
    if "M" in settings:
        with_settings("bp", {"M": settings["M"]})  # refuses numbers below 1


def candidates(batch: int, lag: int, *, smallest: int = 1) -> list[int]:
    """The numbers of micro-batches, from 1 on, that are compared for an update of that many samples.

    >>> candidates(64, 3), candidates(24, 11), candidates(64, 3, smallest=16), candidates(64, 0)
    ([1, 2, 4, 8, 16], [1, 2, 4, 8], [1, 2, 4], [1])
    """
    found = [1]
    while lag / found[-1] > DELAY and batch % (2 * found[-1]) == 0 and batch // (2 * found[-1]) >= smallest:
        found.append(2 * found[-1])
    return found


def largest_efficient(seconds: Mapping[int, float]) -> int:
    """The largest M whose time for the same samples is close to the shortest, by the times of all that were tried.

    >>> largest_efficient({4: 0.105, 8: 0.1, 16: 0.11, 32: 0.2})
    16
    """
    shortest = min(seconds.values())
    return max(M for M, taken in seconds.items() if taken <= EFFICIENT * shortest)


def without_batch(argument: str, K: int) -> str:
    """The warning that samples per update are not given, by the name of their argument."""
    return (
        f'method="auto" without {argument}=: M=1, every batch is an update, and gradients of stage 1 are {K - 1} or '
        f"more updates late; give {argument}=, the samples per update, so that it can choose M"
    )


def needs_times(K: int, *, batch: int | None, settings: Mapping[str, Any]) -> bool:
    """Whether `recommend` measures."""
    several = batch is not None and "M" not in settings and len(candidates(batch, K - 1)) > 1
    return K > 1 and (several or settings.get("latency") is not None)


def measured_times(
    K: int, *, batch: int, settings: Mapping[str, Any], seconds: Seconds, smallest: int = 1
) -> list[tuple[int, float]]:
    """The sizes of batches that `recommend` measures with these arguments, with their seconds, for other processes."""
    found: dict[int, float] = {}

    def measure(size: int) -> float:
        found[size] = seconds(size)
        return found[size]

    recommend(K, batch=batch, settings=settings, seconds=measure, smallest=smallest)
    return list(found.items())


def recommend(
    K: int,
    *,
    batch: int | None,
    settings: Mapping[str, Any],
    seconds: Seconds,
    smallest: int = 1,
    updates: Updates | None = None,
) -> Recommendation:
    """The method for K stages and updates of `batch` samples (None: each batch is an update, M=1).

    settings   of method auto: M and staleness_warmup, if they are not to be chosen; latency of links in seconds; others
               are passed on
    seconds    measures; called only if there is something to choose
    smallest   micro-batch
    updates    of the run, if its length is known; called only if it begins with synchronous updates
    """
    given = dict(settings)
    latency = given.pop("latency", None)
    if latency is not None:
        LATENCY.check(latency)
        if latency < 0:
            raise UserError(f"latency={latency:g}: use a number of seconds from 0 up")
    if K == 1:
        given.pop("staleness_warmup", None)
        return Recommendation(with_settings("bp", {"M": 1, **given}))
    known: dict[int, float] = {}

    def tried(name: str) -> tuple[list[MicroBatches], MicroBatches]:
        """All numbers of micro-batches with that lag, and the one to choose."""
        lag = with_settings(name, {}).lag(1, K)
        numbers: Iterable[int] = candidates(batch, lag, smallest=smallest) if batch else [1]
        if "M" in given:
            numbers = [given["M"]]
        sizes = {M: (batch or M) // M for M in numbers}
        if len(sizes) > 1 or latency is not None:
            known.update({size: seconds(size) / size for size in sizes.values() if size not in known})
        rows = {M: MicroBatches(M, size, known.get(size, 0.0), lag / M) for M, size in sizes.items()}
        return list(rows.values()), rows[largest_efficient({M: row.seconds for M, row in rows.items()})]

    name, (found, chosen) = "adl-1f1b", tried("adl-1f1b")
    if latency is not None and latency > chosen.seconds * chosen.size / K:
        name, (found, chosen) = "adl", tried("adl")
    starts = chosen.delay > LATE and "staleness_warmup" not in given
    if starts:
        given["staleness_warmup"] = SYNCHRONOUS if updates is None else min(SYNCHRONOUS, updates() // ONE_IN)
    method = with_settings(name, {"M": chosen.M, "corrector": AUTO, **given})
    return Recommendation(method, tuple(found) if known else (), limited_start=starts and updates is None)
