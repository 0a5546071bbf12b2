"""Configurations good and bad end as documented: a small share of what `make torture` tries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from offbeat import launch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def configs(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", launch.ERRORS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("started workers"))
    spec = importlib.util.spec_from_file_location("torture_configs", ROOT / "benchmarks/torture_configs.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torture_configs", module)
    spec.loader.exec_module(module)
    return module


def test_100_configurations_end_as_documented(configs, tmp_path):
    found, faults = configs.attempt(100, 0, tmp_path / "here")
    assert not faults
    assert found["valid"] >= 25
    assert found["invalid"] >= 40


def test_the_statement_of_what_is_valid_can_be_contradicted(configs):
    """The checks of an outcome fail where they must."""
    assert configs.fault("valid", 2, "", "offbeat: no\n")
    assert configs.fault("invalid", 0, "{}", "")
    assert configs.fault("invalid", 2, "", "offbeat: no\nand no\n")
    assert configs.fault("invalid", 2, "", "Traceback\n")
    assert configs.fault("unclear", "ValueError", "", "")
    assert configs.fault("valid", 0, "{}", "") is None


def test_numbers_and_files_beyond_all_measure_are_told_in_one_line_or_taken(configs, tmp_path, monkeypatch):
    configs.folder(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for option, value in (*configs.EXTREME, ("--config", "deep.json")):
        arguments = ["train", "--model", "mlp", "--data", "synthetic", option, value, "--dry-run", "--json"]
        assert configs.fault("unclear", *configs.tried(arguments)) is None, (option, value[:40])
