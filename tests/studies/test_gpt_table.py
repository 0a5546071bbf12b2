"""The table of a GPT with late gradients: rows that differ in staleness alone; validation losses instead of errors."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import Command, Outcome, check_refused

from offbeat.methods import with_settings
from offbeat.recommended import correctors_by_optimizer
from offbeat.runs import round_robin as turns
from offbeat.runs import tables as recipes
from offbeat.runs.build import Facts, choose_cuts
from offbeat.runs.optimizers import OPTIMIZERS
from offbeat.runs.record import lines
from offbeat.runs.tables.gpt import CORRECTORS, GPT_OPTIMIZERS, RATES, GPTSetting, gpt_table

SMALL = GPTSetting(
    model="gpt:layers=2,width=16,heads=2,context=8", batch=16, updates=3, epochs=4, stages=(3,)
)  # 12 updates of 16 sequences
TWO = "adamw-bp-k3,adamw-adl-1f1b-k3-m4"


@pytest.fixture(autouse=True)
def text(monkeypatch, tmp_path_factory) -> Path:
    monkeypatch.setitem(recipes.TABLES, "gpt-staleness", gpt_table(SMALL))
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 6000, dtype=np.uint8)))
    return path


def reproduce(offbeat: Command, text: Path, *arguments: object, out: str = "x", only: str = TWO) -> Outcome:
    where = ("--out", out, "--data", text, "--only", only, "--engine", "simulate")
    outcome = offbeat("reproduce", "gpt-staleness", *where, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def results(out: str = "x") -> dict:
    found: dict = json.loads((Path(out) / "results.json").read_text())
    return {row["name"]: row for row in found["rows"]}


# ---- the rows


def test_rows_differ_from_their_bp_in_method_and_m_alone():
    table = gpt_table(GPTSetting())
    made = {row.name: row.recipe() for row in table.rows}
    assert len(made) == len(table.rows)
    for row in table.rows:
        recipe = made[row.name]
        assert recipe.make_method().check(recipe.K) is None
        assert (recipe.samples_per_update, recipe.batch_size, recipe.clip_norm) == (64, 64 // recipe.M, 1.0)
        assert recipe.epochs * recipe.samples // 64 == 3000
        assert recipe.checkpoint_mode == "in-flight", "draining would remove staleness"
        if recipe.method == "bp":
            assert row.baseline is None
            continue
        other = made[row.baseline].as_dict()
        differing = {name for name, value in recipe.as_dict().items() if other[name] != value}
        assert differing <= {"method", "settings", "batch_size"}


def test_rows_whose_m_cannot_split_the_samples_of_an_update_are_left_out():
    def of_2bw(batch: int) -> set[int]:
        made = [row.recipe() for row in gpt_table(GPTSetting(batch=batch)).rows]
        return {recipe.K for recipe in made if recipe.method == "2bw"}

    assert of_2bw(16) == {12, 4}, "at K=24 it needs M=32"
    assert of_2bw(32) == {12, 4, 24}


def test_late_rows_have_the_best_rate_of_bp_and_the_usual_one():
    setting = GPTSetting(stages=(12, 4), best_rates={"muon": 2.0})
    made = {row.name: row for row in gpt_table(setting).rows if "-adl-1f1b-" in row.name}
    usual = OPTIMIZERS["muon"].lr(64, 1)
    rates = {name: row.recipe().lr / usual for name, row in made.items() if name.startswith("muon") and "-m16" in name}
    assert rates == {
        "muon-adl-1f1b-k12-m16-double-rate": 2.0,
        "muon-adl-1f1b-k12-m16-corrected-double-rate": 2.0,
        "muon-adl-1f1b-k12-m16-corrected-warmup-double-rate": 2.0,
        "muon-adl-1f1b-k12-m16": 1.0,
        "muon-adl-1f1b-k12-m16-corrected": 1.0,
        "muon-adl-1f1b-k12-m16-corrected-warmup": 1.0,
        "muon-adl-1f1b-k4-m16-double-rate": 2.0,
        "muon-adl-1f1b-k4-m16-corrected-double-rate": 2.0,
        "muon-adl-1f1b-k4-m16-corrected-warmup-double-rate": 2.0,
        "muon-adl-1f1b-k4-m16": 1.0,
        "muon-adl-1f1b-k4-m16-corrected": 1.0,
        "muon-adl-1f1b-k4-m16-corrected-warmup": 1.0,
    }
    assert [made[f"muon-adl-1f1b-k{K}-m16{rate}"].tier for K in (12, 4) for rate in ("-double-rate", "")] == [
        1,
        2,
        3,
        5,
    ]
    assert made["muon-adl-1f1b-k12-m16-double-rate"].baseline == "muon-bp-k12-double-rate"
    assert not [name for name in made if name.startswith("adamw") and name.endswith("-rate")]


def test_rows_of_one_k_have_the_same_cuts_whatever_m_is():
    """Between layers, bytes of parameters count beside FLOPs, so cuts depend on the samples."""
    setting = GPTSetting(model="gpt:layers=3,width=64,heads=4,context=32", stages=(8,))
    made = {row.name: row.recipe() for row in gpt_table(setting).rows}
    bp, late = made["adamw-bp-k8"], made["adamw-2bw-k8-m8"]
    same = choose_cuts(bp, Facts((32,), 256, 6400))
    assert same["units"] == "layers"
    assert choose_cuts(late, Facts((32,), 256, 6400)) == same
    alone = replace(late, batch_size=1, batch_per_update=None)
    assert choose_cuts(alone, Facts((32,), 256, 6400)) != same


def test_rows_with_12_stages_and_bp_at_three_rates_come_first():
    order = [row for row, _ in gpt_table(GPTSetting()).order(1)]
    first = [row.name for row in order if row.tier <= 2]
    assert first == [row.name for row in order[: len(first)]]
    assert {row.recipe().K for row in order[: len(first)]} == {12}
    for name in GPT_OPTIMIZERS:
        rates = sorted(row.recipe().lr for row in order if row.name.startswith(f"{name}-bp-k12"))
        assert rates == pytest.approx(sorted(rate * OPTIMIZERS[name].lr(64, 1) for rate in RATES))


def test_rows_with_named_correctors_are_of_optimizers_that_auto_gives_none():
    chosen = correctors_by_optimizer(with_settings("adl-1f1b", {"M": 1, "corrector": "auto"}), 12)
    titles = [name for names, found in chosen.items() if found == "stages 1-12 none" for name in names.split(", ")]
    assert [OPTIMIZERS[name].title for name in CORRECTORS] == titles
    assert CORRECTORS["nadam"] in chosen["Adam, AdamW, Muon, RotatedAdam"]


def test_rows_on_a_gpu_have_bf16_unless_another_precision_is_given():
    row = gpt_table(SMALL).rows[0]
    assert [row.recipe(**given).precision for given in ({}, {"device": "cuda"}, {"precision": "bf16"})] == [
        "fp32",
        "bf16",
        "bf16",
    ]
    assert row.recipe(device="cuda", precision="fp32").precision == "fp32"


# ---- runs


def test_bp_and_a_late_row_end_with_losses_and_their_difference(offbeat, text):
    outcome = reproduce(offbeat, text, "--seeds", 2)
    rows = results()
    for name, row in rows.items():
        ends = [
            next(line for line in lines(Path(f"x/runs/{name}-seed{seed}")) if line["kind"] == "result")
            for seed in (0, 1)
        ]
        losses = [end["loss"] for end in ends]
        assert row["loss"] == pytest.approx(sum(losses) / 2)
        assert row["loss_range"] == [min(losses), max(losses)]
        assert row["error"] == pytest.approx(row["loss"] / math.log(2)), "bits per byte"
        assert row["setting"].startswith(f"K=3, M={4 if 'm4' in name else 1}, b={4 if 'm4' in name else 16}, 16 per up")
    bp, late = rows["adamw-bp-k3"], rows["adamw-adl-1f1b-k3-m4"]
    assert bp["difference"] is None
    assert late["difference"] == pytest.approx(late["loss"] - bp["loss"])
    lowest, highest = late["loss_range"]
    assert re.search(rf"k3-m4 +{late['loss']:.3f} \({lowest:.3f}-{highest:.3f}\) +2 +[+-]0\.\d+ ", outcome.out)
    assert "lower is better" in outcome.out
    assert "an epoch has 3 updates of 16 samples" in outcome.out
    page = Path("x/table.md").read_text()
    assert "| row | loss | lowest | highest | n | to BP | bits per byte | tokens/s | state | setting |" in page
    assert "error" not in outcome.out + page
    assert "paper" not in outcome.out + page


def test_a_late_row_stopped_in_the_middle_continues_to_the_same_bits(offbeat, text, monkeypatch):
    late = "adamw-adl-1f1b-k3-m4"
    reproduce(offbeat, text, "--seeds", 1, only=late, out="whole")
    real, taken = turns.RoundRobin._turn, []

    def turn(self, name):
        taken.append(name)
        if len(taken) == 2 * 3 * 4 + 5:  # in the third epoch
            self.until = time.monotonic() - 1
        real(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(turns.RoundRobin, "_turn", turn)
        reproduce(offbeat, text, "--seeds", 1, "--budget-minutes", 60, only=late)
    assert results()[late]["runs"][0]["state"] == "under way"
    outcome = reproduce(offbeat, text, "--seeds", 1, only=late)
    assert "1 done of 1 runs" in outcome.out
    (resumed,) = [line for line in lines(Path(f"x/runs/{late}-seed0")) if line["kind"] == "resumed"]
    assert (resumed["batch"], resumed["exact"]) == (24, True)
    there, here = (Path(out) / f"runs/{late}-seed0/model.safetensors" for out in ("whole", "x"))
    assert there.read_bytes() == here.read_bytes()


def test_another_text_than_that_of_earlier_runs_is_refused_in_one_line(offbeat, text):
    reproduce(offbeat, text, "--seeds", 1, "--epochs", 1, only="adamw-bp-k3")
    other = text.with_name("other.txt")
    other.write_bytes(text.read_bytes()[::-1])
    given = ("reproduce", "gpt-staleness", "--out", "x", "--data", other, "--seeds", 2, "--only", "adamw-bp-k3")
    check_refused(offbeat, given, "--data has another text than the runs in x")
    check_refused(offbeat, (*given, "--dry-run"), "--data has another text than the runs in x")


def test_other_samples_per_update_apply_to_all_rows_and_are_noted(offbeat, text):
    outcome = reproduce(offbeat, text, "--seeds", 1, "--epochs", 1, "--batch-per-update", 8)
    settings = {row["setting"] for row in results().values()}
    assert settings == {"K=3, M=1, b=8, 8 per update, lr=0.001", "K=3, M=4, b=2, 8 per update, lr=0.001"}
    assert "8 samples per update instead of those of the rows" in outcome.out
    assert "an epoch has 6 updates of 8 samples" in outcome.out
    given = ("reproduce", "gpt-staleness", "--only", TWO, "--batch-per-update", 6, "--out", "y", "--data", text)
    check_refused(offbeat, given, "--batch-per-update 6 with M = 4", "cannot be split into 4 equal batches")


def test_the_report_shows_losses(offbeat, text, pictures):
    reproduce(offbeat, text, "--seeds", 1)
    rows = results()
    report = offbeat("report", "x", "--out", "report.html")
    assert report.code == 0, report.err
    page = Path("report.html").read_text()
    for words in ("Validation loss", "nats per token", f"{rows['adamw-bp-k3']['loss']:.3f}", "late minus BP"):
        assert words in page
