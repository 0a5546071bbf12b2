"""Runs whose staleness begins after some synchronous updates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON

from offbeat.runs.record import lines

RUN = ["--model", "resnet8", "--data", "synthetic", "--samples", "256", "--batch-size", "8", "--shape", "3,8,8"]
RUN += ["--epochs", "2", "-K", "2", "--threads-per-stage", "1", "--json"]
WARM = ["--method", "adl:M=2,weights=hybrid,staleness_warmup=20"]  # over after 8 batches of the second epoch


def test_a_run_records_no_staleness_in_the_warmup_and_the_formula_after_it(tmp_path, offbeat: Command):
    train_here(offbeat, *RUN, "--engine", "simulate", *WARM, "--out", tmp_path / "run")
    found = {line["batch"]: line["staleness"] for line in lines(tmp_path / "run") if line["kind"] == "train"}
    assert found[31] == [0.0, 0.0]
    result = lines(tmp_path / "run")[-1]
    assert result["staleness"] == result["staleness_formula"] == [1.0, 0.0]
    recipe = json.loads((tmp_path / "run/config.json").read_text())["recipe"]
    assert recipe["settings"]["staleness_warmup"] == 20


def test_the_option_is_the_setting_of_the_method(tmp_path, offbeat: Command):
    train_here(offbeat, *RUN, "--engine", "simulate", *WARM, "--out", tmp_path / "one")
    option = ["--method", "adl:M=2,weights=hybrid", "--staleness-warmup", "20"]
    train_here(offbeat, *RUN, "--engine", "simulate", *option, "--out", tmp_path / "other")
    assert weights(tmp_path / "one") == weights(tmp_path / "other")
    recipes = [json.loads((tmp_path / run / "config.json").read_text())["recipe"] for run in ("one", "other")]
    assert recipes[0] == recipes[1]


@pytest.mark.filterwarnings("always::offbeat.errors.ScheduleLength")
@pytest.mark.parametrize("warmup", ["32", "bp@20+adl-1f1b@12"])
def test_a_warmup_of_the_whole_run_is_named(warmup, offbeat: Command):
    """The method never trained, without a word."""
    given = [*RUN, "--engine", "simulate", "--dry-run", "--method", "adl:M=2", "--staleness-warmup"]
    assert train_here(offbeat, *given, warmup) == (
        f"offbeat: --staleness-warmup {warmup} with 32 updates in all: adl never begins; use fewer updates\n"
    )
    assert train_here(offbeat, *given, "31") == ""


@pytest.mark.filterwarnings("always::offbeat.errors.ScheduleLength")
def test_a_warmup_of_the_whole_run_is_named_once(tmp_path, offbeat: Command):
    given = [*RUN, "--engine", "simulate", "--method", "adl:M=2", "--staleness-warmup", "32"]
    found = train_here(offbeat, *given, "--out", tmp_path / "run")
    assert found.count("adl never begins") == 1


def test_a_warmup_that_was_over_before_a_resume_is_named(tmp_path, offbeat: Command):
    """It had no effect, without a warning."""
    given = ["--engine", "simulate", "--method", "adl:M=2", "--checkpoint-every", "1e", "--out", tmp_path / "run"]
    train_here(offbeat, *RUN, *given)
    words = "staleness_warmup=8 has no effect after 32 updates: use more updates, or leave it out\n"
    resume = ["--resume", tmp_path / "run", "--epochs"]
    assert words in train_here(offbeat, *resume, "3", "--staleness-warmup", "8")
    assert "has no effect" not in train_here(offbeat, *resume, "4")


@pytest.mark.filterwarnings("ignore::offbeat.errors.ScheduleLength")
def test_a_warmup_that_ends_a_longer_one_at_a_resume_has_an_effect(tmp_path, offbeat: Command):
    """Without it, the run would have gone on with the warm-up of 99 updates."""
    given = ["--method", "adl:M=2", "--staleness-warmup", "99", "--checkpoint-every", "1e", "--out", tmp_path / "run"]
    train_here(offbeat, *RUN, "--engine", "simulate", *given)
    found = train_here(offbeat, "--resume", tmp_path / "run", "--epochs", "3", "--staleness-warmup", "8")
    assert "has no effect" not in found
    records = lines(tmp_path / "run")
    assert [line["staleness"][0] > 0 for line in records if line["kind"] == "epoch"] == [False, False, True]


@pytest.mark.parametrize("every", ["5b", pytest.param("0.1s", marks=pytest.mark.slow)])
def test_processes_change_the_method_together_and_save_around_it(every, tmp_path, offbeat: Command):
    train_here(offbeat, *RUN, "--engine", "simulate", *WARM, "--out", tmp_path / "whole")
    command = [PYTHON, "-m", "offbeat", "train", *RUN, *WARM, "--engine", "processes", "--checkpoint-every", every]
    done = subprocess.run(
        [*command, "--keep", "50", "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    made = [line["batch"] for line in lines(tmp_path / "run") if line["kind"] == "checkpoint"]
    if every == "5b":
        assert made == [*range(5, 65, 5)]  # the switch is after batch 40
    resumed = offbeat("train", "--resume", _at(tmp_path / "run", 40 if every == "5b" else made[0]), "--json")
    assert resumed.code == 0, resumed
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def _at(run: Path, batch: int) -> Path:
    """The run with that checkpoint as its newest, to be continued in one process."""
    config = json.loads((run / "config.json").read_text())
    config["recipe"]["engine"] = "simulate"
    (run / "config.json").write_text(json.dumps(config))
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in records if json.loads(line)["kind"] != "result"))
    (run / "model.safetensors").unlink()
    for made in (run / "checkpoints").iterdir():
        if int("".join(filter(str.isdigit, made.name))) > batch:
            for file in made.iterdir():
                file.unlink()
            made.rmdir()
    return run


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--method", "bp", "--staleness-warmup", "5"], "bp takes no staleness_warmup"),
        (
            ["--staleness-warmup", "bp"],
            "--staleness-warmup bp: use the number of updates of back-propagation, or methods",
        ),
        (["--staleness-warmup", "-3"], "--staleness-warmup -3: use a number of updates from 1 up"),
        (["--staleness-warmup", "5", "--method", "adl:staleness_warmup=6"], "given separately: give it once"),
        (
            ["--method", "adl:M=1", "--staleness-warmup", "nag-async@3", "--optimizer", "adamw"],
            "corrector nag with --optimizer adamw: use one of sgd, muon, nadam",
        ),
        (
            ["--method", "adl:M=1", "--staleness-warmup", "nag-async@3", "--momentum", "0"],
            "corrector nag with --momentum 0: it needs the momentum of SGD",
        ),
    ],
)
def test_a_warmup_that_is_not_possible_is_refused(given, words, offbeat: Command):
    check_refused(offbeat, ("train", *RUN, *given), words)
