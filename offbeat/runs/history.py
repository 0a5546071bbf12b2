"""What a run has measured so far: figures that a resumed run takes over, and the speed of this process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class History:
    """Figures of a run over all its processes; every checkpoint contains them.

    rows      training loss and error since the last epoch ended, a row per report
    speeds    samples per second of each epoch
    test      result of the last evaluation
    memory    most bytes that each stage held
    seconds   time of training and evaluation, before this process
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    test: dict[str, Any] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> History:
        """The history in a checkpoint's run.json; empty where there is none."""
        found = cls(**{name: run[name] for name in cls.__dataclass_fields__ if name in run})
        found.rows, found.test = [_numbers(row) for row in found.rows], _numbers(found.test)
        return found

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those of this process included."""
        return self.seconds + time.perf_counter() - self.began

    def as_dict(self) -> dict[str, Any]:
        """For run.json: figures that are not finite, which JSON does not have, as text such as "nan"."""
        texts = {"rows": [_texts(row) for row in self.rows], "test": _texts(self.test)}
        return {**asdict(self), **texts, "seconds": self.elapsed}

    def train_means(self) -> dict[str, float | None]:
        """Training loss and error of the epoch, as means over its samples; None without samples."""
        rows = [row for row in self.rows if row["samples"] and row["loss"] is not None]
        samples = sum(row["samples"] for row in rows)
        return {
            name: sum(row[name] * row["samples"] for row in rows) / samples
            if samples and all(row[name] is not None for row in rows)
            else None
            for name in ("loss", "error")
        }


def _texts(figures: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> _texts({"loss": float("inf"), "error": 90.0, "top5": None}), _numbers({"loss": "inf"})
    ({'loss': 'inf', 'error': 90.0, 'top5': None}, {'loss': inf})
    """
    odd = {name: str(value) for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**figures, **odd}


def _numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, str) else value for name, value in figures.items()}


class SpeedMeter:
    """Samples per second of this process, since its last report and over the epoch."""

    def __init__(self) -> None:
        self.start_epoch()

    def start_epoch(self) -> None:
        self.epoch_began = self.reported = time.perf_counter()
        self.samples = 0  # that have entered the pipeline in this epoch

    def report(self, samples: int) -> float:
        """Count samples; the speed since the report before."""
        now = time.perf_counter()
        speed = samples / max(1e-9, now - self.reported)
        self.samples += samples
        self.reported = now
        return speed

    def epoch_seconds(self) -> float:
        return time.perf_counter() - self.epoch_began
