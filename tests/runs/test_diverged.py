"""Runs whose loss is not finite."""

from __future__ import annotations

import json

import pytest
from command import Command, train_here

from offbeat import checkpoint
from offbeat.pipeline import Pipeline
from offbeat.runs.history import History
from offbeat.runs.record import lines


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_test_loss_that_is_not_finite_prevents_no_checkpoint(loss, tmp_path, offbeat: Command, monkeypatch):
    """The checkpoint was not written, since its run.json could not have the loss."""
    evaluating = Pipeline.evaluating

    def diverged(self, *given, **options):
        found = yield from evaluating(self, *given, **options)
        return {**found, "loss": loss}

    monkeypatch.setattr(Pipeline, "evaluating", diverged)
    given = ["--model", "resnet8", "--data", "synthetic", "--samples", "64", "--batch-size", "16", "--shape", "3,8,8"]
    given += ["-K", "2", "--engine", "simulate", "--epochs", "1", "--checkpoint-every", "1e", "--out", tmp_path / "run"]
    assert "checkpoint failed" not in train_here(offbeat, *given)
    newest, _ = checkpoint.newest(tmp_path / "run")
    assert newest is not None
    assert str(newest.run()["test"]["loss"]) == str(loss)
    monkeypatch.undo()
    train_here(offbeat, "--resume", tmp_path / "run", "--epochs", "2")
    assert lines(tmp_path / "run")[-1]["kind"] == "result"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1.5])
def test_figures_that_are_not_finite_are_numbers_again_after_a_checkpoint(loss):
    """A mean over texts ended the resumed epoch."""
    saved = History(rows=[{"loss": loss, "error": None, "samples": 4}], test={"loss": loss}).as_dict()
    found = History.of(json.loads(json.dumps(saved, allow_nan=False)))
    assert str(found.train_means()["loss"]) == str(loss)
    assert str(found.test["loss"]) == str(loss)
    assert isinstance(found.test["loss"], float)
