"""Fixtures of studies. They draw nothing in tests that do not look at pictures, since drawing takes longer than their
small runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def pictures() -> None:
    """For a test that looks at pictures."""


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vl-convert is not installed: studies print one line and continue (tests/report/test_pictures.py)."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "vl_convert", None)


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process, and what it starts, on one core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)
