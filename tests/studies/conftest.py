"""Fixtures of studies. They draw nothing in tests that do not look at pictures, since drawing takes longer than their
small runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


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


@pytest.fixture
def bench_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/results_bench.py, with the records in tmp_path."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("results_bench", BENCHMARKS / "results_bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("page.RECORDS", tmp_path)
    monkeypatch.setattr(module, "RECORDS", tmp_path)
    return module
