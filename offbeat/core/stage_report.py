"""Figures of a stage: staleness, counters, and the report of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from offbeat.core.metrics import Meter


class Staleness(Counter[int]):
    """Applied gradients by their level of staleness (in updates): whole windows, from when the stage is full."""

    @property
    def mean(self) -> float:
        """Mean level of staleness; 0 where nothing was counted yet.

        >>> Staleness({0: 1, 1: 3}).mean
        0.75
        """
        return sum(level * count for level, count in self.items()) / max(1, self.total())


class StageFigures:
    """Counters of a stage.

    most_in_flight, most_versions    most batches in flight and weight versions that the method allows
    most_held                        batches in flight at once, so far
    samples, meter                   since the last report; the meter counts training losses
    last_batch                       the newest batch that was forwarded
    """

    def __init__(self, *, most_in_flight: int, most_versions: int) -> None:
        self.most_in_flight, self.most_versions = most_in_flight, most_versions
        self.most_held = 0
        self.samples = 0
        self.last_batch = -1
        self.backwards = 0
        self.meter = Meter()
        self.newest_version = 0  # its id: the version itself would be kept alive

    def forwarded(self, t: int, samples: int, *, in_flight: int, version: int) -> bool:
        """Count the forward of batch t on the version of that id; whether no earlier forward used it."""
        self.samples += samples
        self.last_batch = t
        if in_flight > self.most_held:
            self.most_held = in_flight
            assert in_flight <= self.most_in_flight, "more batches in flight than the lag allows"
        new = version != self.newest_version
        self.newest_version = version
        return new

    def take(self) -> tuple[int, float | None, float | None]:
        """Samples, mean loss and error since the last call."""
        samples, means = self.samples, self.meter.read()
        self.samples = 0
        self.meter.empty()
        return samples, means["loss"], means["error"]


@dataclass(frozen=True)
class Report:
    """Figures of a stage since its last report; loss and error only where the loss is."""

    k: int
    t: int
    updates: int
    samples: int
    in_flight: int
    versions: int
    lr: float | None
    loss: float | None
    error: float | None
    staleness: dict[int, int]
    memory: int = 0  # bytes
    skipped: int = 0  # batches left out since the start
    diagnosis: list[dict[str, Any]] = field(default_factory=list)  # measured staleness, see observe/diagnosis.py

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
