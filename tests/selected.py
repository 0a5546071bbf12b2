"""Parameters of which a few are tested every time, and the others with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *, of: int = 4) -> list[Any]:
    """One of every few values is tested every time, from the first on."""
    return [value if place % of == 0 else _slow(value) for place, value in enumerate(values)]


def only(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The chosen ones among the values are tested every time."""
    values = list(values)
    assert not [value for value in chosen if value not in values]
    return [value if value in chosen else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)
