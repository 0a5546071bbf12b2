"""The run folder on the disk: the modes of its files, and that what has a name there is all there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sync_calls import Recorded

from offbeat.errors import UserError
from offbeat.runs.record import Diagnoses, RunFolder, RunState, lines


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_run_without_records_that_is_resumed_with_another_recipe_is_recorded(run):
    """A later error put the old recipe back, although the run had been trained with the new one."""
    run.resumed(0, [], exact=True)
    assert lines(run.path) == []
    (run.path / "config-1.json").write_text("{}")
    before = RunState(recipes=0, resumed=0)
    run.resumed(0, [], exact=True)
    before.put_back(run.path)
    assert [line["kind"] for line in lines(run.path)] == ["resumed"]
    assert (run.path / "config-1.json").exists()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_the_model_file_has_the_mode_of_the_other_files(run, mask):
    with umask(mask):
        run.line("note", text="beside it")
        run.model({"weight": torch.ones(2)})
    assert mode(run.path / "model.safetensors") == mode(run.path / "metrics.jsonl") == 0o666 & ~mask


def test_the_model_file_holds_every_tensor_under_its_name(run):
    base = torch.arange(12.0).view(3, 4)
    state = {
        "tied": base,
        "again": base,
        "transposed": base.T,
        "laid out": torch.ones(2, 3, 4, 4, dtype=torch.bfloat16),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }
    state["laid out"] = state["laid out"].to(memory_format=torch.channels_last)
    run.model(state)
    held = load_file(run.path / "model.safetensors")
    assert set(held) == set(state)
    for name, tensor in state.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor)


def test_the_model_is_on_the_disk_before_it_has_its_name_and_the_name_after(run, monkeypatch):
    calls = Recorded(monkeypatch)
    run.model({"weight": torch.ones(2)})
    model = run.path / "model.safetensors"
    calls.check_order(("fsync", calls.before[model]), ("rename", model), ("fsync", run.path))
    assert calls.bytes[calls.before[model]] == model.stat().st_size, "all of it"


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"[1, 2]", "not a record with kind"), (b"{}", "not a record"), (b"\xb8\xff", "Expecting value")],
)
def test_a_damaged_line_is_named(text, reason, tmp_path):
    """Resuming such a run ended with a traceback."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "train"}\n' + text + b"\n{")
    with pytest.raises(UserError, match=f"metrics.jsonl, line 2, is damaged .*{reason}.*: remove that line"):
        lines(tmp_path)
    (tmp_path / "diagnosis.jsonl").write_bytes(text + b"\n")
    with pytest.raises(UserError, match=r"diagnosis.jsonl, line 1, is damaged .*: remove that line"):
        Diagnoses(tmp_path, 4)
