"""docs/adding-a-method.md, followed to the letter in a copy of the package: one file, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import PYTHON

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/adding-a-method.md"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package and its contract, with the file of the page in the folder of methods."""
    place = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "offbeat", place / "offbeat")  # with what is compiled already
    (place / "tests/methods").mkdir(parents=True)
    for name in ("tests/methods/test_contract.py", "pyproject.toml", "docs/adding-a-method.md"):
        shutil.copy(ROOT / name, place / name.replace("docs/", ""))
    ((path, content),) = re.findall(r"The complete file\s`(.*?)`:\n\n```python\n(.*?)```\n", PAGE.read_text(), re.S)
    assert not (place / path).exists()
    (place / path).write_text(content)
    return place


# A module is run as by `python -m`, with the package of the folder it is run in.
MODULE = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "offbeat"]:
    del sys.modules[name]
sys.argv.pop(0)
sys.path.insert(0, "")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-c", MODULE, *arguments[1:]] if arguments[0] == "-m" else [sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_contract_and_the_pages_examples_hold_for_the_new_method(copy):
    done = python(
        copy,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--doctest-glob=*.md",
        "tests/methods/test_contract.py",
        "adding-a-method.md",
        "-k",
        "patient or adding-a-method",
    )
    contract = (ROOT / "tests/methods/test_contract.py").read_text().count('@pytest.mark.parametrize("name", METHODS)')
    assert re.search(rf"\b{contract + 1} passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout


def test_the_new_method_is_listed_with_its_settings_and_is_a_public_name(copy):
    code = "import offbeat, sys; print(offbeat.Patient(slack=1).lag(1, 3), offbeat.__file__, 'torch' in sys.modules)"
    assert python(copy, "-c", code).stdout.split() == ["5", str(copy / "offbeat/__init__.py"), "False"]
    printed = python(copy, "-m", "offbeat", "methods", "patient", "--json")
    settings = {each["name"]: each["default"] for each in json.loads(printed.stdout)["settings"]}
    assert settings == {
        "M": 4,
        "slack": 2,
        "weights": "stash",
        "recompute": False,
        "corrector": None,
        "staleness_warmup": None,
    }


def test_the_command_line_trains_with_the_new_method_and_its_own_setting(copy):
    small = (
        "--model",
        "mlp",
        "--data",
        "synthetic",
        "--shape",
        "1,4,4",
        "--samples",
        "64",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "-K",
        "2",
        "--engine",
        "simulate",
        "--threads-per-stage",
        "1",
        "--json",
        "--out",
        "run",
    )
    done = python(copy, "-m", "offbeat", "train", "--method", "patient:M=2,slack=4", *small)
    assert json.loads(done.stdout)["staleness_formula"] == [3.0, 0.0]
    recipe = json.loads((copy / "run/config.json").read_text())["recipe"]
    assert recipe["settings"] == {"M": 2, "weights": "stash", "window": "count", "slack": 4}
    refused = subprocess.run(
        [sys.executable, "-m", "offbeat", "train", "--method", "patient:slac=1"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "offbeat: patient takes no slac (given: 1): leave it out; its settings are M (default 4), slack (default 2), "
        "weights (default stash), recompute (default no), corrector (default none), staleness_warmup (default none)\n"
    )
