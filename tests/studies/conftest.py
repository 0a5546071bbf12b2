"""Studies draw nothing in tests that do not look at pictures, since drawing takes longer than their small runs."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def pictures() -> None:
    """For a test that looks at pictures."""


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vl-convert is not installed: studies print one line and continue (tests/report/test_pictures.py)."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "vl_convert", None)
