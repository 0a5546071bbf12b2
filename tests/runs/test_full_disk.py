"""Disks that get full: old checkpoints make room for the next one, for the records and for the model.

As long as a disk holds one checkpoint, the next one and the model, a run ends with its model on it.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from command import Command
from disks import PAGE, fill, free, small_disk, taken
from preloaded import PYTHON
from safetensors.torch import load_file
from small_recipe import small
from torch import nn
from trees import same

import offbeat as offbeat_package
from offbeat import checkpoint as checkpoints
from offbeat.checkpoint import CheckpointFailed
from offbeat.errors import Interrupted, UserError
from offbeat.runs.begin import begin
from offbeat.runs.build import check
from offbeat.runs.recipe import make_recipe
from offbeat.runs.record import RunFolder, lines
from offbeat.runs.saving import Saver

RUN = (
    "--model",
    "mlp",
    "--data",
    "synthetic",
    "--samples",
    "512",
    "--shape",
    "3,8,8",
    "--batch-size",
    "16",
    "-K",
    "2",
    "-M",
    "2",
    "--epochs",
    "2",
    "--threads-per-stage",
    "1",
    "--checkpoint-every",
    "7b",
    "--json",
)
RECORDS = 64 * PAGE  # room for all but checkpoints and the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def whole(folder, offbeat: Command) -> Path:
    """The run on a disk that has room for everything."""
    if not (folder / "whole").exists():
        assert train(offbeat, "simulate", folder / "whole") == (0, "")
    return folder / "whole"


def train(offbeat: Command, engine: str, out: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and errors of the run, in this process where it needs no other."""
    command = ["train", *RUN, "--engine", engine, "--out", str(out), *arguments]
    if engine == "simulate":
        outcome = offbeat(*command)
        return outcome.code, outcome.err
    done = subprocess.run([PYTHON, "-m", "offbeat", *command], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def sizes(whole: Path) -> tuple[int, int]:
    """Bytes of a checkpoint and of the model."""
    return max(taken(each.path) for each in checkpoints.ls(whole)), taken(whole / "model.safetensors")


def kinds(run: Path) -> list[str]:
    return [line["kind"] for line in lines(run)]


def write(run: Path, t: int, numbers: int = 4000) -> checkpoints.Checkpoint:
    folder = checkpoints.begin(run, t)
    facts = checkpoints.write_part(folder, "stage-01", {"model": {"w": torch.full((numbers,), float(t))}})
    return checkpoints.finish(folder, facts, t=t, mode="drained", K=1, method="bp", run={})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# ---- whole runs


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_disk_for_two_checkpoints_and_the_model_is_enough_for_a_run(engine, whole, tmp_path, offbeat: Command):
    checkpoint, model = sizes(whole)
    with small_disk(tmp_path / "disk", 2 * checkpoint + model + RECORDS) as disk:
        run = disk / "run"
        assert train(offbeat, engine, run, "--keep", "5") == (0, "")
        assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert kinds(run)[-1] == "result"
        assert "checkpoint failed" not in kinds(run)
        assert kinds(run).count("checkpoint") == kinds(whole).count("checkpoint")
        made = checkpoints.ls(run)
        assert made[-1].path.name == checkpoints.ls(whole)[-1].path.name
        assert checkpoints.verify(made[-1].path) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_a_disk_for_one_checkpoint_and_the_model_is_enough_for_a_run(engine, whole, tmp_path, offbeat: Command):
    """Without the next checkpoint: those that fail are reported, the first one stays, the run ends."""
    checkpoint, model = sizes(whole)
    with small_disk(tmp_path / "disk", checkpoint + model + RECORDS) as disk:
        run = disk / "run"
        assert train(offbeat, engine, run) == (0, "")
        assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert "checkpoint failed" in kinds(run)
        assert [checkpoints.verify(each.path) for each in checkpoints.ls(run)] == [[]]


def test_a_run_resumed_on_a_full_disk_makes_room_first(whole, tmp_path, offbeat: Command):
    checkpoint, model = sizes(whole)
    with small_disk(tmp_path / "disk", 4 * checkpoint + 2 * model + RECORDS) as disk:
        run = disk / "run"
        shutil.copytree(whole, run)
        fill(disk, 0)
        done = offbeat("train", "--resume", run, "--epochs", "3", "--json")
        assert done.code == 0, done
        assert json.loads((run / "config.json").read_text())["recipe"]["epochs"] == 3
        assert json.loads((run / "config-1.json").read_text())["recipe"]["epochs"] == 2
        assert [line["epoch"] for line in lines(run) if line["kind"] == "epoch"] == [0, 1, 2]


def test_a_disk_that_others_fill_leaves_the_newest_checkpoint_and_the_next(tmp_path):
    torch.manual_seed(0)
    pipe = offbeat_package.Pipeline(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
        2,
        loss=nn.functional.mse_loss,
        cuts=[1],
        M=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        engine="simulate",
    )
    recipe = make_recipe(model="mlp", data="synthetic", K=2, M=2, checkpoint_every="5b", keep=3)
    noted: list[str] = []
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        saver = Saver(recipe, recipe.count(1000), pipe, disk, lambda kind, **_: noted.append(kind))

        def train(batches: range) -> None:
            for t in batches:
                saver.before(t)
                pipe.step(torch.randn(3, 32), torch.randn(3, 32))
                if saver.due(t + 1):
                    saver.save({})

        train(range(15))
        assert names(disk) == ["000000005", "000000010", "000000015"], "as many as are to be kept"
        fill(disk, 2 * PAGE)
        train(range(15, 20))
        assert noted == ["checkpoint"] * 4 + ["disk nearly full"]
        assert names(disk) == ["000000020"]
        assert checkpoints.verify(checkpoints.ls(disk)[0].path) == []


# ---- what makes room


def test_the_next_checkpoint_takes_the_room_of_old_ones(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        for t in (1, 2, 3):
            write(disk, t)
        fill(disk, 2 * PAGE)
        folder = checkpoints.begin(disk, 4)
        tree = {"model": {"w": torch.ones(4000)}}
        facts = checkpoints.with_room(disk, lambda: checkpoints.write_part(folder, "stage-01", tree))
        checkpoints.finish(folder, facts, t=4, mode="drained", K=1, method="bp", run={})
        assert names(disk) == ["000000003", "000000004"]
        assert same(checkpoints.newest(disk)[0].stage(1), tree)


def test_the_newest_valid_checkpoint_is_kept_and_a_damaged_one_removed(tmp_path):
    for t in (1, 2, 3, 4):
        write(tmp_path, t)
    (tmp_path / "checkpoints" / "000000004" / "stage-01.safetensors").write_bytes(b"torn")
    gone = checkpoints.make_room(tmp_path)
    assert [path.name for path in gone] == ["000000004", "000000001", "000000002"]
    assert names(tmp_path) == ["000000003"]
    assert checkpoints.make_room(tmp_path) == []
    assert names(tmp_path) == ["000000003"]


def test_where_no_checkpoint_is_sound_all_stay(tmp_path):
    for t in (1, 2):
        (write(tmp_path, t).path / "manifest.json").unlink()
    assert checkpoints.make_room(tmp_path) == []
    assert names(tmp_path) == ["000000001", "000000002"]


def test_no_more_checkpoints_go_than_are_in_the_way(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        for t in (1, 2, 3, 4):
            write(disk, t)
        assert checkpoints.make_room(disk, needed=free(disk)) == []
        assert [path.name for path in checkpoints.make_room(disk, needed=free(disk) + 1)] == ["000000001"]
        assert names(disk) == ["000000002", "000000003", "000000004"]


def test_a_file_size_limit_removes_no_checkpoint(tmp_path):
    """What another folder could hold is not for lack of space."""
    for t in (1, 2):
        write(tmp_path, t)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            RunFolder(tmp_path).model({"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["000000001", "000000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_the_model_takes_the_room_of_all_checkpoints_but_the_newest(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        for t in (1, 2, 3):
            write(disk, t)
        fill(disk, PAGE)
        RunFolder(disk).model({"w": torch.full((5000,), 7.0)})
        assert torch.equal(load_file(disk / "model.safetensors")["w"], torch.full((5000,), 7.0))
        assert names(disk) == ["000000003"]


def test_a_model_without_room_leaves_the_one_before_and_the_newest_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        RunFolder(disk).model({"w": torch.ones(10)})
        write(disk, 1)
        fill(disk, PAGE)
        with pytest.raises(UserError, match=r"cannot write to .*No space left on device.*free some space"):
            RunFolder(disk).model({"w": torch.zeros(50_000)})
        assert torch.equal(load_file(disk / "model.safetensors")["w"], torch.ones(10))
        assert checkpoints.verify(checkpoints.ls(disk)[0].path) == []
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "checkpoints", "model.safetensors"]


def test_a_model_without_room_and_without_a_checkpoint_promises_none(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk, pytest.raises(UserError, match=r"free some space$"):
        RunFolder(disk).model({"w": torch.zeros(50_000)})


@pytest.mark.parametrize("earlier", [False, True])
def test_a_stop_whose_checkpoint_failed_says_so(earlier, tmp_path, monkeypatch):
    """It promised a checkpoint to continue from."""
    recipe = small("adl", K=2, M=2, checkpoint_every="2b" if earlier else None)
    run = begin(check(recipe)[0], tmp_path / "run", show=False)
    steps = run.steps()
    for _ in range(3):
        next(steps)

    def full(*arguments: object, **options: object) -> None:
        raise CheckpointFailed("cannot write it: free some space")

    monkeypatch.setattr(checkpoints, "finish", full)
    run.stop("Ctrl-C")
    there = r"continue with resume='.*run', after batch 1" if earlier else "there is no earlier one"
    failed = (
        rf"stopped by Ctrl-C after batch \d, and its checkpoint failed \(cannot write it: free some space\): {there}$"
    )
    with pytest.raises(Interrupted, match=failed):
        list(steps)
    run.close()


def test_a_line_of_the_records_takes_the_room_of_an_old_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        run = RunFolder(disk)
        run.line("note", text="first")
        write(disk, 1)
        write(disk, 2)
        fill(disk, 0)
        run.line("note", text="x" * 3 * PAGE)
        assert [line["text"][0] for line in lines(disk)] == ["f", "x"]
        assert names(disk) == ["000000002"]


def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.runs.record.RETRY_SECONDS", 0.0)
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        run = RunFolder(disk)
        run.line("note", text="first")
        ballast = fill(disk, PAGE)
        with pytest.raises(UserError, match="No space left on device"):
            run.line("note", text="x" * 4 * PAGE)
        ballast.unlink()
        run.line("note", text="last")
        assert [line["text"] for line in lines(disk)] == ["first", "last"]


def test_a_line_waits_for_a_checkpoint_that_is_being_given_up(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        ballast = fill(disk, 0)
        threading.Timer(0.3, ballast.unlink).start()
        RunFolder(disk).line("note", text="late")
        assert [line["text"] for line in lines(disk)] == ["late"]


def test_points_for_tensorboard_that_cannot_be_written_stop_nothing(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        run = RunFolder(disk)
        ballast = fill(disk, PAGE)
        run.scalars(0, train__loss=1.0)
        ballast.unlink()
        run.scalars(1, train__loss=0.5)
        fill(disk, 0)
        run.scalars(2, train__loss=0.4)
        run.close()
    assert capfd.readouterr() == ("", "")
