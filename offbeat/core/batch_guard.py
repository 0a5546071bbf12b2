"""Batches that give no gradient: those that the caller leaves out, and those whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from offbeat.core.descriptions import batch_name
from offbeat.core.window import GradientWindow
from offbeat.errors import NotFinite

OnNan = Literal["stop", "skip"]


class BatchGuard:
    """Decides which batches and updates of a stage are used.

    on_nan      what a loss or gradient that is not finite does: "stop" raises NotFinite, "skip" leaves it out
    left_out    indices of batches whose gradients are not used
    not_finite  batches in flight whose loss is not finite
    skipped     batches left out so far
    """

    def __init__(
        self, k: int, K: int, m: int, *, on_nan: OnNan, left_out: Iterable[int], replica: int | None = None
    ) -> None:
        """replica: of several, which has batches of its own."""
        self.k, self.K, self.m, self.on_nan = k, K, m, on_nan
        self.whose = "" if replica is None else f" of replica {replica}"
        self.left_out = frozenset(left_out)
        self.not_finite: set[int] = set()
        self.skipped = 0

    def leaves_out(self, t: int) -> bool:
        """Whether batch t gives no gradient and does not enter BatchNorm's statistics."""
        return t // self.m in self.left_out

    def excludes(self, t: int) -> bool:
        """Whether batch t gives no gradient."""
        return t in self.not_finite or self.leaves_out(t)

    def skip(self, t: int) -> None:
        """Count batch t, which is excluded."""
        self.not_finite.discard(t)
        self.skipped += 1

    def accepts_loss(self, t: int, value: float, *, updates: int) -> bool:
        """Whether the loss of batch t is finite; where it is not, raise, or exclude the batch."""
        if math.isfinite(value) or self.leaves_out(t):
            return math.isfinite(value)
        if self.on_nan == "stop":
            raise self.loss_error(t, str(value), f", after {updates} updates")
        self.not_finite.add(t)
        return False

    def loss_error(self, t: int, value: str, when: str = "") -> NotFinite:
        return NotFinite(
            f"the loss of {batch_name(t, self.m)}{self.whose} is {value} (seen at stage {self.k} of {self.K}{when}): "
            "lower the learning rate, or look at this batch",
            [t // self.m],
        )

    def accepts_gradients(self, window: GradientWindow, update: int) -> bool:
        """Whether the window's gradients are finite; where they are not, raise, or count its batches as skipped."""
        if window.finite():
            return True
        if self.on_nan == "stop":
            raise self.gradient_error(update, window.batches)
        self.skipped += len({t // self.m for t in window.batches})
        return False

    def gradient_error(self, update: int, window: Iterable[int]) -> NotFinite:
        batches = sorted({t // self.m for t in window})
        return NotFinite(
            f"the gradient of stage {self.k} of {self.K} is not finite in update {update} (batches "
            f"{batches[0]} to {batches[-1]}): lower the learning rate, clip its norm, or look at these batches",
            batches,
        )
