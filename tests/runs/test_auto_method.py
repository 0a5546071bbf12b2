"""make_recipe(method="auto") and --method auto: a recipe that has what was chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import check_refused
from fixed_times import fix_times

import offbeat
from offbeat.runs import measuring
from offbeat.runs.recipe import make_recipe
from offbeat.runs.record import lines

SMALL: dict[str, Any] = {
    "model": "mlp",
    "data": "synthetic",
    "shape": (3, 4, 4),
    "classes": 3,
    "samples": 64,
    "epochs": 1,
    "threads_per_stage": 1,
    "engine": "simulate",
}
OPTIONS = ("--model", "mlp", "--data", "synthetic", "--shape", "3,4,4", "--classes", 3, "--samples", 64, "--epochs", 1)


@pytest.fixture
def times(monkeypatch):
    return fix_times(monkeypatch, measuring)


def recipe(run: str | Path) -> dict[str, Any]:
    return json.loads((Path(run) / "config.json").read_text())["recipe"]


def test_a_recipe_has_the_chosen_method_and_trains_it(times, tmp_path):
    auto = make_recipe(**SMALL, K=3, method="auto", batch_per_update=16, optimizer="adamw")
    by_hand = make_recipe(
        **SMALL, K=3, method="adl-1f1b", M=4, corrector="auto", batch_per_update=16, optimizer="adamw"
    )
    assert (auto, auto.batch_size, times) == (by_hand, 4, [16, 8, 4, 2])
    offbeat.train(auto, out=tmp_path / "run")
    (record,) = (line for line in lines(tmp_path / "run") if line["kind"] == "correctors")
    assert record["stages"] == ["lookahead:least=1+sc", "lookahead:least=1+sc", "none"]


def test_one_stage_and_a_given_m_need_no_measurement(times):
    alone = make_recipe(**SMALL, K=1, method="auto", batch_per_update=16)
    assert (alone.method, alone.M, alone.batch_size, alone.corrector) == ("bp", 1, 16, None)
    given = make_recipe(**SMALL, K=3, method="auto", M=2, corrector="sc", batch_per_update=16)
    assert (given.method, given.M, given.batch_size, given.corrector) == ("adl-1f1b", 2, 8, "sc")
    assert times == []


def test_settings_of_auto_that_have_no_use_with_one_stage_are_left_out():
    plain = make_recipe(**SMALL, K=1, method="auto", batch_per_update=16)
    for settings in ({"staleness_warmup": 7}, {"staleness_warmup": 0}, {"latency": 0.1}):
        assert make_recipe(**SMALL, K=1, method="auto", batch_per_update=16, settings=settings) == plain


def test_a_long_latency_chooses_the_lag_of_adl(times):
    assert make_recipe(**SMALL, K=3, method="auto", batch_per_update=16, latency=1.3).method == "adl-1f1b"
    assert make_recipe(**SMALL, K=3, method="auto", batch_per_update=16, latency=1.4).method == "adl"


def test_without_samples_per_update_every_batch_is_an_update():
    with pytest.warns(offbeat.LateGradients, match="without batch_per_update=: M=1, every batch is an update"):
        found = make_recipe(**SMALL, K=3, method="auto")
    assert (found.method, found.M, found.batch_size, found.corrector) == ("adl-1f1b", 1, 32, "auto")
    assert found.staleness_warmup is None  # of 2 updates
    late = make_recipe(**SMALL, K=3, method="auto", M=1, staleness_warmup=0)
    assert not late.make_method().staleness_warmup


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"M": 1, "epochs": 2000}, 300),  # of 4,000
        ({"M": 1, "epochs": 100}, 20),
        ({"M": 1, "epochs": 100, "replicas": 2, "batch_size": 16}, 20),
        ({"M": 1, "epochs": 100, "batch_per_update": 16}, 40),
        ({"M": 1, "epochs": 100, "batch_per_update": 24}, 30),  # the last one of an epoch is short
        ({"M": 1, "epochs": 100, "batch_per_update": 24, "drop_last": True}, 20),
        ({"M": 2, "epochs": 100, "batch_size": 4, "K": 6}, 80),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_run_begins_with_at_most_a_tenth_of_its_updates_synchronous(settings, updates):
    """A run that was shorter than its synchronous start was synchronous to its end, without a word."""
    found = make_recipe(**{**SMALL, "K": 3, "method": "auto", "engine": None, **settings})
    assert found.staleness_warmup == updates
    assert make_recipe(**{**SMALL, "K": 3, "method": "auto", "engine": None, **settings, "staleness_warmup": 7}) == (
        replace(found, settings={**found.settings, "staleness_warmup": 7})
    )


def test_the_number_of_updates_follows_from_the_measured_batches(monkeypatch):
    monkeypatch.setattr(measuring, "batch_seconds", lambda model, sample, **options: lambda size: 1.0)
    found = make_recipe(**{**SMALL, "K": 3, "epochs": 100}, method="auto", batch_per_update=16)
    assert (found.M, found.staleness_warmup) == (1, 40)


def test_an_update_of_two_epochs_is_split_into_batches_that_an_epoch_has(times):
    found = make_recipe(**{**SMALL, "epochs": 100}, K=3, method="auto", batch_per_update=128)
    assert (found.batch_size, found.count(64).per_epoch) == (128 // found.M, found.M // 2)
    assert make_recipe(**{**SMALL, "epochs": 100}, K=6, method="auto", batch_per_update=128, M=2).staleness_warmup == 5


def test_a_run_that_is_resumed_keeps_its_synchronous_start(offbeat):
    arguments = ("train", *OPTIONS[:-1], 10, "-K", 3, "--engine", "simulate", "--method", "auto", "-M", 1)
    outcome = offbeat(*arguments, "--batch-size", 16, "--checkpoint-every", "1e", "--out", "run")
    assert (outcome.code, "16 samples per batch, staleness warm-up 4" in outcome.err) == (0, True), outcome
    assert offbeat("train", "--resume", "run", "--method", "auto", "--epochs", 12).code == 0
    assert recipe("run")["settings"]["staleness_warmup"] == 4


def test_the_command_trains_and_resumes_what_was_chosen(offbeat, times):
    arguments = ("train", *OPTIONS, "-K", 3, "--engine", "simulate", "--method", "auto", "--batch-per-update", 16)
    outcome = offbeat(*arguments, "--checkpoint-every", "1e", "--out", "run")
    assert (outcome.code, "method auto: adl-1f1b, M=4, 4 samples per batch" in outcome.err) == (0, True), outcome
    times.clear()
    again = offbeat("train", "--resume", "run", "--method", "auto", "--epochs", 2)
    assert (again.code, times) == (0, []), again
    assert recipe("run")["settings"]["M"] == 4


def test_auto_is_compared_at_the_same_samples_per_update(offbeat, times):
    outcome = offbeat(
        "compare",
        *OPTIONS,
        "-K",
        3,
        "--methods",
        "bp,auto",
        "--batch-per-update",
        16,
        "--engine",
        "simulate",
        "--seeds",
        1,
    )
    assert outcome.code == 0, outcome
    (folder,) = Path("runs").iterdir()
    bp, auto = (recipe(path.parent) for name in ("bp", "auto") for path in folder.glob(f"{name}-*/config.json"))
    assert (auto["method"], auto["settings"]["M"], auto["batch_size"]) == ("adl-1f1b", 4, 4)
    assert (bp["settings"]["M"], bp["batch_size"], bp["lr"]) == (1, 16, auto["lr"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "auto:latency=-1", "--batch-per-update", 16), ("latency=-1", "seconds from 0 up")),
        (("--method", "auto:m=3", "--batch-per-update", 16), ("auto takes no m (given: 3)", "its settings are M, ")),
        (
            ("--method", "auto:pipelined=yes", "-K", 1),
            ("auto takes no pipelined (given: yes)", "staleness_warmup, latency"),
        ),
        (("--method", "auto", "-M", 3, "--batch-per-update", 16), ("--batch-per-update 16", "multiple of 3")),
    ],
)
def test_wrong_settings_of_auto_are_refused_in_one_line(offbeat, arguments, words):
    check_refused(offbeat, ("train", *OPTIONS, "-K", 3, *arguments), *words)
