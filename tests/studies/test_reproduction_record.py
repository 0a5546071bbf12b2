"""Folders of one reproduction become one record and go on as one; what the pages tell of it is what was recorded."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest
from command import Command, contents
from published import ROOT, copy_pages, join, write_pages
from small_recipe import small

from offbeat.report.reproduction import read_seed_run
from offbeat.runs import record
from offbeat.runs import round_robin as turns
from offbeat.runs import tables as recipes
from offbeat.runs.provenance import provenance
from offbeat.runs.tables import TABLES, Images, Paper, Table, TableRow
from offbeat.runs.tables.gpt import GPTSetting, gpt_table
from offbeat.studies import reproduce as reproducing

resnet56_adl_k3_m2 = TableRow(
    name="resnet56-adl-k3-m2",
    title="Net, ADL, K=3, M=2",
    make=partial(small, "adl", K=3, M=2),
    paper=Paper(6.18, "Table 0, first", remark="a remark"),
)
resnet56_adl_k3_m1 = TableRow(
    name="resnet56-adl-k3-m1",
    title="Net, ADL, K=3, M=1, rate too high",
    make=lambda **given: small("adl", K=3, M=1, **{**given, "lr": 1e30, "warmup": 0.0}),
    paper=Paper(None, "Table 0, second"),
)
resnet56_adl_k3_m2_sc = TableRow(
    name="resnet56-adl-k3-m2-sc",
    title="Net, ADL, K=3, M=2, compensated",
    make=partial(small, "adl", K=3, M=2, corrector="sc"),
)
resnet56_bp_m2 = TableRow(
    name="resnet56-bp-m2",
    title="Net, BP with accumulation, M=2",
    make=partial(small, "bp", M=2),
    paper=Paper(6.19, "Table 0, third"),
)
other_bp = TableRow(
    name="other-bp",
    title="Other, BP",
    make=partial(small, "bp", M=1),
    tier=3,
)


ROWS = (resnet56_adl_k3_m2, resnet56_adl_k3_m1, resnet56_adl_k3_m2_sc, resnet56_bp_m2, other_bp)


@pytest.fixture(autouse=True)
def _table(monkeypatch) -> None:
    monkeypatch.setitem(recipes.TABLES, "small", Table(name="small", title="Small", rows=ROWS))
    monkeypatch.setitem(recipes.TABLES, "smaller", Table(name="smaller", title="Smaller", rows=ROWS[:1]))
    monkeypatch.setenv("OFFBEAT_COMMIT", "0" * 40)


def reproduce(offbeat: Command, out: str, only: str, *arguments: object, seeds: int = 1) -> None:
    outcome = offbeat("reproduce", "small", "--out", out, "--only", only, "--seeds", seeds, *arguments)
    assert outcome.code == 0, outcome.err


MADE: list[Path] = []  # the folders of `three`, made once


@pytest.fixture
def three(offbeat, monkeypatch, tmp_path_factory) -> tuple[str, ...]:
    """Copies of three folders: BP with two seeds, ADL that the budget stopped in its third epoch, ADL that diverges."""
    names = "bp", "m2", "m1"
    if not MADE:
        make_three(offbeat, monkeypatch)
        kept = tmp_path_factory.mktemp("three")
        for name in names:
            shutil.copytree(name, kept / name)
        MADE.append(kept)
    else:
        for name in names:
            shutil.copytree(MADE[0] / name, name)
    return names


def make_three(offbeat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce(offbeat, "bp", "resnet56-bp-m2", seeds=2)
    with monkeypatch.context() as patched:
        real, taken = turns.RoundRobin._turn, []

        def turn(self, name):
            taken.append(name)
            if len(taken) == 2 * 7 + 4:
                self.until = time.monotonic() - 1
            real(self, name)

        patched.setattr(turns.RoundRobin, "_turn", turn)
        reproduce(offbeat, "m2", "resnet56-adl-k3-m2*", "--budget-minutes", 60, seeds=2)
    reproduce(offbeat, "m1", "resnet56-adl-k3-m1")


def refused(capsys, *arguments: object) -> str:
    """Exit code 2, one line that says all of it, nothing written."""
    before = contents(Path.cwd())
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        join(*arguments, "--out", "r.json")
    said = capsys.readouterr()
    assert exit.value.code == 2
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert contents(Path.cwd()) == before
    return said.err


# ---- joining


def test_joined_folders_are_the_table_of_all_their_runs(three):
    join(*three, "--out", "r.json", "--gpu", "some GPU", "--remark", "one was moved", "--remark", "and so on")
    found = json.loads(Path("r.json").read_text())
    assert found["notes"][-2:] == ["one was moved", "and so on"]
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["resnet56-adl-k3-m2", "resnet56-adl-k3-m1", "resnet56-bp-m2"]
    errors = [read_seed_run(Path(f"bp/runs/resnet56-bp-m2-seed{seed}"), seed).error for seed in (0, 1)]
    bp = rows["resnet56-bp-m2"]
    assert (bp["n"], bp["error"]) == (2, pytest.approx(sum(errors) / 2))
    assert bp["setting"] == "K=1, M=2, b=4, lr=0.003125"
    states = [[run["state"] for run in row["runs"]] for row in found["rows"]]
    assert states == [["under way", "missing"], ["diverged"], ["done", "done"]], "as many as were asked for"
    assert rows["resnet56-adl-k3-m2"]["runs"][0]["epochs"] == 2
    assert [(row["name"], row["asked"]) for row in found["missing"]] == [
        ("resnet56-adl-k3-m2-sc", True),
        ("other-bp", False),
    ]
    told = found["runs"]["resnet56-adl-k3-m2-seed0"]
    assert (told["K"], told["seed"], told["precision"], told["engine"], told["fuse"], told["tune"]) == (
        3,
        0,
        "fp32",
        "simulate",
        False,
        False,
    )
    config = json.loads(Path("m2/runs/resnet56-adl-k3-m2-seed0/config.json").read_text())
    assert told["cuts"] == config["recipe"]["cuts"] != []
    assert (told["staleness_of"], len(told["staleness"])) == ("epoch", 3)
    result = record.lines(Path("bp/runs/resnet56-bp-m2-seed1"))[-1]
    assert found["runs"]["resnet56-bp-m2-seed1"]["staleness"] == result["staleness"]
    assert [one["command"][4] for one in found["invocations"]] == [
        "resnet56-bp-m2",
        "resnet56-adl-k3-m2*",
        "resnet56-adl-k3-m1",
    ]
    for one in found["invocations"]:
        assert (one["commit"], one["gpu"], "host" in one) == ("0" * 40, "some GPU", False)
        assert one["machine"]
        assert one["started"]


def check_consistent(found: dict) -> None:
    """Errors are those of the last epochs of runs that are done, and of no others."""
    assert found["rows"]
    for one in found["rows"]:
        done = [each for each in one["runs"] if each["state"] == "done"]
        assert one["n"] == len(done)
        assert all(len(each["errors"]) == len(each["times"]) == found["settings"]["epochs"] for each in done)
        last = [each["errors"][-1] for each in done]
        assert one["error"] == (pytest.approx(median(last), abs=1e-4) if last else None)
        assert one["error_range"] == (pytest.approx([min(last), max(last)], abs=1e-4) if last else None)
        begun = {f"{one['name']}-seed{each['seed']}" for each in one["runs"] if each["state"] != "missing"}
        assert begun == {name for name in found["runs"] if name.rpartition("-seed")[0] == one["name"]}


def test_errors_of_records_are_those_of_the_last_epochs(three):
    join(*three, "--out", "r.json")
    for path in (Path("r.json"), *(ROOT / "docs/results").glob("reproduction-*.json")):
        check_consistent(json.loads(path.read_text()))


def test_a_joined_folder_resumes_bit_for_bit(offbeat, three):
    join(*three, "--out", "r.json", "--into", "all")
    assert "| resnet56-bp-m2 | 6.19 |" in Path("all/table.md").read_text()
    reproduce(offbeat, "all", "resnet56-adl-k3-m2,resnet56-bp-m2,resnet56-adl-k3-m1")
    reproduce(offbeat, "whole", "resnet56-adl-k3-m2")
    one, other = (Path(out, "runs/resnet56-adl-k3-m2-seed0/model.safetensors") for out in ("all", "whole"))
    assert one.read_bytes() == other.read_bytes()
    for run in ("resnet56-bp-m2-seed0", "resnet56-adl-k3-m1-seed0"):
        assert not list(Path("all/runs", run).glob("config-*.json")), "what is over is not run again"
    assert len(json.loads(Path("all/reproduction.json").read_text())["invocations"]) == 4
    assert not list(Path().glob(".joining-*"))
    states = {row["name"]: row["runs"][0]["state"] for row in json.loads(Path("all/results.json").read_text())["rows"]}
    assert states == {"resnet56-adl-k3-m2": "done", "resnet56-adl-k3-m1": "diverged", "resnet56-bp-m2": "done"}


def test_what_does_not_belong_together_is_refused_in_one_line(offbeat, capsys):
    reproduce(offbeat, "one", "resnet56-bp-m2", "--epochs", 1)
    reproduce(offbeat, "longer", "other", "--epochs", 2)
    reproduce(offbeat, "shorter", "other", "--epochs", 1, "--precision", "bf16")
    offbeat("reproduce", "smaller", "--out", "table", "--epochs", 1, "--seeds", 1)
    shutil.copytree("one", "copy")
    shutil.copytree("one", "changed")
    shutil.copytree("one", "strange")
    Path("strange/runs/resnet56-bp-m2-seed0").rename("strange/runs/nothing-seed0")
    path = Path("changed/runs/resnet56-bp-m2-seed0/config.json")
    content = json.loads(path.read_text())
    content["recipe"]["lr"] = 0.5
    path.write_text(json.dumps(content))
    Path("broken").mkdir()
    Path("broken/reproduction.json").write_text("{")
    for folders, words in {
        ("one", "longer"): "one has epochs = 1, longer has 2",
        ("one", "shorter"): "one has precision = default, shorter has bf16",
        ("one", "table"): "table holds a reproduction of smaller, one of small",
        ("one", "copy"): "resnet56-bp-m2-seed0 is in one and in copy",
        ("one", "one"): "resnet56-bp-m2-seed0 is in one and in one",
        ("one", "nowhere"): "nowhere holds no reproduction.json",
        ("one", "broken"): "broken/reproduction.json cannot be read",
        ("changed",): "another recipe (lr: 0.5 there",
        ("strange",): "strange/runs/nothing-seed0 is not a run of small",
        ("one", "--into", "copy"): "--into copy: give a folder that is empty",
        ("one", "--into", "no/where"): "--into no/where: give a folder",
        ("one", "--commit", "main"): "--commit main: give its 40 digits",
    }.items():
        assert words in refused(capsys, *folders)


def test_a_record_of_five_long_runs_is_small_and_its_curves_are_those_of_the_runs(tmp_path):
    named = {row.name: row for row in TABLES["cifar10-table"].rows}
    content = {
        "table": "cifar10-table",
        "settings": {"epochs": 300},
        "invocations": [provenance(["offbeat", "reproduce", "cifar10-table", "--only", "resnet56", "--seeds", "1"])],
    }
    for name in list(named)[:5]:
        recipe = reproducing.recipe_of(named[name], 0, content["settings"])
        folder = record.RunFolder.create(tmp_path / "runs" / f"{name}-seed0", replace(recipe, cuts=(4, 8)))
        for epoch in range(300):
            folder.line(
                "epoch",
                epoch=epoch,
                batches=1563 * (epoch + 1),
                seconds=3.123456789 + epoch / 7,
                test_error=100 / (epoch / 3 + 1),
                test_top5=1.0,
                test_loss=1.0,
                samples_per_second=9.0,
                staleness=[3.5, 0.0],
            )
    (tmp_path / "reproduction.json").write_text(json.dumps(content))
    join(tmp_path, "--out", tmp_path / "r.json")
    assert (tmp_path / "r.json").stat().st_size < 150_000
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    for found in rows:
        there = read_seed_run(tmp_path / "runs" / f"{found['name']}-seed0", 0)
        assert found["runs"][0]["errors"] == pytest.approx(there.errors, abs=1e-4)
        assert found["runs"][0]["times"] == pytest.approx(there.times, abs=1e-4)
    assert len(rows) == 5


# ---- the pages


@pytest.fixture
def copied(tmp_path) -> Path:
    return copy_pages(tmp_path / "site")


def pages(root: Path) -> str:
    """The section, made anew, and current then."""
    made = write_pages(root)
    assert made.returncode == 0, made.stderr
    assert write_pages(root, "--check").returncode == 0
    page = (root / "docs/results.md").read_text()
    return page.partition("## The paper's rows again\n")[2].split("\n## ")[0]


def test_without_a_record_the_page_only_states_that_there_is_none(copied):
    assert pages(copied) == ""
    assert "300 epochs" not in (copied / "README.md").read_text()
    assert "there is no record yet" in (copied / "docs/results.md").read_text()


def test_pages_list_runs_that_are_done_diverged_under_way_and_missing(offbeat, three, copied):
    path = copied / "docs/results/reproduction-small.json"
    join(*three, "--out", path)
    section = pages(copied)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    bp, late = rows["resnet56-bp-m2"], rows["resnet56-adl-k3-m2"]
    low, high = bp["error_range"]
    measured = f"| Net, BP with accumulation, M=2 | 6.19 | {bp['error']:.2f} ({low:.2f}-{high:.2f}) | 2 |"
    assert f"{measured} {bp['difference']:+.2f} |  | 0.00 | done |" in section
    so_far = f"at epoch 2 of 4 ({late['runs'][0]['errors'][-1]:.2f} there), 1 missing"
    assert f"| Net, ADL, K=3, M=2 | 6.18 | - | 0 |  |  | 2.00 | {so_far} |" in section
    assert "| Net, ADL, K=3, M=1, rate too high | div. | div. | 0 |" in section
    assert "rate too high: diverged in the paper; so it did here: diverged in epoch 1" in section
    picture = path.with_suffix(".svg").read_text()
    assert "adl-k3-m2 (at 2)" in picture
    assert "Missing, though asked for: Net, ADL, K=3, M=2, compensated." in section
    assert "not asked for: 1 of less worth." in section
    assert "- resnet56-adl-k3-m2: a remark." in section
    assert "--only resnet56-bp-m2 --seeds 2 --out DIR`, commit 000000000000, torch" in section
    assert "not a result: the learning rate drops late" in section.replace("\n  ", " ")


def test_other_images_than_the_papers_have_a_name_and_stand_alone(offbeat, copied, monkeypatch, capsys):
    reproduce(offbeat, "papers", "resnet56-bp-m2")
    assert "--images Mine: these runs have those of the paper" in refused(capsys, "papers", "--images", "Mine")
    table = Table(name="small", title="Large, Table 1", rows=ROWS, top5=True, images=Images(1000, 1_281_167, 50_000))
    monkeypatch.setitem(recipes.TABLES, "small", table)
    reproduce(offbeat, "mine", "resnet56-bp-m2,resnet56-adl-k3-m2")
    path = copied / "docs/results/reproduction-small.json"
    join("mine", "--out", path, "--images", "Mine")
    section = pages(copied)
    found = json.loads(path.read_text())
    assert found["title"] == "Large, Table 1, on Mine, 4 epochs"
    assert "| row | ours | top-5 | n | to BP, same b and M |" in section
    assert not re.search(r"6\.1[89]", section)
    assert "trained on 3 classes, 24 images to train and" in section.replace("\n  ", " ")
    folder = json.loads(Path("mine/reproduction.json").read_text())
    folder["images"]["train"] = 25
    shutil.copytree("mine", "more")
    Path("more/reproduction.json").write_text(json.dumps(folder))
    assert "join those of the same data" in refused(capsys, "mine", "more")


def test_a_record_of_text_has_losses_and_their_difference_to_bp(offbeat, copied, monkeypatch):
    setting = GPTSetting(model="gpt:layers=1,width=8,heads=1,context=8", batch=16, updates=1, epochs=2, stages=(2,))
    monkeypatch.setitem(recipes.TABLES, "gpt-staleness", gpt_table(setting))
    Path("text").write_text("abcdefgh" * 500)
    for out, name in (("bp", "adamw-bp-k2"), ("late", "adamw-adl-1f1b-k2-m4")):
        given = ("--out", out, "--only", name, "--seeds", 1, "--data", "text", "--engine", "simulate")
        assert offbeat("reproduce", "gpt-staleness", *given).code == 0
    join("bp", "late", "--out", copied / "docs/results/reproduction-gpt.json")
    assert write_pages(copied).returncode == 0
    assert write_pages(copied, "--check").returncode == 0
    content = json.loads((copied / "docs/results/reproduction-gpt.json").read_text())
    bp, late = content["rows"]
    assert content["text"]["tokens"] == 4000
    for folder, found in (("bp", bp), ("late", late)):
        lines = record.lines(Path(f"{folder}/runs/{found['name']}-seed0"))
        ends = [line for line in lines if line["kind"] == "epoch"]
        assert found["runs"][0]["losses"] == pytest.approx([line["test_loss"] for line in ends], abs=1e-4)
        assert content["runs"][f"{found['name']}-seed0"]["updates"] == [1, 2]
    shown = (copied / "docs/results.md").read_text().partition("## Language models with late gradients\n")[2]
    assert f"| AdamW, BP, K=2, M=1 | {bp['loss']:.3f} | 1 |  | {bp['error']:.3f} |" in shown
    difference = late["loss"] - bp["loss"]
    assert f"ADL on the 1F1B lag, K=2, M=4 | {late['loss']:.3f} | 1 | {difference:+.3f} |" in shown
    assert "lower is better" in shown
    assert "![Bits per byte against the epoch](results/reproduction-gpt.svg)" in shown
    Path("other").write_text("hgfedcba" * 500)
    again = ("--out", "again", "--only", "nadam-bp-k2", "--seeds", 1, "--data", "other", "--engine", "simulate")
    assert offbeat("reproduce", "gpt-staleness", *again).code == 0
    with pytest.raises(SystemExit):
        join("bp", "again", "--out", "record.json")


def test_adl_stands_beside_bp_of_the_same_batch_and_m_whichever_is_better(offbeat, copied):
    reproduce(offbeat, "all", "resnet56-bp-m2,resnet56-adl-k3-m2,other-bp")
    path = copied / "docs/results/reproduction-small.json"
    join("all", "--out", path)
    content = json.loads(path.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    for better in (1.25, -0.75):
        rows["resnet56-adl-k3-m2"]["error"] = rows["resnet56-bp-m2"]["error"] + better
        path.write_text(json.dumps(content))
        section = pages(copied)
        told = " ".join(section.split())
        assert f"| {better:+.2f} | 2.00 | done |" in section
        wanted = "Worse than our BP at the same b and M: {}. Not worse: {}."
        found = f"Net, ADL, K=3, M=2 ({better:+.2f})"
        assert wanted.format(*((found, "none") if better > 0 else ("none", found))) in told
    assert "One seed per row: there is no spread" in told
    assert "there is no record yet" in (copied / "docs/results.md").read_text()  # of so many epochs as the paper's
    content["settings"]["epochs"] = 300
    path.write_text(json.dumps(content))
    pages(copied)
    assert "there are results [below](#the-papers-rows-again)" in (copied / "docs/results.md").read_text()


def test_a_picture_is_current_exactly_while_its_curves_are_the_same(offbeat, three, copied):
    path = copied / "docs/results/reproduction-small.json"
    join(*three, "--out", path)
    pages(copied)
    picture = path.with_suffix(".svg")
    before = picture.read_bytes()
    picture.unlink()
    assert "reproduction-small.svg" in write_pages(copied, "--check").stderr
    pages(copied)
    assert picture.read_bytes() == before
    content = json.loads(path.read_text())
    content["rows"][0]["runs"][0]["errors"][0] -= 1
    path.write_text(json.dumps(content))
    assert write_pages(copied, "--check").stderr.startswith("not current: reproduction-small.svg")
