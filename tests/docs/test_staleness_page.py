"""The page on staleness contains what records contain: losses, aims that are met and missed, time to a loss."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from published import ROOT, copy_pages, join, write_pages

from offbeat.runs import tables as recipes
from offbeat.runs.tables.gpt import GPTSetting, gpt_table

pytestmark = pytest.mark.filterwarnings("ignore::offbeat.errors.ScheduleLength")  # a run of 3 updates has a warm-up

SMALL = GPTSetting(model="gpt:layers=12,width=8,heads=1,context=4", batch=16, updates=1, epochs=3, stages=(12,))
BP, M16, M4, M1 = "adamw-bp-k12", *(f"adamw-adl-1f1b-k12-m{M}-corrected" for M in (16, 4, 1))
PLAIN, WARM = "adamw-adl-1f1b-k12-m4", f"{M4}-warmup"
MADE: list[Path] = []  # the record, made once


@pytest.fixture
def site(offbeat, monkeypatch, tmp_path, tmp_path_factory) -> Path:
    """Pages with the records of CIFAR-10 and of a small GPT, the latter with the staleness of a full pipeline."""
    if not MADE:
        monkeypatch.setitem(recipes.TABLES, "gpt-staleness", gpt_table(SMALL))
        monkeypatch.setenv("OFFBEAT_COMMIT", "0" * 40)
        Path("text").write_text("abcdefgh" * 500)
        rows = ",".join((BP, M16, M4, M1, PLAIN, WARM))
        given = ("--out", "runs", "--only", rows, "--seeds", 1, "--data", "text", "--engine", "simulate")
        assert offbeat("reproduce", "gpt-staleness", *given).code == 0
        MADE.append(tmp_path_factory.mktemp("made") / "record.json")
        join("runs", "--out", MADE[0])
        content = json.loads(MADE[0].read_text())
        for run in content["runs"].values():
            run["staleness"][0] = 0.0 if run["method"] == "bp" else 11 / run["M"]
        MADE[0].write_text(json.dumps(content))
    root = copy_pages(tmp_path / "site")
    shutil.copy(MADE[0], root / "docs/results/reproduction-gpt-small.json")
    for path in (ROOT / "docs/results").glob("reproduction-cifar10*"):
        shutil.copy(path, root / "docs/results")
    return root


def record(root: Path) -> Path:
    return root / "docs/results/reproduction-gpt-small.json"


def pages(root: Path) -> tuple[str, str]:
    """The page and its tables."""
    written = write_pages(root, name="staleness")
    assert written.returncode == 0, written.stderr
    return (root / "docs/staleness.md").read_text(), (root / "docs/staleness-tables.md").read_text()


def page(root: Path) -> str:
    return pages(root)[0]


def tables(root: Path) -> str:
    return pages(root)[1]


def cells(text: str, *words: str) -> list[list[str]]:
    """The cells of the lines of tables with all these words."""
    found = (line for line in text.splitlines() if line.startswith("| ") and all(word in line for word in words))
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in found]


def set_losses(root: Path, **losses: list[float]) -> None:
    """Give rows other losses after each epoch, in seconds that are twice the updates."""
    content = json.loads(record(root).read_text())
    for row in content["rows"]:
        curve = losses[row["name"].replace("-", "_")]
        row["runs"][0] |= {"losses": curve, "loss": curve[-1], "times": [120.0, 240.0, 360.0]}
        content["runs"][f"{row['name']}-seed0"]["updates"] = [100, 200, 300]
    record(root).write_text(json.dumps(content))


def add_row(content: dict, *, of: str, name: str, losses: list[float], baseline: str | None = None, **given) -> None:
    """Another row like one that there is, with other losses and settings."""
    row = json.loads(json.dumps(next(row for row in content["rows"] if row["name"] == of)))
    row |= {"name": name, **({"baseline": baseline} if baseline else {})}
    row["runs"][0] |= {"losses": losses, "loss": losses[-1]}
    content["rows"].append(row)
    content["runs"][f"{name}-seed0"] = content["runs"][f"{of}-seed0"] | given


def test_the_page_on_staleness_is_that_of_the_records():
    checked = write_pages(ROOT, "--check", name="staleness")
    assert checked.returncode == 0, checked.stderr


def test_the_tables_have_the_losses_and_staleness_of_their_runs(site):
    text = tables(site)
    assert write_pages(site, "--check", name="staleness").returncode == 0
    rows = {row["name"]: row for row in json.loads(record(site).read_text())["rows"]}
    bp, late = rows[BP]["loss"], rows[M4]["loss"]
    assert f"| AdamW | {bp:.3f} |" in text
    assert "`adl-1f1b` M=16: 0.688 updates | `adl-1f1b` M=4: 2.75 updates | `adl-1f1b` M=1: 11 updates" in text
    differences = " | ".join(f"{rows[name]['loss'] - bp:+.3f}" for name in (M16, M4, M1))
    assert f"| AdamW, recommended corrector |  | {differences} |" in text
    lowest = min(*rows[M4]["runs"][0]["losses"], late)
    assert f"M=4, with the recommended corrector | 1 | {lowest:.3f} | {late:.3f}" in text
    drawn = re.findall(r"\(results/(\S+\.svg)\)", text + page(site))
    assert len(drawn) == len(set(drawn)) == 4
    for picture in drawn:
        assert "drawn from" in (site / "docs/results" / picture).read_text()


def test_aims_are_met_and_missed_as_the_losses_are(site):
    losses = {BP: 2.0, M16: 2.01, M4: 2.031, M1: 2.151, PLAIN: 2.03, WARM: 2.02}
    set_losses(site, **{name.replace("-", "_"): [3.0, 2.5, value] for name, value in losses.items()})
    text, all_tables = pages(site)
    assert "Worse with the recommended corrector than without: AdamW, `adl-1f1b`, K=12, M=4 (+0.001)." in all_tables
    assert [line[1:] for line in cells(text, "late: at most")] == [
        ["up to 1 update late: at most +0.01", "AdamW M=16 (no start) +0.010", "", ""],
        ["over 1, up to 2.75 updates late: at most +0.03", "AdamW M=4 +0.020", "", ""],
        ["over 2.75, up to 11 updates late: at most +0.15", "", "AdamW M=1 (no start) +0.151", ""],
    ]
    choice = "all K, with AdamW: no worse than BP with AdamW"
    assert [line[1:] for line in cells(text, choice)] == [[choice, "", "K=12 +0.010", "K=4; K=24"]]
    starts = cells(all_tables, "AdamW, `adl-1f1b` M=")
    assert starts == [
        ["0.688", "AdamW, `adl-1f1b` M=16", "**+0.010**", ""],
        ["2.75", "AdamW, `adl-1f1b` M=4", "+0.031", "**+0.020**"],
        ["11", "AdamW, `adl-1f1b` M=1", "+0.151", ""],
    ]
    (site / "docs/results/reproduction-cifar10-1f1b.json").unlink()
    (unknown,) = cells(page(site), "K=8: at most 0.1 points of error above BP with the same M")
    assert unknown[2:] == ["", "", "all"]


def test_the_page_states_what_each_remedy_changed(site):
    losses = {BP: 2.0, M16: 2.01, M4: 2.125, M1: 2.25, PLAIN: 2.5, WARM: 2.0625}
    set_losses(site, **{name.replace("-", "_"): [3.0, 2.5, value] for name, value in losses.items()})
    text = page(site)
    one_line = " ".join(text.split())
    assert "divide the staleness: M=16 +0.010 (no start); M=4 +0.062; M=1 +0.250 (no start)." in one_line
    assert '**A corrector** (`corrector="auto"`), at M=4: +0.125 instead of +0.500.' in text
    assert "**A synchronous start**, at M=4: +0.062 instead of +0.125." in text
    plain, recommended = cells(text, "| AdamW", "| 2.000 |")
    assert plain == ["AdamW", "2.000", "", "+0.500", ""]
    assert recommended == ["AdamW, recommended", "2.000", "+0.010 (no start)", "+0.062", "+0.250 (no start)"]


def test_rows_without_the_learning_rate_of_the_best_bp_say_so(site):
    losses = {BP: 2.0, M16: 2.01, M4: 2.125, M1: 2.25, PLAIN: 2.5, WARM: 2.0625}
    set_losses(site, **{name.replace("-", "_"): [3.0, 2.5, value] for name, value in losses.items()})
    content = json.loads(record(site).read_text())
    add_row(content, of=BP, name=f"{BP}-double-rate", losses=[3.0, 2.5, 1.9])
    add_row(content, of=WARM, name=f"{WARM}-double-rate", losses=[3.0, 2.5, 2.1], baseline=f"{BP}-double-rate")
    record(site).write_text(json.dumps(content))
    plain, recommended = cells(page(site), "| AdamW", "| 1.900 |")
    assert plain[2:] == ["", "+0.600 (other rate)", ""]
    assert recommended[2:] == ["+0.110 (other rate, no start)", "+0.163", "+0.350 (other rate, no start)"]


def test_of_several_synchronous_starts_the_one_closest_to_that_of_auto_counts(site):
    """Of 300 updates method auto has 30; starts of 150 updates are not what is recommended."""
    losses = {BP: 2.0, M16: 2.01, M4: 2.125, M1: 2.25, PLAIN: 2.5, WARM: 2.0625}
    set_losses(site, **{name.replace("-", "_"): [3.0, 2.5, value] for name, value in losses.items()})
    assert "starts of language models had 150 of 300 updates (method `auto` has 30)." in " ".join(page(site).split())
    content = json.loads(record(site).read_text())
    add_row(content, of=WARM, name=f"{M4}-shorter-warmup", losses=[3.0, 2.5, 2.1], staleness_warmup=30)
    record(site).write_text(json.dumps(content))
    text = page(site)
    assert cells(text, "over 1, up to 2.75")[0][2:] == ["", "AdamW M=4 +0.100", ""]
    assert "had 30 of 300 updates, 150 of 300 updates (method `auto` has 30)." in " ".join(text.split())


def test_an_aim_that_no_row_is_about_is_shown_as_not_measured(site):
    content = json.loads(record(site).read_text())
    content["rows"] = [row for row in content["rows"] if row["name"] != M1]
    record(site).write_text(json.dumps(content))
    ((*_, met, missed, unknown),) = cells(page(site), "over 2.75, up to 11 updates late: at most +0.15")
    assert (met, missed, unknown) == ("", "", "AdamW")


def test_a_synchronous_start_is_compared_with_the_same_row_without(site):
    losses = {BP: 2.0, M16: 2.0, M4: 2.5, M1: 2.5, PLAIN: 2.5, WARM: 2.25}
    set_losses(site, **{name.replace("-", "_"): [3.0, 3.0, value] for name, value in losses.items()})
    text = tables(site)
    assert "With a synchronous start, per seed: AdamW, `adl-1f1b`, K=12, M=4: -0.250 (first 150 updates)." in text
    assert "| AdamW, recommended corrector |  | +0.000 | +0.500 | +0.500 |" in text
    assert "| AdamW, recommended corrector, first 150 updates synchronous |  |  | +0.250 |  |" in text


def test_lowest_losses_are_compared_where_training_overfits(site):
    curves = {
        BP: [2.0, 1.5, 1.9],
        M16: [2.0, 1.75, 1.75],
        M4: [3.0] * 3,
        M1: [3.0] * 3,
        PLAIN: [3.0] * 3,
        WARM: [3.0] * 3,
    }
    set_losses(site, **{name.replace("-", "_"): curve for name, curve in curves.items()})
    text, all_tables = pages(site)
    assert [line[2:] for line in cells(text, "up to 1 update late")] == [["", "AdamW M=16 (no start) +0.250", ""]]
    assert "AdamW, BP, K=12, M=1 | 1 | 1.500 | 1.900 |" in all_tables


def test_rows_with_a_synchronous_start_have_columns_and_count_as_recommended(site):
    content = json.loads(record(site).read_text())
    content["rows"] = [row for row in content["rows"] if row["name"] in (BP, WARM)]
    record(site).write_text(json.dumps(content))
    rows = {row["name"]: row["loss"] for row in content["rows"]}
    text, all_tables = pages(site)
    difference = f"{rows[WARM] - rows[BP]:+.3f}"
    assert "| K=12 | BP | `adl-1f1b` M=4: 2.75 updates |" in all_tables
    assert f"| AdamW, recommended corrector, first 150 updates synchronous |  | {difference} |" in all_tables
    ((*_, met, missed, _),) = cells(text, "no worse than BP with AdamW")
    assert met + missed == f"K=12 {difference}"


def test_a_synchronous_start_is_not_recommended_up_to_half_an_update_late(site):
    """Method `auto` has none at up to half an update."""
    losses = {BP: 2.0, M16: 3.0, M4: 2.5, M1: 3.0, PLAIN: 3.0, WARM: 2.25}
    set_losses(site, **{name.replace("-", "_"): [3.0, 3.0, value] for name, value in losses.items()})
    content = json.loads(record(site).read_text())
    for name, run in content["runs"].items():
        if name.startswith(M4):
            run["staleness"][0] = 0.5
    record(site).write_text(json.dumps(content))
    ((_, _, met, missed, _),) = cells(page(site), "up to 1 update late")
    assert (met, "AdamW M=4 +0.500" in missed, "+0.250" in missed) == ("", True, False)


def test_updates_and_minutes_to_a_loss_are_read_from_the_curves(site):
    curves = {
        BP: [3.0, 2.2, 2.0],
        M16: [3.0, 2.5, 2.0],
        M4: [3.0, 2.5, 2.4],
        M1: [2.0, 2.3, 2.5],
        PLAIN: [3.0] * 3,
        WARM: [3.0] * 3,
    }
    set_losses(site, **{name.replace("-", "_"): curve for name, curve in curves.items()})
    text = tables(site)
    assert "to a loss of 2.100, K=12" in text
    shown = {line.split(" | ")[0][2:]: line.split(" | ")[3:] for line in text.splitlines() if " | 1 | " in line}
    late, corrected = "AdamW, ADL on the 1F1B lag, K=12", ", with the recommended corrector"
    assert shown["AdamW, BP, K=12, M=1"] == ["2.000", "0.00", "1200.0", "250", "5.0 |"]
    assert shown[f"{late}, M=16{corrected}"] == ["2.000", "0.69", "1200.0", "280", "5.6 |"]
    assert shown[f"{late}, M=4{corrected}"][-2:] == ["not reached", " |"]
    assert shown[f"{late}, M=1{corrected}"] == ["2.500", "11.00", "1200.0", "100", "2.0 |"]


def test_runs_of_several_records_are_joined_and_copies_count_once(site):
    content = json.loads(record(site).read_text())
    again = record(site).with_name("reproduction-gpt-small-again.json")
    again.write_text(json.dumps(content))
    single = tables(site)
    assert f"| AdamW | {content['rows'][0]['loss']:.3f} |" in single
    loss = content["rows"][0]["runs"][0]["loss"] + 1
    content["rows"][0]["runs"][0] |= {"loss": loss, "losses": [loss] * 3}
    again.write_text(json.dumps(content))
    assert f"| AdamW | {loss - 0.5:.3f} ({loss - 1:.3f}-{loss:.3f}) |" in tables(site)


def test_a_page_or_picture_of_other_records_is_not_current(site):
    page(site)
    changed = json.loads(record(site).read_text())
    changed["rows"][0]["runs"][0]["loss"] -= 1
    record(site).write_text(json.dumps(changed))
    checked = write_pages(site, "--check", name="staleness")
    assert checked.returncode == 1
    assert checked.stderr.startswith("not current: staleness.md, staleness-tables.md, staleness-cost-gpt.svg")


def test_without_records_the_page_states_that_there_are_none_and_has_no_pictures(tmp_path):
    root = copy_pages(tmp_path / "site")
    text = page(root)
    assert list((root / "docs/results").glob("staleness-*")) == []
    assert "There is no record of a language model yet." in text
    assert [line[2:] for line in cells(text, "0.1 points of error above BP")] == [["", "", "all"]] * 2
