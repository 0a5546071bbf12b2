"""Training runs with the optimizers for late gradients: engines, resuming and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from command import Command, weights
from run_folders import stopped

import offbeat
from offbeat.correctors.optimizer_rules import RULES, AdamRule
from offbeat.errors import UserError
from offbeat.runs.begin import begin
from offbeat.runs.build import check
from offbeat.runs.optimizers import described
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.record import lines

NAMES = ("muon", "rotated-adam")
GPT = "gpt:layers=2,width=16,heads=2,context=8"


def recipe(name: str, **given: Any) -> Recipe:
    fixed = {"model": GPT, "samples": 62, "batch_size": 4, "K": 3, "M": 2, "engine": "simulate", "optimizer": name}
    return make_recipe(**{**fixed, "data_dir": str(Path(__file__)), "threads_per_stage": 1, **given})


QUICK = ("muon",)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_processes_and_resumed_runs_give_the_bits_of_simulate(tmp_path, name):
    offbeat.train(recipe(name), out=tmp_path / "simulate")
    offbeat.train(recipe(name, engine="processes"), out=tmp_path / "processes")
    assert weights(tmp_path / "processes") == weights(tmp_path / "simulate")
    stopped(recipe(name, checkpoint_every="5b"), tmp_path / "resumed", 12)
    offbeat.train(resume=tmp_path / "resumed")
    assert [(line["batch"], line["exact"]) for line in lines(tmp_path / "resumed") if line["kind"] == "resumed"] == [
        (10, True)
    ]
    assert weights(tmp_path / "resumed") == weights(tmp_path / "simulate")


@pytest.mark.parametrize("name", NAMES)
def test_another_cut_keeps_the_state_of_the_optimizer(tmp_path, name):
    made = recipe(name, checkpoint_every="4b", checkpoint_mode="drained")
    stopped(made, tmp_path / "run", 9)
    other = check(recipe(name, K=2, checkpoint_every="4b", checkpoint_mode="drained"))[0]
    run = begin(other, tmp_path / "run", show=False, folder_ready=True, rewrite=True)
    for stage in run.pipe.stages.values():
        optimizer = stage.optimization.optimizer
        assert len(optimizer.state) == len(stage.parameters)
        assert all(torch.any(state["exp_avg"] != 0) for state in optimizer.state.values())
    run.close()


def test_the_command_line_takes_muon(tmp_path, offbeat: Command):
    out = tmp_path / "run"
    options = ("--model", "resnet8", "--data", "synthetic", "--shape", "3,8,8", "--samples", "32", "--epochs", "1")
    offbeat("train", *options, "--optimizer", "muon", "--momentum", "0.9", "--out", out)
    made = json.loads((out / "config.json").read_text())["recipe"]
    settings = ("optimizer", "lr", "momentum", "betas", "weight_decay")
    assert [made[name] for name in settings] == ["muon", 3e-3, 0.9, [0.9, 0.95], 0.1]


@pytest.mark.parametrize("optimizer", ["adamw", "rotated-adam"])
def test_a_corrector_is_refused_with_the_optimizers_that_it_works_with(optimizer):
    """rotated-adam was refused where training began, and muon was not among those to use."""
    with pytest.raises(UserError, match=f"^corrector nag with optimizer='{optimizer}': use one of sgd, muon, nadam$"):
        make_recipe(optimizer=optimizer, corrector="nag", K=2)


def test_only_sgd_needs_a_momentum_above_zero_for_a_corrector():
    assert make_recipe(optimizer="muon", momentum=0.0, corrector="sc", K=2).momentum == 0
    with pytest.raises(UserError, match="corrector sc with momentum=0: it needs the momentum of SGD"):
        make_recipe(momentum=0.0, corrector="sc", K=2)


def test_a_rule_declares_the_options_that_its_correctors_need(monkeypatch):
    """A recipe knew the need of SGD by its name."""

    class Decaying(AdamRule):
        between: ClassVar[dict[str, tuple[float, float]]] = {"weight_decay": (0.0, 0.5)}

    monkeypatch.setitem(RULES, "AdamW", Decaying)
    for decay in (0.0, 0.5):
        needed = "it needs the weight_decay of AdamW, use one above 0 and below 0.5"
        with pytest.raises(UserError, match=f"corrector sc with weight_decay={decay:g}: {needed}"):
            recipe("adamw", corrector="sc", weight_decay=decay)
        recipe("adamw", corrector="lookahead", weight_decay=decay)  # needs nothing of the optimizer
        recipe("nadam", corrector="sc", weight_decay=decay)
    assert recipe("adamw", corrector="sc", weight_decay=0.1).corrector == "sc"


@pytest.mark.parametrize("momentum", [0.0, 1.0, 1.5])
def test_the_rule_of_sgd_refuses_the_momentum_that_a_recipe_refuses(momentum):
    made = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=momentum)
    assert RULES["SGD"](made).unsupported_options() is not None
    line = f"corrector sc with momentum={momentum:g}: it needs the momentum of SGD, use one above 0 and below 1"
    with pytest.raises(UserError, match=line):
        recipe("sgd", corrector="sc", momentum=momentum)


def test_an_optimizer_is_described_with_its_settings():
    assert described(recipe("muon")) == "Muon, lr 0.003, momentum 0.95, betas 0.9 0.95, weight decay 0.1"
