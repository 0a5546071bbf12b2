"""Small shares of what `make torture` tries, and what it has found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from offbeat.checkpoint import newest
from offbeat.runs import launch
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import make_recipe
from offbeat.runs.resuming import restore
from offbeat.runs.saving import Saver

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("count", [50, pytest.param(100, marks=pytest.mark.slow)])
def test_random_configurations_end_as_documented(configs, tmp_path, count):
    found, faults = configs.attempt(count, 0, tmp_path / "here")
    assert not faults
    assert found["valid"] >= count // 4
    assert found["invalid"] >= 2 * count // 5


def test_the_statement_of_what_is_valid_can_be_contradicted(configs):
    """The checks of an outcome fail where they must."""
    assert configs.fault("valid", 2, "", "offbeat: no\n")
    assert configs.fault("invalid", 0, "{}", "")
    assert configs.fault("invalid", 2, "", "offbeat: no\nand no\n")
    assert configs.fault("invalid", 2, "", "Traceback\n")
    assert configs.fault("unclear", "ValueError", "", "")
    assert configs.fault("valid", 0, "{}", "") is None


def test_extreme_numbers_and_files_are_refused_in_one_line_or_work(configs, tmp_path, monkeypatch):
    configs.folder(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for option, value in (*configs.EXTREME, ("--config", "deep.json")):
        arguments = configs.command({"--model": "mlp", "--data": "synthetic", option: value})
        assert configs.fault("unclear", *configs.tried(arguments)) is None, (option, value[:40])


def test_hybrid_resumes_bit_for_bit_where_checkpoints_are_closer_than_the_lag(tmp_path):
    K = 3

    def make() -> offbeat.Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(K)))
        return offbeat.Pipeline(
            model,
            K,
            method=offbeat.ADL(M=2, weights="hybrid"),
            loss=nn.functional.mse_loss,
            cuts=[1, 2],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            engine="simulate",
        )

    def train(pipe: offbeat.Pipeline, batches: range, saver: Saver | None = None) -> None:
        for t in batches:
            if saver:
                saver.before(t)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(t))
            pipe.step(x, x.flip(1))
            if saver and saver.due(t + 1):
                saver.save({})

    whole, saved, again = make(), make(), make()
    train(whole, range(20))
    recipe = make_recipe(model="mlp", data="synthetic", K=K, M=2, weights="hybrid", checkpoint_every="5b")
    train(saved, range(15), Saver(recipe, Epochs(samples=1000, batch_size=1), saved, tmp_path, lambda *_, **__: None))
    restore(again, recipe, str(newest(tmp_path)[0].path), recipe.as_dict(), same=True)
    train(again, range(15, 20))
    there = again.drain().state_dict()
    for name, tensor in whole.drain().state_dict().items():
        assert torch.equal(tensor, there[name]), name
