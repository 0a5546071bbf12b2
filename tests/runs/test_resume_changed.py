"""Runs that go on with something changed: progress counts samples and epochs, and what still fits is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import Command, check_refused, train_here
from safetensors.torch import load_file
from selected import only, some

from offbeat.checkpoint import ls
from offbeat.pipeline import state_trees
from offbeat.runs.record import lines

SAMPLES, EPOCHS = 96, 4
RUN = [
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    SAMPLES,
    "--shape",
    "3,8,8",
    "--batch-size",
    8,
    "--threads-per-stage",
    1,
    "--engine",
    "simulate",
    "-K",
    2,
    "--warmup",
    0,
    "--milestones",
    0.75,
    "--json",
]
HALF = ["--epochs", 2, "--checkpoint-every", "1.5e"]  # a checkpoint in the middle of the second epoch: batch 18 of 24


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Runs that several tests go on with."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def started(made, offbeat: Command):
    """A copy of a run with these options and a checkpoint in the middle of its second epoch."""

    def start(run: Path, *arguments: object) -> None:
        there = made / "".join(["run", *map(str, arguments)])
        if not there.exists():
            train_here(offbeat, *RUN, *HALF, *arguments, "--out", there)
        shutil.copytree(there, run)

    return start


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for k in (1, 2) for name, tensor in ls(run)[-1].checkpoint.stage(k)["stage"]["model"].items()}


def recorded(run: Path) -> dict[str, list]:
    """What the records of a run report, from where it went on."""
    found = lines(run)
    at = max(place for place, line in enumerate(found) if line["kind"] == "resumed")
    kinds = {kind: [line for line in found[at:] if line["kind"] == kind] for kind in ("train", "epoch", "resumed")}
    return {**kinds, "note": [line["text"] for line in found if line["kind"] == "note"]}


def test_t1_begins_with_the_late_method_of_a_run_that_was_synchronous(tmp_path, offbeat: Command):
    constant = [*RUN, "--milestones", ""]
    train_here(
        offbeat, *constant, "--method", "bp", "--epochs", 1, "--checkpoint-every", "1e", "--out", tmp_path / "run"
    )
    late = ["--method", "adl:M=1,corrector=t1:updates=18"]
    resumed = offbeat("train", "--resume", tmp_path / "run", *late, "--epochs", 2, "--json")
    assert resumed.code == 0, resumed
    train_here(offbeat, *constant, *late, "--staleness-warmup", 12, "--epochs", 2, "--out", tmp_path / "whole")
    found, expected = (load_file(tmp_path / run / "model.safetensors") for run in ("run", "whole"))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


CHANGES = {  # what reliability.md calls changeable: options, and whether the batches in flight go on
    "epochs": (["--epochs", EPOCHS + 1], True),
    "warm-up": (["--warmup", 0.5], True),
    "milestones": (["--milestones", "0.5,0.75"], True),
    "rate": (["--lr", 0.001], True),
    "momentum": (["--momentum", 0.5], True),
    "weight decay": (["--weight-decay", 0.01], True),
    "checkpoint-every": (["--checkpoint-every", "5b"], True),
    "keep": (["--keep", 1], True),
    "K": (["-K", 3, "--engine", "simulate"], False),
    "M": (["-M", 4], False),
    "method": (["--method", "pipedream"], False),
    "weights": (["--weights", "hybrid"], False),
    "recompute": (["--method", "adl:recompute=yes"], True),
    "cuts": (["--cuts", 1], False),
    "corrector": (["--corrector", "sc"], False),
    "seed": (["--seed", 1], False),
    "batch size 16": (["--batch-size", 16], False),
    "batch size 4": (["--batch-size", 4], False),
    "batch size 7": (["--batch-size", 7], False),
    "drop-last": (["--batch-size", 7, "--drop-last"], False),
    "weighting": (["--weighting", "samples"], False),
}


QUICK = ("recompute", "epochs", "milestones", "rate", "K", "M", "seed", "batch size 16", "drop-last")


@pytest.mark.parametrize("change", only(QUICK, CHANGES))
def test_a_changed_run_trains_every_sample_that_is_left(change, tmp_path, started, offbeat: Command):
    run, (options, exact) = tmp_path / "run", CHANGES[change]
    started(run, "--method", "adl", "-M", 2)
    epochs = options[1] if change == "epochs" else EPOCHS
    given = options if change == "epochs" else ["--epochs", EPOCHS, *options]
    train_here(offbeat, "--resume", run, "--json", *given)
    seen = recorded(run)
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    assert seen["resumed"][-1] | {"time": 0} == {"kind": "resumed", "time": 0, "batch": 18, "exact": exact}
    assert [line["epoch"] for line in seen["epoch"]] == list(range(1, epochs)), "from the middle of the second"
    size, left = recipe["batch_size"], SAMPLES // 2
    batches = [rest // size if recipe["drop_last"] else -(-rest // size) for rest in (left, *[SAMPLES] * (epochs - 2))]
    assert [line["batches"] for line in seen["epoch"]] == [18 + sum(batches[: n + 1]) for n in range(len(batches))]
    drops = [fraction * epochs for fraction in recipe["milestones"]]
    for line in seen["train"]:
        if change != "warm-up" and line["epoch"] not in map(int, drops):  # in an epoch with a drop, either is right
            wanted = recipe["lr"] * 0.1 ** sum(line["epoch"] > drop for drop in drops)
            assert line["lr"] == pytest.approx(wanted), line
    lost = [note for note in seen["note"] if "in flight" in note]
    assert len(lost) == (0 if exact else 1), seen["note"]


def test_a_learning_rate_of_ones_own_stays_when_the_batch_size_changes(tmp_path, started, offbeat: Command):
    started(tmp_path / "own", "--lr", 0.02)
    started(tmp_path / "rule")
    for name, rate in (("own", 0.02), ("rule", 0.1 * 16 * 4 / 256)):
        train_here(offbeat, "--resume", tmp_path / name, "--json", "--batch-size", 16, "--epochs", 3)
        assert json.loads((tmp_path / name / "config.json").read_text())["recipe"]["lr"] == rate
    assert any("the learning rate is 0.025, it was 0.0125" in note for note in recorded(tmp_path / "rule")["note"])


def test_the_first_update_after_a_resume_has_the_new_rate(tmp_path, started, offbeat: Command):
    run = tmp_path / "run"
    started(run, "--method", "adl", "-M", 2)
    before = checkpoint(run)
    train_here(offbeat, "--resume", run, "--json", "--lr", 0, "--epochs", 3)
    after = load_file(run / "model.safetensors")
    parameters = [name for name in before if "running" not in name and "num_batches" not in name]
    assert parameters
    assert all(torch.equal(before[name], after[name]) for name in parameters), "a rate of 0 moves nothing"


def test_the_first_update_after_a_resume_has_the_new_schedule(tmp_path, started, offbeat: Command):
    runs = [tmp_path / name for name in ("one", "two")]
    for run, milestones in zip(runs, ("0.75", "0.1"), strict=True):
        started(run, "--method", "adl", "-M", 2)
        train_here(
            offbeat,
            "--resume",
            run,
            "--json",
            "--milestones",
            milestones,
            "--epochs",
            4,
            "--checkpoint-every",
            "20b",
            "--keep",
            9,
        )
    assert [[each.checkpoint.t for each in ls(run)] for run in runs] == [[18, 20, 40], [18, 20, 40]]
    groups = [ls(run)[1].checkpoint.stage(2)["stage"]["groups"][0]["lr"] for run in runs]
    assert groups[1] == pytest.approx(groups[0] / 10), "after the first update already"


def test_fewer_epochs_than_are_done_are_refused_and_nothing_changes(tmp_path, offbeat: Command):
    run = tmp_path / "run"
    train_here(offbeat, *RUN, "--epochs", 3, "--checkpoint-every", "2.5e", "--out", run)
    (run / "metrics.jsonl").write_text("")  # as one that was killed before its end
    before = (run / "config.json").read_bytes()
    refused = "--epochs 2, but the checkpoint was made after 2.5"
    check_refused(offbeat, ("train", "--resume", run, "--epochs", 2), refused)
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("change", some([["--seed", 1], ["--batch-size", 16], ["--lr", 0.001]], of=3))
@pytest.mark.parametrize("method", ["dgl", "dni"])
def test_heads_that_still_fit_are_kept(method, change, tmp_path, started, offbeat: Command):
    run = tmp_path / "run"
    started(run, "--method", method)
    trained = ls(run)[-1].checkpoint.stage(1)["stage"]
    train_here(
        offbeat,
        "--resume",
        run,
        "--json",
        "--lr",
        0,
        "--weight-decay",
        0,
        *change,
        "--epochs",
        3,
        "--checkpoint-every",
        "19b",
        "--keep",
        9,
    )
    assert not any("heads" in note for note in recorded(run)["note"])
    again = ls(run)[-1].checkpoint.stage(1)["stage"]
    assert trained["head"].keys() == again["head"].keys()
    if method == "dgl" and change[0] != "--lr":  # its heads are trained at the same rate, which is 0 now
        assert all(
            torch.equal(trained["head"][name], again["head"][name])
            for name in trained["head"]
            if "running" not in name and "num_batches" not in name
        )
        assert any(name.startswith("head.") for name in again["optimizer"])


@pytest.mark.parametrize("change", [("--classes", 5), ("--shape", "3,9,9", "--model", "mlp")])
def test_a_change_that_does_not_fit_the_checkpoint_leaves_the_recipe(change, tmp_path, started, offbeat: Command):
    """The folder kept the recipe that was refused, with which no later command could resume."""
    run = tmp_path / "run"
    started(run)
    before = (run / "config.json").read_bytes()
    refused = offbeat("train", "--resume", run, "--epochs", EPOCHS, *change)
    assert (refused.code, "checkpoint" in refused.err) == (2, True), refused
    assert (run / "config.json").read_bytes() == before
    assert not list(run.glob("config-*.json"))
    train_here(offbeat, "--resume", run, "--epochs", EPOCHS, "--json")
    assert len(list(run.glob("config-*.json"))) == 1


def test_the_model_of_a_checkpoint_holds_no_auxiliary_heads():
    own, auxiliary = {"momentum_buffer": 1}, {"momentum_buffer": 2}
    parts = [
        {"model": {"head.weight": 10}, "optimizer": {"head.weight": own}, "corrections": {}},
        {"model": {"tail.weight": 20}, "optimizer": {"head.weight": auxiliary}, "corrections": {"head.weight": {}}},
    ]
    merged = state_trees.merge(parts)
    assert merged == {
        "model": {"head.weight": 10, "tail.weight": 20},
        "optimizer": {"head.weight": own},
        "corrections": {},
    }


def test_heads_move_with_their_cuts_and_what_is_lost_is_reported(tmp_path, started, offbeat: Command):
    run = tmp_path / "run"
    started(run, "--method", "dgl", "-K", 3, "--cuts", "1,3")
    heads = [ls(run)[-1].checkpoint.stage(k)["stage"]["head"] for k in (1, 2)]
    train_here(
        offbeat,
        "--resume",
        run,
        "--json",
        "--cuts",
        "2,3",
        "--lr",
        0,
        "--epochs",
        3,
        "--checkpoint-every",
        "19b",
        "--keep",
        9,
    )
    made = ls(run)[-1].checkpoint
    again = [made.stage(k)["stage"]["head"] for k in (1, 2)]
    trained = [name for name in heads[1] if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(heads[1][name], again[1][name]) for name in trained), "the cut before unit 3 has stayed"
    notes = recorded(run)["note"]
    assert any("the heads of stages 1 are initialised again" in note for note in notes), notes
    assert any("the heads of stages 1 of the checkpoint are not used" in note for note in notes), notes
