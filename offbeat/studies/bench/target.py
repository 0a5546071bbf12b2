"""When a training run has reached a validation loss or error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Outcome = Literal["reached", "not reached", "diverged", "failed", "no time"]


@dataclass(frozen=True)
class Measurement:
    """A validation after some samples. `seconds` of training, without those of validations."""

    samples: int
    seconds: float
    loss: float
    error: float | None = None


@dataclass(frozen=True)
class Target:
    """A validation loss, or an error in percent."""

    metric: Literal["loss", "error"]
    value: float

    def of(self, measured: Measurement) -> float:
        found = measured.loss if self.metric == "loss" else measured.error
        return math.nan if found is None else found


def reached(target: Target, curve: Sequence[Measurement]) -> tuple[float, float] | None:
    """Samples and seconds until the target, or None.

    The first validation at or below the target counts. Between it and the one before it the curve is taken as a
    straight line, so that the result does not depend on where the validations are.

    >>> line = [Measurement(samples, samples / 100, 4 - samples / 1000) for samples in (0, 1000, 2000, 3000)]
    >>> reached(Target("loss", 1.5), line), reached(Target("loss", 0.5), line)
    ((2500.0, 25.0), None)
    """
    for before, after in pairwise(curve):
        high, low = target.of(before), target.of(after)
        if low <= target.value:
            share = (high - target.value) / (high - low) if high > target.value else 1.0
            return (
                before.samples + share * (after.samples - before.samples),
                before.seconds + share * (after.seconds - before.seconds),
            )
    return None


def best(target: Target, curve: Iterable[Measurement]) -> float | None:
    """The lowest loss or error of a run; None where none was finite."""
    return min((value for value in map(target.of, curve) if math.isfinite(value)), default=None)
