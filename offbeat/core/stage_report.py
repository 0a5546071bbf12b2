"""What a stage tells about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


class Staleness(Counter[int]):
    """Applied gradients by their level of staleness (in updates): whole windows, from when the stage is full."""

    @property
    def mean(self) -> float:
        """Mean level of staleness; 0 where nothing was counted yet.

        >>> Staleness({0: 1, 1: 3}).mean
        0.75
        """
        return sum(level * count for level, count in self.items()) / max(1, self.total())


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
    diagnosis: list[dict[str, Any]] = field(default_factory=list)  # what was measured of late gradients, if anything

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
