"""`offbeat reproduce`: runs go on bit for bit wherever they were stopped, and failures are rows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, Outcome, check_refused
from PIL import Image
from small_recipe import small

from offbeat import checkpoint, models
from offbeat.engines.simulate import Simulate
from offbeat.report.reproduction import read_seed_run
from offbeat.runs import build
from offbeat.runs import round_robin as turns
from offbeat.runs import tables as recipes
from offbeat.runs.begin import begin
from offbeat.runs.recipe import make_recipe
from offbeat.runs.saving import Saver
from offbeat.runs.tables import TABLES, Images, Paper, Table, TableRow
from offbeat.runs.training_run import TrainingRun
from offbeat.studies import reproduce as reproducing
from offbeat.studies.training import interrupting

net_adl = TableRow(
    name="net-adl",
    title="Net, ADL",
    make=partial(small, "adl", K=3, M=2),
    paper=Paper(6.18, "Table 0, first"),
)
net_diverges = TableRow(
    name="net-diverges",
    title="Net, BP at a rate that is too high",
    make=lambda **given: small("bp", M=2, **{**given, "lr": 1e30, "warmup": 0.0}),
    paper=Paper(None, "Table 0, second", remark="a remark"),
    tier=2,
)
other_hybrid = TableRow(
    name="other-hybrid",
    title="Other, ADL with hybrid weights",
    make=partial(small, "adl", K=2, M=2, weights="hybrid"),
    tier=3,
)


SMALL = Table(name="small", title="Small", rows=(net_adl, net_diverges, other_hybrid))


@pytest.fixture
def table(monkeypatch) -> None:
    monkeypatch.setitem(recipes.TABLES, "small", SMALL)
    monkeypatch.setitem(recipes.TABLES, "smaller", Table(name="smaller", title="Smaller", rows=(net_adl,)))


def reproduce(offbeat: Command, *arguments: object, out: str = "x", seeds: int = 1) -> Outcome:
    return offbeat("reproduce", "small", "--out", out, "--seeds", seeds, *arguments)


def weights(out: str, run: str) -> bytes:
    return (Path(out) / "runs" / run / "model.safetensors").read_bytes()


def results(out: str = "x") -> dict[str, dict]:
    return {found["name"]: found for found in json.loads((Path(out) / "results.json").read_text())["rows"]}


def told(out: str, run: str) -> list[tuple]:
    """What the epochs of a run recorded, without times."""
    found = read_seed_run(Path(out) / "runs" / run, 0)
    return [*found.errors, found.error]


def spend_budget_after(monkeypatch, turns_taken: int) -> None:
    """The clock of the budget jumps once so many turns are taken, wherever the runs are then."""
    real, taken = turns.RoundRobin._turn, []

    def turn(self, name):
        taken.append(name)
        if len(taken) == turns_taken:
            self.until = time.monotonic() - 1
        real(self, name)

    monkeypatch.setattr(turns.RoundRobin, "_turn", turn)


# ---- the published rows


def test_every_row_of_a_table_has_a_complete_recipe():
    for found in TABLES.values():
        names = [one.name for one in found.rows]
        assert len(names) == len(set(names))
        for one in found.rows:
            recipe = one.recipe(seed=2)
            assert models.find(recipe.model)
            assert recipe.make_method().check(recipe.K) is None
            assert (recipe.checkpoint_mode, recipe.keep, recipe.seed) == (one.checkpoint_mode, 1, 2)
            if one.paper:
                assert one.checkpoint_mode == "drained"
                assert one.name.startswith(recipe.model.removesuffix("-cifar"))
            assert one.title


def test_every_adl_row_has_a_bp_row_with_accumulation_at_the_same_batch_and_m():
    for found in (TABLES["cifar10-table"], TABLES["ablation"], TABLES["imagenet-table"]):
        made = [(one, one.recipe()) for one in found.rows]
        settings = {one.name: (recipe.model, recipe.M, recipe.batch_size, recipe.lr) for one, recipe in made}
        baselines = {setting for name, setting in settings.items() if "-bp-" in name}
        for one, _ in made:
            if one.paper and "-adl-" in one.name:
                assert settings[one.name] in baselines, one.name


@pytest.mark.parametrize(
    ("name", "usual", "drops", "decay"),
    [
        ("cifar10-table", 300, (150, 225, 275), 5e-4),
        ("imagenet-table", 90, (30, 60, 80), 1e-4),
    ],
)
def test_the_schedule_is_the_papers_and_its_drops_stay_in_proportion(name, usual, drops, decay):
    first = TABLES[name].rows[0]
    for epochs in (usual, usual // 3):
        recipe = first.recipe(epochs=None if epochs == usual else epochs)
        assert (recipe.epochs, recipe.warmup, recipe.weight_decay, recipe.momentum) == (epochs, 3.0, decay, 0.9)
        assert (recipe.batch_size, recipe.lr) == (32, 0.1 * 32 * recipe.M / 256)
        factor = recipe.learning_rate(recipe.count(100 * recipe.M * recipe.batch_size))  # an epoch has 100 updates
        for count, drop in enumerate(drops):
            at = round(drop * epochs / usual * 100)
            assert factor(at - 1) == pytest.approx(0.1**count)
            assert factor(at) == pytest.approx(0.1 ** (count + 1))


def test_the_most_valuable_runs_come_first_and_their_other_seeds_before_what_is_less():
    order = [(one.name, seed) for one, seed in TABLES["cifar10-table"].order(3)]
    assert [name for name, _ in order[:5]] == [
        "resnet56-adl-k8-m4",
        "resnet56-adl-k8-m1",
        "resnet56-adl-k8-m1-sc",
        "resnet56-adl-k8-m4-sc",
        "resnet56-bp-m4",
    ]
    assert {seed for _, seed in order[:11]} == {0}
    assert order.index(("resnet56-adl-k8-m4", 2)) < order.index(("resnet56-adl-k8-m4-hybrid", 0))
    assert order.index(("resnet56-adl-k28-m4-sc", 0)) < order.index(("resnet18-adl-k8-m4", 0))
    assert order.index(("resnet18-adl-k8-m4", 0)) < order.index(("resnet110-adl-k8-m4", 0))
    assert len(order) == 3 * len(TABLES["cifar10-table"].rows)


def test_what_differs_from_the_papers_rows_is_what_their_names_say():
    named = {one.name: one.recipe() for one in TABLES["cifar10-table"].rows}

    def values(name: str) -> dict:
        return {**named[name].as_dict(), "corrector": None, **named[name].settings, "settings": None}

    plain = values("resnet56-adl-k8-m4")

    def changed(name: str) -> dict:
        return {key: value for key, value in values(name).items() if plain[key] != value}

    assert changed("resnet56-adl-k8-m4-sc") == {"corrector": "sc"}
    assert changed("resnet56-adl-k8-m4-hybrid") == {"weights": "hybrid"}
    assert changed("resnet56-adl-k8-m4-fixed") == {"lr": 0.0125}
    assert changed("resnet56-adl-1f1b-k8-m4") == {"method": "adl-1f1b"}
    assert changed("resnet56-adl-k14-m4").pop("K") == 14


def test_images_have_rows_with_the_recommended_method_and_with_a_synchronous_start():
    rows = {one.name: one.recipe() for one in TABLES["imagenet-table"].rows}
    late, started, bp = (rows[f"resnet18-{end}"] for end in ("adl-1f1b-k8-m4-sc", "adl-1f1b-k8-m4-sc-warmup", "bp-m4"))
    assert (late.K, late.M, late.batch_size, late.lr, late.epochs) == (8, 4, bp.batch_size, bp.lr, bp.epochs)
    assert [one.name for one in late.make_method().correctors] == ["sc"]
    assert replace(late, settings=started.settings) == started
    assert started.make_method().staleness_warmup[0][1] == 150


def test_rows_are_listed_without_data_and_nothing_is_run(offbeat):
    outcome = offbeat("reproduce", "cifar10-table", "--only", "resnet18", "--list")
    assert outcome.code == 0
    assert "resnet18-adl-k8-m1" in outcome.out
    assert "5.50" in outcome.out
    assert "resnet56" not in outcome.out
    listed = json.loads(offbeat("reproduce", "imagenet-table", "--list", "--json").out)
    assert listed[0]["paper"]["top5"] == 10.55
    for changed in (("--batch-per-update", 256), ("--method", "adl:M=2")):  # as in the table of results
        given = ("reproduce", "cifar10-table", "--list", "--only", "resnet56-adl-k8-m4", *changed)
        assert {row["paper"] for row in json.loads(offbeat(*given, "--json").out)} == {None}
        assert "6.18" not in offbeat(*given).out
    assert not any(Path().iterdir())


@pytest.mark.parametrize("table", TABLES)
def test_a_listed_row_is_one_line_also_where_the_terminal_is_narrow(offbeat, table, monkeypatch):
    """Each went over up to eight lines of 80 columns."""
    monkeypatch.setenv("COLUMNS", "40")
    title, empty, heading, *rows = offbeat("reproduce", table, "--list").out.splitlines()
    assert (title.endswith("most important first"), empty, heading.split()[:5]) == (
        True,
        "",
        ["row", "K", "M", "b", "lr"],
    )
    assert [row.split()[0] for row in rows] == [row.name for row, seed in TABLES[table].order(1)]
    assert sum(len(row) > 80 for row in rows) < len(rows) / 10


def test_samples_per_update_need_to_fit_the_rows_that_are_run_alone(offbeat):
    """They had to fit the first row of the table, too, and the error did not name the row."""
    given = ("reproduce", "cifar10-table", "--list", "--batch-per-update")
    check_refused(offbeat, (*given, 128), "row resnet98-adl-k4-m3: --batch-per-update 128 with M = 3: 128 samples")
    only = {"only": "resnet98-bp-m3", "batch_per_update": 99, "seeds": 1, "together": 2, "running": {}}
    nothing = dict.fromkeys(("epochs", "minutes", "data", "out"))
    request = reproducing.ReproductionRequest(table="cifar10-table", **only, **nothing)
    asked = reproducing.settings_of(request, TABLES["cifar10-table"], None)
    assert (asked["batch_per_update"], asked["epochs"], asked["engine"]) == (99, 300, "simulate")


def test_more_processes_than_can_share_the_cores_are_refused_before_any_run(offbeat, monkeypatch):
    """Rows of fewer stages were trained, then those of 24 failed one by one."""
    monkeypatch.setattr("offbeat.runs.launch.cores", lambda: 2)
    given = ("reproduce", "small-gpt-staleness", "--only", "muon-bp-k12,muon-bp-k24", "--seeds", 1)
    check_refused(offbeat, given, "K=24: 24 processes on 2 cores, use 16 or fewer", "--engine simulate")


# ---- the table


def test_runs_are_run_folders_and_the_table_is_what_they_recorded(offbeat, table, pictures):
    outcome = reproduce(offbeat, "--side-by-side", 2, seeds=2)
    assert outcome.code == 0, outcome.err
    rows = results()
    assert list(rows) == ["net-adl", "net-diverges", "other-hybrid"]
    errors = [read_seed_run(Path(f"x/runs/net-adl-seed{seed}"), seed).error for seed in (0, 1)]
    first = rows["net-adl"]
    assert (first["n"], first["error"]) == (2, pytest.approx(sum(errors) / 2))
    assert first["error_range"] == [min(errors), max(errors)]
    assert first["difference"] == pytest.approx(first["error"] - 6.18)
    assert "4 done, 2 diverged of 6 runs" in outcome.out
    assert "a remark" in outcome.out
    lowest, highest = first["error_range"]
    assert re.search(rf"net-adl +6.18 +{first['error']:.2f} \({lowest:.2f}-{highest:.2f}\) +2 +\+", outcome.out)
    assert "took turns in one process" in outcome.out
    page = Path("x/table.md").read_text()
    assert "| net-adl | 6.18 |" in page
    assert "Table 0, first" in page
    for name in ("curves.png", "curves.svg", "curves-time.png", "curves-time.svg", "reproduction.json"):
        assert Path("x", name).stat().st_size > 0
    assert not list(Path("x").rglob("checkpoints")), "a finished run is small"
    again = reproduce(offbeat, "--json", seeds=2)
    assert json.loads(again.out)["rows"] == list(json.loads(Path("x/results.json").read_text())["rows"])


IMAGES = {
    "model": "resnet8",
    "data": "imagefolder",
    "shape": (3, 8, 8),
    "data_workers": 0,
    "K": 2,
    "M": 2,
    "batch_size": 4,
    "threads_per_stage": 1,
    "engine": "simulate",
    "epochs": 2,
}
net_images = TableRow(
    name="net-images",
    title="Net on images, ADL",
    make=lambda **given: make_recipe(**{**given, **IMAGES}),
    paper=Paper(29.75, "Table 0, images", top5=10.55, remark="a remark"),
)


def save_images(folder: Path, *, classes: int, train: int) -> None:
    for split, number in (("train", train), ("val", 2)):
        for n in range(classes * number):
            path = folder / split / f"class{n % classes}" / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(n).integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)


def test_the_papers_values_stand_beside_those_of_its_own_images_alone(offbeat, monkeypatch):
    save_images(Path("mine"), classes=3, train=4)
    save_images(Path("more"), classes=3, train=5)

    def made(images: Images, out: str, data: str = "mine") -> Outcome:
        shown = Table(name="small", title="Images", rows=(net_images,), top5=True, images=images)
        monkeypatch.setitem(recipes.TABLES, "small", shown)
        return reproduce(offbeat, "--data", data, out=out, seeds=2 if data == "more" else 1)

    same = made(Images(3, 12, 6), "same")
    assert same.code == 0, same.err
    assert results("same")["net-images"]["difference"] is not None
    assert re.search(r"net-images +29.75 ", same.out)
    assert "other images" not in same.out
    other = made(Images(1000, 1_281_167, 50_000), "other")
    assert results("other")["net-images"]["difference"] is None
    assert results("other")["net-images"]["error"] == results("same")["net-images"]["error"]
    assert "Images, on other images, 2 epochs" in other.out
    assert re.search(r"net-images +- ", other.out)
    assert "29.75" not in other.out + Path("other/table.md").read_text()
    assert "trained on 3 classes, 12 images to train and 6 to test with" in other.out
    page = Path("other/table.md").read_text()
    assert "Table 0, images" in page
    assert "medians of 3" not in page
    stored = json.loads(Path("other/reproduction.json").read_text())
    Path("other/reproduction.json").write_text(json.dumps({**stored, "images": None}))
    assert "29.75" not in made(Images(1000, 1_281_167, 50_000), "other").out, "looked at again where nobody knows"
    dry = offbeat("reproduce", "small", "--out", "other", "--data", "more", "--dry-run")
    assert (dry.code, "--data holds 3 classes, 15 images" in dry.err) == (2, True)
    refused = made(Images(3, 12, 6), "same", data="more")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--data holds 3 classes, 15 images to train" in refused.err
    assert "the runs in same have 3 classes, 12 images" in refused.err


def test_a_run_that_fails_on_its_data_names_the_data_without_its_folder(offbeat, monkeypatch):
    save_images(Path("mine"), classes=3, train=4)
    Path("mine/train/class0/0.png").write_text("no image")
    shown = Table(name="small", title="Images", rows=(net_images,), images=Images(3, 12, 6))
    monkeypatch.setitem(recipes.TABLES, "small", shown)
    outcome = reproduce(offbeat, "--data", "mine")
    assert outcome.code == 1
    assert "cannot decode the image DATA/train/class0/0.png" in outcome.out
    assert not any(str(Path.cwd()) in path.read_text() for path in Path("x").rglob("*.[jm][sd]*"))


def test_the_table_has_rows_of_other_invocations_and_reports_a_spent_budget(offbeat, table):
    reproduce(offbeat, "--only", "net-adl")
    outcome = reproduce(offbeat, "--only", "other-hybrid", "--budget-minutes", 1e-6)
    assert "the budget of 1e-06 minutes ended before a run began" in outcome.err
    settings = {name: found["setting"] for name, found in results().items()}
    assert settings == {"net-adl": "K=3, M=2, b=4, lr=0.003125", "other-hybrid": "K=2, M=2, b=4, lr=0.003125"}


def test_a_run_that_diverges_is_reported_in_its_row_and_the_others_continue(offbeat, table):
    outcome = reproduce(offbeat, "--side-by-side", 3)
    assert outcome.code == 0
    row = results()["net-diverges"]
    assert (row["n"], row["error"], row["runs"][0]["state"]) == (0, None, "diverged")
    assert "the loss of batch 2 is nan" in row["runs"][0]["reason"]
    assert results()["net-adl"]["n"] == results()["other-hybrid"]["n"] == 1
    assert re.search(r"net-diverges, seed 0: diverged in epoch 1", outcome.out)
    config = Path("x/runs/net-diverges-seed0")
    reproduce(offbeat)
    assert not list(config.glob("config-*.json")), "what diverged is a result, and is not run again"


def test_a_run_that_fails_otherwise_is_a_row_too_and_is_tried_again(offbeat, table, monkeypatch):
    real = begin

    def broken(recipe, *arguments, **options):
        if recipe.weights == "hybrid":
            raise RuntimeError("no memory left\nand more")
        return real(recipe, *arguments, **options)

    monkeypatch.setattr("offbeat.runs.begin.begin", broken)
    assert reproduce(offbeat).code == 1
    run = results()["other-hybrid"]["runs"][0]
    assert (run["state"], run["reason"]) == ("failed", "RuntimeError: no memory left")
    assert "Traceback" in Path("x/runs/other-hybrid-seed0/traceback.txt").read_text()
    monkeypatch.setattr("offbeat.runs.begin.begin", real)
    reproduce(offbeat)
    assert results()["other-hybrid"]["runs"][0]["state"] == "done"


# ---- side by side


def test_runs_side_by_side_are_bit_for_bit_those_that_run_alone(offbeat, table):
    before = torch.get_rng_state()
    assert reproduce(offbeat, out="alone").code == 0
    assert reproduce(offbeat, "--side-by-side", 3, out="together").code == 0
    for run in ("net-adl-seed0", "other-hybrid-seed0"):
        assert weights("alone", run) == weights("together", run)
        assert told("alone", run) == told("together", run)
        assert list(Path("together/runs", run).glob("events.out.*"))
    assert torch.equal(torch.get_rng_state(), before), "nobody draws from the global stream"


def test_a_run_of_a_reproduction_is_the_run_that_train_makes(offbeat, table):
    reproduce(offbeat, "--only", "net-adl")
    assert offbeat("train", "--config", "x/runs/net-adl-seed0/config.json", "--out", "again", "--json").code == 0
    assert Path("again/model.safetensors").read_bytes() == weights("x", "net-adl-seed0")


def test_each_run_has_its_own_number_of_threads_in_its_turns(tmp_path):
    seen: dict[int, set[int]] = {}

    class Counting(turns.RoundRobin):
        def _turn(self, name):
            super()._turn(name)
            if name in self.running:
                seen.setdefault(name, set()).add(torch.get_num_threads())

    def start(threads: int) -> TrainingRun:
        recipe = small("bp", epochs=1, threads_per_stage=threads)
        return begin(recipe, tmp_path / str(threads), show=False)

    Counting(start, lambda name, ending: None, together=2).all([1, 2])
    assert seen == {1: {1}, 2: {2}}


def test_a_budget_does_not_end_a_run_that_has_no_epoch_left(offbeat, table, monkeypatch):
    reproduce(offbeat, "--only", "net-adl", out="whole")
    spend_budget_after(monkeypatch, 4 * 7 + 6)  # epochs of six batches and an evaluation of six
    reproduce(offbeat, "--only", "net-adl", "--budget-minutes", 9, out="x")
    assert (Path("x/runs/net-adl-seed0") / "model.safetensors").exists()
    assert told("x", "net-adl-seed0") == told("whole", "net-adl-seed0")


def test_a_run_killed_after_its_last_epoch_only_writes_its_last_lines(offbeat, table, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        reproduce(offbeat, "--only", "net-adl", out="whole")
    newest = tmp_path / max(p.name for p in Path("whole/runs/net-adl-seed0/checkpoints").iterdir())
    shutil.move(Path("whole/runs/net-adl-seed0/checkpoints") / newest.name, newest)
    shutil.rmtree("whole/runs/net-adl-seed0/checkpoints")
    lines = Path("whole/runs/net-adl-seed0/metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "result"]
    killed = Path("whole/runs/net-adl-seed0")
    (killed / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    model = (killed / "model.safetensors").read_bytes()
    assert read_seed_run(killed, 0).state == "done"
    (killed / "model.safetensors").unlink()
    assert read_seed_run(killed, 0).error == json.loads(lines[-1])["error"]
    assert "1 of 1 runs are done" in reproduce(offbeat, "--only", "net-adl", out="whole").err  # with no checkpoint
    shutil.copytree(newest, killed / "checkpoints" / newest.name)
    assert "0 of 1 runs are done" in reproduce(offbeat, "--only", "net-adl", out="whole").err
    assert (killed / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize("given", [{}, {"engine": "streams"}])
def test_on_a_gpu_all_rows_are_recorded_that_can_be(given):
    """Also BP: an eager baseline would take ten times as long, and compare nothing."""
    for found in TABLES.values():
        for one in found.rows:
            made = reproducing.recipe_of(one, 0, {"device": "cuda", **given})
            assert (made.engine == "streams") == (made.make_method().why_not_capturable() is None), one.name
            assert reproducing.recipe_of(one, 0, {"device": "cuda", "engine": "simulate"}).engine == "simulate"
            assert reproducing.recipe_of(one, 0, {}).engine == ("simulate" if made.K == 1 else "processes")
    bp = next(one for one in TABLES["cifar10-table"].rows if one.name == "resnet56-bp-m4")
    assert reproducing.in_stages(reproducing.recipe_of(bp, 0, {"device": "cuda", **given})).K == 8


def test_bp_on_a_gpu_is_cut_as_well():
    on_gpu = {"device": "cuda", "engine": "streams"}
    cut = reproducing.in_stages(make_recipe(method="bp", M=4, cuts=None, **on_gpu))
    assert (cut.K, cut.M, cut.cuts, cut.method) == (8, 4, None, "bp")
    for whole in (
        make_recipe(method="bp", M=1, **on_gpu),
        make_recipe(method="adl", K=4, M=4, **on_gpu),
        make_recipe(method="bp", M=4),
        make_recipe(method="bp", M=4, model="mlp", data="digits", **on_gpu),
    ):
        assert reproducing.in_stages(whole) is whole


def test_a_run_that_began_unsplit_resumes_in_stages_with_the_same_bits(offbeat, monkeypatch):
    net_bp = TableRow(
        name="net-bp",
        title="Net, BP",
        make=lambda **given: small("bp", M=4, **{**given, "epochs": 8}),  # windows that drained checkpoints end early
    )

    monkeypatch.setitem(recipes.TABLES, "small", Table(name="small", title="Small", rows=(net_bp,)))
    reproduce(offbeat, out="whole")
    spend_budget_after(monkeypatch, 60)
    assert reproduce(offbeat, "--budget-minutes", 9, out="cut").code == 0
    monkeypatch.setattr(reproducing, "in_stages", lambda recipe: replace(recipe, K=3, cuts=None, units=None))
    outcome = reproduce(offbeat, out="cut")
    assert "Net, BP, in 3 stages, from epoch" in outcome.err
    assert weights("cut", "net-bp-seed0") == weights("whole", "net-bp-seed0")
    assert told("cut", "net-bp-seed0") == told("whole", "net-bp-seed0")
    assert json.loads(Path("cut/runs/net-bp-seed0/config.json").read_text())["recipe"]["K"] == 1


def test_compare_takes_turns_too_and_reports_that_speeds_are_shared(offbeat):
    common = (
        "compare",
        "--methods",
        "bp,adl",
        "--model",
        "mlp",
        "--data",
        "synthetic",
        "--samples",
        40,
        "--classes",
        3,
        "--batch-size",
        4,
        "-K",
        2,
        "-M",
        2,
        "--epochs",
        2,
        "--seeds",
        2,
    )
    common = (*common, "--threads-per-stage", 1)
    assert offbeat(*common, "--engine", "simulate", "--out", "alone").code == 0
    outcome = offbeat(*common, "--side-by-side", 3, "--out", "together")
    assert outcome.code == 0, outcome.err
    for run in ("bp-seed0", "adl-seed0", "bp-seed1", "adl-seed1"):
        alone, together = (Path(out, run, "model.safetensors").read_bytes() for out in ("alone", "together"))
        assert alone == together
        assert f"{run}: epoch 1/2" in outcome.err
    assert "3 runs at the same time" in outcome.out
    assert "x BP: ratio" not in outcome.out, "a run that is left alone is faster, and no better"


@pytest.fixture
def _signals():
    """A command that is interrupted ignores further signals, as it is about to end."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("_signals")
def test_one_interruption_saves_and_stops_all_and_the_same_command_resumes(offbeat, table, monkeypatch):
    reproduce(offbeat, out="whole")
    real, taken = turns.RoundRobin._turn, []

    def turn(self, name):
        taken.append(name)
        if len(taken) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, name)

    monkeypatch.setattr(turns.RoundRobin, "_turn", turn)
    outcome = reproduce(offbeat, "--side-by-side", 3, out="broken")
    assert outcome.code == 130
    assert "stopped by Ctrl-C; repeat the command to continue in broken" in outcome.err
    states = [results("broken")[name]["runs"][0]["state"] for name in ("net-adl", "other-hybrid")]
    assert states == ["under way", "under way"]
    for run in ("net-adl-seed0", "other-hybrid-seed0"):
        assert len(checkpoint.ls(Path("broken/runs", run))) == 1
    monkeypatch.setattr(turns.RoundRobin, "_turn", real)
    assert reproduce(offbeat, "--side-by-side", 3, out="broken").code == 0
    for run in ("net-adl-seed0", "other-hybrid-seed0"):
        assert weights("broken", run) == weights("whole", run)


# ---- budget, going on, moving


def test_runs_over_budget_resume_bit_for_bit_from_checkpoints_in_a_moved_folder(offbeat, table, monkeypatch):
    reproduce(offbeat, "--only", "net-adl,other", out="whole")
    with monkeypatch.context() as patched:
        spend_budget_after(patched, 2 * 7 * 2 + 7)  # both in the middle of the third epoch
        common = ("--only", "net-adl,other", "--budget-minutes", 60)
        outcome = reproduce(offbeat, *common, "--side-by-side", 2, out="first")
    assert outcome.code == 0
    assert "stopped by the budget: repeat the command to continue 2 runs" in outcome.err
    assert "2 under way of 2 runs" in outcome.out
    assert Path("first/table.md").read_text().count("1 at epoch 2 |") == 2
    for found in checkpoint.ls(Path("first/runs/net-adl-seed0")):
        assert (found.checkpoint.t, found.checkpoint.mode) == (12, "drained")
    here = str(Path.cwd())
    for file in Path("first").rglob("*"):
        assert not file.is_file() or here.encode() not in file.read_bytes(), file
    shutil.move("first", "elsewhere")
    os.chdir("elsewhere")
    assert reproduce(offbeat, *common, out=".").code == 0
    os.chdir("..")
    for run in ("net-adl-seed0", "other-hybrid-seed0"):
        assert weights("elsewhere", run) == weights("whole", run)
        assert told("elsewhere", run) == told("whole", run)
    assert len(json.loads(Path("elsewhere/reproduction.json").read_text())["invocations"]) == 2


def test_a_run_stops_at_a_checkpoint_when_it_would_not_come_to_the_next(tmp_path, monkeypatch):
    endings = []
    clock = [0.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: clock[0])

    class Slow(turns.RoundRobin):
        def _turn(self, name):
            clock[0] += 1.0  # a second a turn: 7 from one checkpoint to the next
            super()._turn(name)

    def start(name: str) -> TrainingRun:
        return begin(net_adl.recipe(), tmp_path / name, show=False)

    work = Slow(start, lambda name, ending: endings.append((name, ending.by_budget)), until=18.0)
    work.all(["one", "two"])
    assert endings == [("one", True)], "the second is not even begun"
    assert 14 <= clock[0] < 18, "stopped behind the second checkpoint, with nothing lost"
    assert [found.checkpoint.t for found in checkpoint.ls(tmp_path / "one")] == [12]


def test_a_budget_that_no_run_can_use_is_reported(offbeat, table, monkeypatch):
    spend_budget_after(monkeypatch, 3)
    outcome = reproduce(offbeat, "--only", "net-adl", "--budget-minutes", 5)
    assert outcome.code == 0
    assert "no run reached a checkpoint within 5 minutes" in outcome.err
    assert results()["net-adl"]["runs"][0]["state"] == "under way"


def test_what_is_not_given_again_stays_as_it_was_and_more_seeds_are_added(offbeat, table):
    assert reproduce(offbeat, "--only", "net-adl", "--epochs", 2).code == 0
    assert reproduce(offbeat, "--only", "other", seeds=2).code == 0
    rows = results()
    assert [len(run["errors"]) for run in rows["other-hybrid"]["runs"]] == [2, 2]
    assert [run["state"] for run in rows["net-adl"]["runs"]] == ["done"]
    assert "net-diverges" not in rows


def test_the_seeds_of_a_row_can_begin_at_another_than_the_first(offbeat, table):
    assert reproduce(offbeat, "--only", "net-adl", "--epochs", 1, "--first-seed", 2, seeds=2).code == 0
    assert [(run["seed"], run["state"]) for run in results()["net-adl"]["runs"]] == [(2, "done"), (3, "done")]


def test_a_drained_checkpoint_of_resnet56_is_under_ten_megabytes(tmp_path):
    recipe = TABLES["cifar10-table"].rows[0].recipe(engine="simulate", threads_per_stage=1)
    known = build.Facts((3, 32, 32), 10, 50_000)
    recipe = replace(recipe, **build.choose_cuts(recipe, known))
    epochs = recipe.count(known.samples)
    pipe = build.make_pipeline(recipe, known, epochs, Simulate(recipe.K))
    for _ in range(4):  # momentum is there after an update
        pipe.step(torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))
    pipe.drain()
    saver = Saver(replace(recipe, checkpoint_every="4b"), epochs, pipe, tmp_path, lambda kind, **_: None)
    saver.save({})
    (found,) = checkpoint.ls(tmp_path)
    assert found.checkpoint.mode == "drained"
    assert 6e6 < found.checkpoint.size < 10e6


@pytest.mark.usefixtures("_signals")
def test_the_end_of_the_budget_raises_keyboard_interrupt():
    spent = threading.Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), interrupting(time.monotonic() + 0.05, spent):
        time.sleep(20)
    assert spent.is_set()
    untouched = threading.Event()
    with interrupting(time.monotonic() + 60, untouched):
        pass
    assert not untouched.is_set()


@pytest.mark.slow
def test_runs_in_processes_have_the_bits_of_those_in_one_and_stop_with_the_budget(table, tmp_path):
    def run(out: str, **asked: object) -> dict:
        request = {
            "table": "small",
            "only": "other",
            "epochs": 4,
            "seeds": 1,
            "minutes": None,
            "together": 1,
            "data": None,
            "out": tmp_path / out,
            "running": {},
            **asked,
        }
        made, _ = reproducing.reproduce(reproducing.ReproductionRequest(**request), show=False)
        return made.as_dict()["rows"][0]["runs"][0]

    assert run("one")["state"] == run("several", running={"engine": "processes"})["state"] == "done"
    one, several = (weights(str(tmp_path / out), "other-hybrid-seed0") for out in ("one", "several"))
    assert one == several
    assert run("long", running={"engine": "processes"}, epochs=20000, minutes=0.4)["state"] == "under way"
    assert checkpoint.ls(tmp_path / "long/runs/other-hybrid-seed0")


# ---- misuse


MISUSE = {
    "another table": (("cifar-table",), ("unknown table 'cifar-table'", "did you mean 'cifar10-table'?")),
    "no such row": (("cifar10-table", "--only", "resnet65"), ("--only resnet65", "did you mean 'resnet56'?", "--list")),
    "no data": (("cifar10-table",), ("needs --data, the folder", "cifar-10-batches-bin")),
    "no such folder": (("cifar10-table", "--data", "nowhere"), ("nowhere", "does not exist")),
    "no seeds": (("cifar10-table", "--seeds", 0), ("--seeds 0: use a whole number from 1 to 1000",)),
    "a seed below 0": (("cifar10-table", "--first-seed", -1), ("--first-seed -1: use a whole number from 0 to 1000",)),
    "too many seeds": (("cifar10-table", "--seeds", 10**9), ("--seeds 1000000000: use a whole number from 1 to 1000",)),
    "nobody beside": (("cifar10-table", "--side-by-side", 0), ("--side-by-side 0",)),
    "no budget": (("cifar10-table", "--budget-minutes", 0), ("--budget-minutes 0: use a finite number above 0",)),
    "no epochs": (("cifar10-table", "--epochs", 0), ("--epochs 0",)),
    "another engine": (("cifar10-table", "--engine", "steam"), ("engine 'steam'",)),
    "processes by turns": (("small", "--engine", "processes", "--side-by-side", 2), ("--side-by-side 2", "simulate")),
    "batches of more samples than an epoch": (
        ("small", "--batch-per-update", 100),
        ("--batch-per-update 100 in batches of 50, but an epoch has 24 samples: use --batch-per-update 48 or less",),
    ),
    "data for none": (("small", "--data", "."), ("synthetic takes no folder",)),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_one_line_and_nothing_is_written(offbeat, table, name):
    arguments, words = MISUSE[name]
    check_refused(offbeat, ("reproduce", *arguments, "--out", "x"), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_reported_before_anything_is_written(offbeat, table):
    check_refused(offbeat, ("reproduce", "small", "--device", "cuda", "--out", "x"), "torch finds no CUDA device")


def test_rows_with_other_settings_stand_without_the_papers_values(offbeat, table):
    assert reproduce(offbeat, "--method", "adl:M=1,weights=hybrid", "--epochs", 1).code == 0
    assert sorted(path.name for path in Path("x/runs").iterdir()) == ["net-adl-seed0", "other-hybrid-seed0"]
    settings = json.loads(Path("x/runs/net-adl-seed0/config.json").read_text())["recipe"]["settings"]
    assert settings == {"M": 1, "weights": "hybrid", "window": "count"}
    found = json.loads(reproduce(offbeat, "--only", "net-adl", "--json").out)
    assert found["settings"]["method"] == "adl:M=1,weights=hybrid"
    assert [(row["name"], row["paper"], row["difference"], row["n"]) for row in found["rows"]] == [
        ("net-adl", None, None, 1),
        ("other-hybrid", None, None, 1),
    ]
    changed = "settings adl:M=1,weights=hybrid instead of those of the rows"
    assert any(note.startswith(changed) for note in found["notes"])
    check_refused(offbeat, ("reproduce", "small", "--out", "x", "--method", "adl:M=4"), "not adl:M=4")


def test_a_folder_of_something_else_is_refused(offbeat, table):
    assert reproduce(offbeat, "--only", "net-adl", "--epochs", 1).code == 0
    check_refused(offbeat, ("reproduce", "smaller", "--out", "x"), "reproduction of small, not of smaller")
    check_refused(offbeat, ("reproduce", "small", "--out", "x", "--epochs", 2), "epochs = 1, not 2")
    check_refused(offbeat, ("reproduce", "small", "--out", "x/runs/net-adl-seed0"), "already contains a run")
    Path("y").mkdir()
    Path("y/reproduction.json").write_text("{}")
    check_refused(offbeat, ("reproduce", "small", "--out", "y"), "cannot be read")
    config = Path("x/runs/net-adl-seed0")
    (config / "metrics.jsonl").unlink()
    content = json.loads((config / "config.json").read_text())
    content["recipe"]["lr"] = 0.5
    (config / "config.json").write_text(json.dumps(content))
    check_refused(offbeat, ("reproduce", "small", "--out", "x"), "net-adl-seed0", "another recipe (lr: 0.5 there")


def test_a_dry_run_checks_everything_and_trains_nothing(offbeat, table):
    outcome = reproduce(offbeat, "--dry-run", seeds=3)
    assert outcome.code == 0
    assert "ready: 3 rows, 9 runs of 4 epochs" in outcome.out
    assert "net-adl: adl K=3, M=2" in outcome.out
    assert not Path("x").exists()
