"""Times that are given instead of measured, or measured in few laps, for tests that do not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import pytest


@contextmanager
def few_laps() -> Iterator[pytest.MonkeyPatch]:
    """Time units and stages in this process however many cores there are, with no more laps than a median needs."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            ("timing", "SHORTEST"),
            ("batch_times", "SHORTEST"),
            ("profile", "ENOUGH"),
            ("profile", "BUDGET"),
            ("refine", "SECONDS"),
        ):
            patch.setattr(import_module(f"offbeat.partitioning.{module}"), name, 0.0)
        workers = import_module("offbeat.partitioning.timing").TimingWorkers
        patch.setattr(workers, "possible", staticmethod(lambda twin, K: False))
        yield patch


def fix_times(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """Fixed seconds by size of a batch, efficient down to 4 samples, in that module; the sizes that are asked for."""
    asked: list[int] = []

    def seconds(size: int) -> float:
        asked.append(size)
        return 1.0 * size if size >= 4 else 2.0 * size

    monkeypatch.setattr(module, "batch_seconds", lambda model, sample, **options: seconds)
    return asked
