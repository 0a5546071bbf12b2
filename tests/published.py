"""The scripts that join records and write pages, on a copy of the pages."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from preloaded import PYTHON

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    """A script of benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


reproduced = script("reproduced")


def join(*arguments: object) -> None:
    """Run benchmarks/reproduced.py, in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["reproduced.py", *map(str, arguments)])
        reproduced.main()


def copy_pages(root: Path) -> Path:
    """Pages without any reproduction, their other records, and the scripts that write them."""
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("reproduction-*"))
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", root)
    return root


def write_pages(root: Path, *arguments: str, name: str = "results") -> subprocess.CompletedProcess[str]:
    """Run a script that writes pages."""
    command = [PYTHON, root / f"benchmarks/{name}.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
