"""The command line run in this process, for tests of what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@cache
def building_once() -> Callable:
    """typer's get_command, which reads the signatures of all commands at every call: longer than most of them run."""
    from typer.main import get_command

    return cache(get_command)


@pytest.fixture
def offbeat(monkeypatch, capsys, tmp_path) -> Command:
    """Run the command in an empty folder, with no chance to start a process."""
    from offbeat import cli
    from offbeat.runs import build, launch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.main.get_command", building_once())
    for name in ("RANK", "WORLD_SIZE", launch.ERRORS, build.DATA_DIR, build.TEXT):
        monkeypatch.setenv(name, "")  # so that what the command sets is gone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("started workers"))

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        printed = capsys.readouterr()
        return Outcome(0 if exit.value.code is None else exit.value.code, printed.out, printed.err)

    return run


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def check_refused(offbeat: Command, arguments: tuple, *words: str) -> str:
    """Exit code 2, one line that says all of it, no traceback, nothing on stdout, nothing written."""
    before = contents(Path.cwd())
    outcome = offbeat(*arguments)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("offbeat: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err
    assert contents(Path.cwd()) == before
    return outcome.err


def train_here(offbeat: Command, *arguments: object) -> str:
    """`offbeat train` in this process, which must succeed; what it printed on standard error."""
    outcome = offbeat("train", *arguments)
    assert outcome.code == 0, outcome
    return outcome.err


def weights(run: Path) -> dict[str, bytes]:
    """The bits of the model of a run folder."""
    from safetensors.torch import load_file

    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run / "model.safetensors").items()}
