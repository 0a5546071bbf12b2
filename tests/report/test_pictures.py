"""Pictures in files: every kind of file for every declared method, whole or not there, and text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import preloaded
import pytest
import run_folders as made

from offbeat.errors import PackageMissing, UserError, print_once
from offbeat.methods import ADL, BP, DECLARED, DSP
from offbeat.ops import Backward, Update
from offbeat.report import draw, draw_curves, draw_staleness, draw_timeline
from offbeat.report.draw import draw_if_possible
from offbeat.report.text import timeline_text
from offbeat.timeline import Costs, balanced, timeline

UNEQUAL = Costs([0.011, 0.014, 0.009], [0.023, 0.027, 0.019], update=[0.001] * 3, up=[0.003] * 2, down=[0.002] * 2)
RUNS = {"bp": [[60.0, 30.0, 9.0], [70.0, 20.0, 8.0]], "adl": [[80.0, 40.0, 10.0]]}
STARTS = {"svg": b"<svg", "png": b"\x89PNG"}

DRAWN = """\
adl, K=3, M=2, 4 batches
a column is 1 F; F forward, B backward, U update, . idle
stage 1 | F0  F1  F2  F3  .   .   .   B0  B0  .   B1  B1U .   B2  B2  .   B3  B3U
stage 2 | .   F0  F1  F2  .   B0  B0  F3  B1  B1U .   B2  B2  .   B3  B3U .   .
stage 3 | .   .   F0  B0  B0  F1  B1  B1U F2  B2  B2  F3  B3  B3U .   .   .   .

tick | stage 1             | stage 2             | stage 3
0    | F0@v0               | -                   | -
1    | F1@v0               | F0@v0               | -
2    | F2@v0               | F1@v0               | F0@v0 B0@v0
3    | F3@v0               | F2@v0 B0@v0         | F1@v0 B1@v0 U->v1
4    | B0@v0               | F3@v0 B1@v0 U->v1   | F2@v1 B2@v1
5    | B1@v0 U->v1         | B2@v0 (LoS 1)       | F3@v1 B3@v1 U->v2
6    | B2@v0 (LoS 1)       | B3@v0 (LoS 1) U->v2 | -
7    | B3@v0 (LoS 1) U->v2 | -                   | -
"""


@pytest.mark.parametrize("name", DECLARED)
def test_every_declared_method_draws_its_timeline_and_staleness(name, tmp_path):
    for kind, start in {"svg": b"<svg", "txt": name.encode()}.items():
        draw_timeline(DECLARED[name](), UNEQUAL, tmp_path / f"timeline.{kind}", batches=3)
        assert (tmp_path / f"timeline.{kind}").read_bytes().startswith(start)
        draw_staleness(lambda M: DECLARED[name](), 3, tmp_path / f"staleness.{kind}", largest_M=3)
        assert (tmp_path / f"staleness.{kind}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 4, "nothing temporary is left"


@pytest.mark.parametrize("kind", ["svg", "png", "txt"])
def test_the_same_picture_is_the_same_bytes(kind, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        draw_timeline(DSP(), UNEQUAL, tmp_path / folder / f"timeline.{kind}", batches=3)
        draw_curves(RUNS, tmp_path / folder / f"curves.{kind}", title="a title")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        assert path.read_bytes().startswith(STARTS.get(kind, b""))


def test_a_picture_has_its_title_its_labels_and_light_colours(tmp_path):
    draw_curves(RUNS, tmp_path / "curves.svg", title="a <title>")
    elements = ElementTree.parse(tmp_path / "curves.svg").iter()
    texts = [element.text for element in elements if element.tag.endswith("text")]
    assert {"a <title>", "bp  8.50 %", "adl  10.00 %", "epoch", "test error, %, log scale"} <= set(texts)
    assert "var(" not in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("runs", [{}, {"bp": []}, {"bp": [[], []]}], ids=["no method", "no run", "no epoch"])
def test_nothing_to_draw_is_an_empty_picture(runs, tmp_path):
    for suffix in ("svg", "png", "txt"):
        draw_curves(runs, tmp_path / f"curves.{suffix}", title="nothing yet")
    assert "nothing recorded yet" in (tmp_path / "curves.svg").read_text()


def test_a_scaling_study_is_panels_with_their_titles(tmp_path):
    record = json.loads((made.scaling(tmp_path / "a") / "scaling.json").read_text())
    record["simulation"] |= {"model": "resnet110", "batch_size": 32, "M": 2}
    draw.draw_scaling(record, tmp_path / "study.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "study.svg").read_text())
    for title in ("resnet110, b=32, M=2", "ADL", "GPipe, at most 4K micro-batches", "Memory", "Mean staleness"):
        assert texts.count(title) == 1


def test_a_scaling_study_of_a_method_without_staleness_is_drawn(tmp_path):
    record = json.loads((made.scaling(tmp_path / "a") / "scaling.json").read_text())
    record["simulation"] |= {"model": "resnet110", "batch_size": 32, "M": 1}
    for row in (*record["counted"], *record["points"]):
        row["staleness"] = [0.0] * row["K"]
        if "staleness_measured" in row:
            row["staleness_measured"] = [0.0] * len(row["staleness_measured"])
    draw.draw_scaling(record, tmp_path / "study.svg")
    assert "Mean staleness" in (tmp_path / "study.svg").read_text()


# ---- text


def test_a_replaying_backward_uses_the_newest_weights_and_a_stashing_one_old_ones():
    def versions(method):
        return [
            span.version
            for span in timeline(method, 5, balanced(2))
            if span.k == 1 and isinstance(span.operation, Backward)
        ]

    assert versions(DSP()) == [0, 1, 2, 3, 4]
    assert versions(ADL(M=1)) == [0, 0, 0, 1, 2]


def test_the_text_of_adl_is_the_drawn_one(tmp_path):
    draw_timeline(ADL(M=2), balanced(3), tmp_path / "timeline.txt", batches=4)
    assert (tmp_path / "timeline.txt").read_text() == DRAWN


@pytest.mark.parametrize("name", DECLARED)
def test_the_text_shows_every_operation_in_the_order_of_its_program(name):
    method = DECLARED[name]()
    lines = timeline_text(method, UNEQUAL, batches=4).splitlines()[2:5]
    for k, line in enumerate(lines, start=1):
        cells = [cell.rstrip("U") for cell in line.split("|")[1].split() if cell[0] in "FB"]
        seen = [cell for at, cell in enumerate(cells) if at == 0 or cells[at - 1] != cell]
        program = [op for iteration in method.program(k, 3, range(4)) for op in iteration]
        assert seen == [str(op) for op in program if str(op)[0] in "FB"]
        assert line.count("U") == sum(isinstance(op, Update) for op in program)


def test_a_very_short_stage_does_not_make_the_text_endless():
    text = timeline_text(BP(), Costs([1e-6, 1.0], [2e-6, 2.0]), batches=4)
    assert max(map(len, text.splitlines())) < 2500
    assert "F3" in text.splitlines()[2]


# ---- what cannot be drawn


def draw_either(which, path):
    if which == "timeline":
        draw_timeline(ADL(), balanced(2), path, batches=2)
    else:
        draw_staleness(ADL, 2, path)


@pytest.mark.parametrize("which", ["timeline", "staleness"])
def test_unknown_file_types_and_missing_or_unwritable_folders_are_refused(which, tmp_path):
    (tmp_path / "taken.svg").mkdir()
    refused = {"a.pdf": r"\.svg, \.png, \.txt", "a": r"\.svg", "none/a.svg": "no folder", "taken.svg": "written"}
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason) as error:
            draw_either(which, tmp_path / name)
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.svg"]


def test_a_picture_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "staleness.svg"
    path.write_text("old")
    with pytest.raises(UserError, match="M=0"):
        draw_staleness(lambda M: ADL(M=3 - M), 2, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_counts_below_one_are_refused(tmp_path):
    with pytest.raises(UserError, match="0 batches"):
        draw_timeline(ADL(), balanced(2), tmp_path / "a.svg", batches=0)
    with pytest.raises(UserError, match="largest M = 0"):
        draw_staleness(ADL, 2, tmp_path / "a.svg", largest_M=0)


# ---- a package that is missing


@pytest.mark.parametrize(("module", "package"), [("altair", "altair"), ("vl_convert", "vl-convert-python")])
def test_a_missing_package_is_named_in_one_line_and_text_is_still_drawn(module, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    print_once.cache_clear()
    with pytest.raises(PackageMissing, match=rf"the package {package}, .* `pip install 'offbeat\[report\]'`$"):
        draw_curves(RUNS, tmp_path / "curves.svg", title="a title")
    for _ in range(2):
        draw_if_possible(lambda path: draw_curves(RUNS, path, title="a title"), tmp_path / "a.svg", tmp_path / "a.png")
    written = capsys.readouterr().err
    assert written.startswith(f"offbeat: no pictures: charts need the package {package}, ")
    assert written.count("\n") == 1
    assert not list(tmp_path.iterdir())
    draw_curves(RUNS, tmp_path / "curves.txt", title="a title")
    assert (tmp_path / "curves.txt").exists()


@pytest.mark.usefixtures("forked_children")
def test_commands_that_draw_beside_their_table_go_on_without_the_packages(offbeat, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    print_once.cache_clear()
    options = "--model resnet8 --data synthetic --shape 3,8,8 --classes 3 --samples 24 --batch-size 4 --epochs 1"
    done = offbeat(
        "compare",
        "--methods",
        "bp,adl",
        *options.split(),
        "-K",
        2,
        "--seeds",
        1,
        "--engine",
        "simulate",
        "--out",
        "both",
        "--json",
    )
    assert done.code == 0
    assert done.err.count("no pictures: charts need the package altair") == 1
    assert Path("both/comparison.md").exists()
    assert not Path("both/curves.svg").exists()
    small = "--model resnet8 --shape 3,8,8 -K 2 --batch-size 2 --picture p.svg"
    planned = offbeat("plan", *small.split())
    assert planned.code == 0
    assert "balance" in planned.out


@pytest.mark.parametrize("module", ["altair", "vl_convert", "jinja2"])
def test_a_report_without_its_packages_is_refused_in_one_line(offbeat, tmp_path, monkeypatch, module):
    made.run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, module, None)
    done = offbeat("report", "a")
    assert done.code == 2
    assert "pip install 'offbeat[report]'" in done.err
    assert done.err.count("\n") == 1
    assert not Path("report.html").exists()


def test_the_modules_that_training_needs_import_no_chart_package():
    import subprocess

    code = (
        "import sys, offbeat.cli, offbeat.report; "
        "import offbeat.studies.compare, offbeat.studies.reproduce, offbeat.studies.bench.rounds; "
        "sys.exit(bool({'altair', 'vl_convert'} & sys.modules.keys()))"
    )
    assert subprocess.run([preloaded.INTERPRETER, "-c", code]).returncode == 0  # which has imported nothing
