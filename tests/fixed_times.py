"""Times of batches that are given instead of measured, for tests of method "auto"."""

from __future__ import annotations

from types import ModuleType

import pytest


def fix_times(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """Fixed seconds by size of a batch, efficient down to 4 samples, in that module; the sizes that are asked for."""
    asked: list[int] = []

    def seconds(size: int) -> float:
        asked.append(size)
        return 1.0 * size if size >= 4 else 2.0 * size

    monkeypatch.setattr(module, "batch_seconds", lambda model, sample, **options: seconds)
    return asked
