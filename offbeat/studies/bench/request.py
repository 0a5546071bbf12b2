"""The options of `offbeat bench`, checked before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat import models
from offbeat.errors import UserError, unknown
from offbeat.runs.recipe import split_update
from offbeat.studies.bench.cuts import check, placed
from offbeat.studies.bench.rows import OURS, ROWS, BenchRow, BenchSetting, batches_per_update, settings_by_method, sizes
from offbeat.studies.runner import StudyRunner

PLANNING = 1 / 3  # of the time limit, at most, for cuts


@dataclass(frozen=True)
class BenchRequest:
    """The options of `offbeat bench`."""

    model: str = "resnet110"
    batch_size: int | None = None  # None: 128
    K: int = 4
    M: int | None = None  # of all methods that have one; None: 4
    batch_per_update: int | None = None  # instead of batch_size: rows with M > 1 split them into M batches
    methods: tuple[str, ...] = ()  # of this package, with settings, as text
    against: str = "all"
    shape: tuple[int, ...] | None = None
    device: str = "cpu"
    precision: str = "fp32"
    partition: str = "measured"
    cuts: tuple[int, ...] | None = None
    units: str | None = None
    profile: Path | None = None
    micro_batches: tuple[int, ...] | None = None
    repetitions: int = 3
    batches: int = 8
    minutes: float | None = None
    out: Path | None = None

    def setting(self) -> BenchSetting:
        """What all rows share, checked; the cuts are decided later."""
        names = ("K", "M", "batch_size", "batch_per_update", "repetitions", "batches", "micro_batches")
        check_numbers(self.minutes, {name: getattr(self, name) for name in names})
        if self.K < 2:
            raise UserError("K=1: one stage leaves nothing to compare, use 2 or more")
        for kind, value, allowed in (
            ("device", self.device, ("cpu", "cuda")),
            ("partition", self.partition, ("measured", "flops")),
            ("precision", self.precision, ("fp32", "tf32", "bf16")),
        ):
            if value not in allowed:
                raise unknown(kind, value, allowed)
        if self.device == "cpu" and self.precision != "fp32":
            raise UserError(f"precision={self.precision!r} on the cpu: the rows of torch are fp32 there, leave it out")
        if self.batch_size is not None and self.batch_per_update is not None:
            raise UserError(
                f"batch_size={self.batch_size} with batch_per_update={self.batch_per_update}: leave out one of them"
            )
        shape, classes = self.size()
        setting = BenchSetting(
            self.model,
            shape,
            classes,
            self.batch_per_update or self.batch_size or 128,
            self.K,
            4 if self.M is None else self.M,
            self.device,
            self.precision,
            methods=settings_by_method(self.methods, self.M),
            batch_per_update=self.batch_per_update,
        )
        self.check_split(setting)
        check(setting)
        return setting

    def check_split(self, setting: BenchSetting) -> None:
        """Refuse samples per update that M batches cannot share."""
        if self.batch_per_update is not None:
            split_update(self.batch_per_update, batches_per_update(ROWS[OURS], setting))

    def placed(
        self,
        setting: BenchSetting,
        rows: Sequence[BenchRow],
        earlier: Mapping[str, Any] | None,
        runner: StudyRunner,
    ) -> BenchSetting:
        """The setting with the cuts of these rows: those of an earlier record that is continued, those that are given,
        or new ones for every number of samples on which their stages compute, as far as there is time."""
        if earlier:
            return BenchSetting.of(earlier["settings"])
        report, by = runner.report, self.partition
        end = math.inf if self.minutes is None else runner.seconds + PLANNING * 60 * self.minutes
        share = (end - runner.seconds) / len(sizes(rows, setting, self.micro_batches))
        made = placed(setting, by=by, cuts=self.cuts, units=self.units, seconds=share, file=self.profile, report=report)
        whole, other = setting.batch_size, dict[str, dict[str, Any]]()
        smaller = [] if self.cuts else sizes(rows, made, self.micro_batches)[1:]
        for place, samples in enumerate(smaller):
            share = (end - runner.seconds) / (len(smaller) - place)
            if share <= 0:
                report(f"no time to plan cuts for {samples} of {whole} samples: those for {whole} are used")
                continue
            file = self.profile and self.profile.with_stem(f"{self.profile.stem}-b{samples}")
            part = replace(setting, batch_size=samples)
            own = placed(part, by=by, M=whole // samples, seconds=share, file=file, report=report)
            other[str(samples)] = {"cuts": own.cuts, "chunk_cuts": own.chunk_cuts}
            report(f"{setting.model}, {samples} of {whole} samples, cuts {list(own.cuts)}")
        return replace(made, cuts_by_samples=other)

    def size(self) -> tuple[tuple[int, ...], int]:
        """The shape of a sample, and the number of classes."""
        return models.default_size(self.model, shape=self.shape)


def check_numbers(minutes: float | None, numbers: Mapping[str, int | Sequence[int] | None]) -> None:
    """Refuse numbers below 1, by the argument that they were given for, and a budget of no time."""
    for name, given in numbers.items():
        for number in given if isinstance(given, Sequence) else [given]:
            if number is not None and number < 1:
                raise UserError(f"{name}={number}: use whole numbers from 1 up")
    if minutes is not None and not minutes > 0:
        raise UserError(f"minutes={minutes:g}: use a number above 0")
