"""The method of a pipeline: as given, or chosen for the model, the device and the samples per update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offbeat.core.metrics import batch_size
from offbeat.core.precision import PrecisionPolicy
from offbeat.engines import Engine
from offbeat.errors import LateGradients, UserError, attempted, result_of, warn_caller
from offbeat.method import Method, StalenessWarmup
from offbeat.methods import with_staleness_warmup
from offbeat.partitioning.batch_times import batch_seconds, smallest_batch
from offbeat.pipeline import checks
from offbeat.recommended import (
    NORMALIZED,
    Recommendation,
    measured_times,
    needs_times,
    parsed_auto,
    recommend,
    without_batch,
)


@dataclass(frozen=True)
class MethodChoice:
    """The method of a pipeline of K stages.

    method      the one that trains; until it is measured, one with M=1
    batch       samples per update, if they are given
    settings    of method "auto"; None for any other
    measures    whether times of a batch are still needed
    """

    method: Method
    K: int
    batch: int | None = None
    settings: Mapping[str, Any] | None = None
    measures: bool = False
    recommendation: Recommendation | None = None

    @classmethod
    def of(
        cls,
        method: Method | str,
        K: int,
        *,
        M: int | None,
        batch: int | None,
        latency: float | None,
        staleness_warmup: StalenessWarmup,
    ) -> MethodChoice:
        if batch is not None:
            checks.whole(batch, "batch", least=1)
        settings = parsed_auto(method, M=M, latency=latency, staleness_warmup=staleness_warmup)
        if settings is None:
            if latency is not None:
                raise UserError(f'latency={latency!r} without method="auto", which alone reads it: leave it out')
            found = with_staleness_warmup(checks.method_of(method, M), staleness_warmup)
            _check_divides(batch, found.M)
            return cls(found, K, batch)
        _check_divides(batch, settings.get("M", 1))
        if batch is None and "M" not in settings and K > 1:
            warn_caller(without_batch("batch", K), LateGradients)
        measures = needs_times(K, batch=batch, settings=settings)
        first = recommend(K, batch=batch, settings=settings, seconds=float)
        return cls(first.method, K, batch, settings, measures, None if measures else first)

    def with_M(self, M: int) -> MethodChoice:  # noqa: N802
        """The method "auto" with this M, as a checkpoint has it; the lag is measured, if `latency` is given."""
        settings = {**(self.settings or {}), "M": M}
        measures = needs_times(self.K, batch=self.batch, settings=settings)
        found = recommend(self.K, batch=self.batch, settings=settings, seconds=float)
        recommendation = None if measures else found
        return replace(self, method=found.method, settings=settings, measures=measures, recommendation=recommendation)

    def made(
        self, engine: Engine, model: nn.Module, sample: Any, *, device: torch.device, precision: PrecisionPolicy
    ) -> MethodChoice:
        """The method by times that the first process measures on rows of the sample; the same in all processes."""
        assert self.settings is not None
        settings, smallest = self.settings, smallest_batch(model, NORMALIZED)
        if self.batch is None:
            settings = {"M": 1, **settings}

        def measure() -> dict[str, Any]:
            batch = self.batch or batch_size(sample)
            if sample is None:
                raise UserError('method="auto" measures on a batch: give sample=, or train a batch before this')
            seconds = batch_seconds(model, sample, device=device, precision=precision)
            times = measured_times(self.K, batch=batch, settings=settings, seconds=seconds, smallest=smallest)
            return {"batch": batch, "times": times}

        measured = result_of(engine.share(attempted(measure) if engine.leads else None, 1))
        known = dict(measured["times"]).__getitem__
        found = recommend(self.K, batch=measured["batch"], settings=settings, seconds=known, smallest=smallest)
        return replace(self, method=found.method, measures=False, recommendation=found)


def _check_divides(batch: int | None, M: int) -> None:
    if batch is not None and batch % M:
        raise UserError(f"batch={batch} with M={M}: use a batch that is a multiple of M, which splits it")
