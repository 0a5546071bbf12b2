"""The HTML report: what it says of runs, comparisons, reproductions and benchmarks, also of broken ones."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import run_folders as made
from command import Command
from selected import some

from offbeat import models
from offbeat.report.cuts import parts as stages
from offbeat.report.overview import curves, grouped
from offbeat.report.page import html, parts, write_report
from offbeat.report.read import Epoch, RunRecord, read_run
from offbeat.report.sections import ReportPart
from offbeat.runs.tables import TABLES, Paper, Table, TableRow

VOID = {"meta", "link", "br", "img", "input"}


class Nested(HTMLParser):
    """Whether all that is opened is closed, and in order; and what stands in it."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(*folders: Path) -> str:
    """The page without its scripts and styles."""
    text = html(parts(folders))
    assert len(text) < 3_000_000
    reported = re.sub(r"<(style|script)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    read = Nested()
    read.feed(reported)
    assert not read.open
    assert all(address.startswith("#") or address == "data:," for address in read.addresses)
    assert not re.search(r"\b((?<!is )(nan|inf)|None)\b", reported)
    return reported


def data(folder: Path, name: str) -> list[dict]:
    """The rows that a chart of a report shows."""
    drawn = [drawing for part in parts([folder]) for section in part.sections for drawing in section.drawings()]
    (chart,) = (drawing.chart for drawing in drawn if drawing.name == name)
    return max(chart.to_dict()["datasets"].values(), key=len)


def figures(text: str, name: str) -> str:
    """What a headline figure says."""
    return re.search(rf"<dt>{name}</dt><dd>([^<]*)<", text)[1]  # type: ignore[index]


def titles(text: str) -> list[str]:
    return re.findall(r"<figcaption><b>([^<]*)</b>", text)


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


# ---- one run


def test_the_section_of_a_run_shows_its_records(tmp_path):
    run = made.run(tmp_path / "a")
    result = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    text = page(run)
    assert "<h1>resnet8 on synthetic, adl, K=3, M=2</h1>" in text
    assert figures(text, "test error") == f"{result['error']:.2f} %"
    assert figures(text, "staleness") == f"{max(result['staleness']):.2f}"
    assert figures(text, "state") == "finished"
    for part in ("commit", "machine", "versions", "seed 0", "3 epochs"):
        assert part in text
    assert titles(text) == ["By epoch", "By time", "Share of each stage", "Mean staleness", "Peak memory", "As planned"]


def test_a_missing_part_is_reported_with_the_option_that_records_it(tmp_path):
    text = words(page(made.run(tmp_path / "a")))
    assert "no trace: train with --trace 200" in text
    assert "no idle time: train with --trace 200" in text
    assert "no diagnosis: train with --diagnose 50" in text


def test_a_trace_and_a_diagnosis_are_drawn_where_they_are(tmp_path):
    run = made.run(tmp_path / "a")
    made.trace(run)
    made.diagnosis(run)
    text = page(run)
    assert titles(text)[4:] == [
        "Peak memory",
        "Idle time",
        "As recorded",
        "As planned",
        "Parameter gap",
        "Gradient norm",
        "Late against fresh gradients",
        "What staleness costs each stage",
    ]
    assert "no trace" not in text
    assert "no diagnosis" not in text
    assert "share of time" in text
    intervals = {(f"stage {one.k}", one.kind, str(one.batch)) for one in read_run(run).trace.excerpt(6).intervals}
    assert {(row["stage"], row["kind"], row["number"]) for row in data(run, "run-timeline")} == intervals
    gaps = {(row["series"], row["x"]): row["y"] for row in data(run, "run-gap")}
    assert gaps["stage 1", 0] == pytest.approx(100 * 0.1 * 2 / 6)
    lost = {(row["series"], row["x"]): row["y"] for row in data(run, "run-cost")}
    assert lost == {(f"stage {k}", s): 0.125 * (3 - k) * (s + 1) for k in (1, 2, 3) for s in range(10)}
    for end in ("stage 1  50 %", "stage 2  75 %", "stage 3  100 %"):
        assert end in html(parts([run]))
    assert "not recorded" not in text


def test_a_diagnosis_of_an_earlier_version_is_drawn_without_the_changes_of_the_loss(tmp_path):
    run = made.run(tmp_path / "a")
    made.diagnosis(run, changes=False)
    text = page(run)
    assert titles(text)[-3:] == ["Parameter gap", "Gradient norm", "Late against fresh gradients"]
    assert "what staleness costs each stage is not recorded: train with --diagnose 50 again" in words(text)
    assert not read_run(run).problems


def test_the_curves_are_those_of_the_epochs(tmp_path):
    run = made.run(tmp_path / "a")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    epochs = [line for line in lines if line["kind"] == "epoch"]
    rows = data(run, "run-curves")
    for series, key in (("test", "test_error"), ("training", "train_error")):
        drawn = [(row["x"], row["y"]) for row in rows if row["series"] == series]
        assert drawn == [(line["epoch"] + 1, line[key]) for line in epochs]


def test_measured_staleness_stands_beside_the_formulas(tmp_path):
    text = page(made.run(tmp_path / "a"))
    run = read_run(tmp_path / "a")
    rows = data(tmp_path / "a", "run-staleness")
    assert [(row["label"], row["value"], row["mark"]) for row in rows] == [
        (f"stage {k}", counted, formula)
        for k, (counted, formula) in enumerate(zip(run.staleness, run.formula, strict=True), start=1)
    ]
    assert "within 0.001 of the formula" in text


def test_the_partition_counts_what_the_network_has(tmp_path):
    run = read_run(made.run(tmp_path / "a"))
    network = models.build("resnet8", shape=(3, 8, 8), classes=3)
    found = stages(run.recipe)
    assert sum(part.parameters for part in found) == sum(weight.numel() for weight in network.parameters())
    assert sum(part.units for part in found) == len(network)
    names = [name for name, _ in network.named_children()]
    assert [part.first for part in found] == [names[cut] for cut in (0, *run.recipe.cuts)]
    layers = stages(read_run(made.run(tmp_path / "b", units="layers")).recipe)
    assert sum(part.parameters for part in layers) == sum(part.parameters for part in found)
    assert sum(part.flops for part in layers) == sum(part.flops for part in found)


@pytest.mark.parametrize("method", some(["bp", "gpipe", "ddg", "dgl", "dni", "dgl-async", "pipedream"], of=3))
def test_a_run_of_any_method_has_a_report(tmp_path, method):
    M = {"M": 1} if method != "bp" else {}
    assert "As planned" in page(made.run(tmp_path / "a", method=method, K=2, epochs=1, **M))


def test_one_stage_has_a_report_too(tmp_path):
    text = page(made.run(tmp_path / "a", method="bp", K=1, M=1, epochs=1))
    assert "K=1" in text


# ---- several


def test_runs_that_differ_in_their_seed_are_one_line_of_the_curves(tmp_path):
    runs = [
        made.run(tmp_path / name, **given)
        for name, given in (("a", {}), ("b", {"seed": 1}), ("c", {"method": "bp", "K": 1}))
    ]
    groups = grouped([read_run(run) for run in runs])
    assert {label: len(group) for label, group in groups.items()} == {"adl K=3 M=2": 2, "bp K=1 M=2": 1}
    text = page(*runs)
    assert "<h1>3 runs: resnet8 on synthetic</h1>" in text
    assert figures(text, "runs") == "3"
    assert text.count("<details") == 2
    errors = [read_run(tmp_path / name).curve for name in "ab"]
    bands = [(row["low"], row["high"]) for row in runs_data(runs) if row["series"] == "adl K=3 M=2"]
    assert bands == [(min(pair), max(pair)) for pair in zip(*errors)]


def runs_data(runs: list[Path]) -> list[dict]:
    drawing = parts(runs)[0].sections[1].drawings()[0]
    return max(drawing.chart.to_dict()["datasets"].values(), key=len)


def test_a_page_of_hundreds_of_long_runs_stays_below_3_megabytes():
    def run(number: int) -> RunRecord:
        epochs = [Epoch(n + 1, 30 + number / 7, 100 / (n + number + 1.7), None) for n in range(300)]
        return RunRecord(path=Path("x"), recipe=None, provenance={}, epochs=epochs, state="finished")

    rows = {f"resnet56-adl-k8-m4-sc-{number}": [run(number), run(number + 1)] for number in range(60)}
    families = [curves(dict(list(rows.items())[at : at + 15]), f"curves-{at}") for at in range(0, 60, 15)]
    assert families[0].drawings()[0].caption == "One epoch of 4 is drawn."
    values = max(families[0].drawings()[0].chart.to_dict()["datasets"].values(), key=len)
    assert [row["x"] for row in values if row["series"] == "resnet56-adl-k8-m4-sc-0"] == list(range(4, 301, 4))
    assert len(html([ReportPart("a title", "Reproduction", families)])) < 2_300_000


TEXT = {"model": "gpt:layers=2,width=8,heads=1,context=8", "data": "text", "data_dir": __file__, "shape": None}


def test_a_run_on_text_has_bits_per_byte_and_tokens_and_no_error(tmp_path):
    run = made.run(tmp_path / "a", **TEXT, classes=None)
    text = page(run)
    record = read_run(run)
    assert figures(text, "bits per byte") == f"{record.metric:.3f}"
    assert figures(text, "tokens per second") == f"{record.speed:,.0f}"
    assert "AdamW, lr 0.001, betas 0.9 0.95, weight decay 0.1" in text
    assert "error" not in text.lower()
    assert "embedding" in text  # of its stages
    for drawing in parts([run])[0].sections[1].drawings():
        assert "bits per byte" in json.dumps(drawing.chart.to_dict())


def test_images_and_text_have_tables_and_charts_of_their_own(tmp_path):
    runs = [made.run(tmp_path / "a"), made.run(tmp_path / "b", **TEXT, classes=None)]
    text = page(*runs)
    assert all(word in text for word in ("lowest test error", "lowest bits per byte", "error %", "tokens/s"))
    names = [drawing.name for drawing in parts(runs)[0].sections[1].drawings()]
    assert len(names) == len(set(names)) == 4


def test_a_folder_of_runs_is_all_its_runs(tmp_path):
    for name, given in (("a", {}), ("b", {"seed": 1})):
        made.run(tmp_path / "demo" / name, **given)
    (tmp_path / "demo" / "notes").mkdir()
    assert "<h1>2 runs: resnet8 on synthetic</h1>" in page(tmp_path / "demo")


def test_runs_with_the_same_name_get_different_labels(tmp_path):
    runs = [
        read_run(made.run(tmp_path / name, **given))
        for name, given in (("a", {"epochs": 1}), ("b", {"epochs": 1, "batch_size": 8}), ("c", {"epochs": 1}))
    ]
    common = "adl K=3 M=2 batch-size="
    assert list(grouped(runs)) == [f"{common}4", f"{common}8", f"{common}4 (c)"]


def test_a_comparison_has_its_own_table_and_notes(offbeat: Command):
    options = "--model resnet8 --data synthetic --shape 3,8,8 --classes 3 --samples 24 --batch-size 4 --epochs 2"
    made_by = ["compare", "--methods", "bp,adl", *options.split(), "-K", 2, "-M", 2, "--seeds", 2]
    assert offbeat(*made_by, "--engine", "simulate", "--out", "both", "--json").code == 0
    text = page(Path("both"))
    compared = json.loads(Path("both/comparison.json").read_text())
    for method in compared["rows"]:
        assert "{:.2f} ({:.2f}-{:.2f})".format(method["error"], *method["error_range"]) in text
    assert "match batch: b = 4 for all" in text
    assert figures(text, "runs") == "4"
    assert "bp, seed 0" in text
    Path("both/adl-seed0/metrics.jsonl").write_text("nonsense\n" * 3)
    assert "metrics.jsonl: 3 lines could not be read, left out" in words(page(Path("both")))


net_adl = TableRow(
    name="net-adl",
    title="Net, ADL",
    make=made.recipe,
    paper=Paper(6.18, "Table 0, first"),
)
net_diverges = TableRow(
    name="net-diverges",
    title="Net, BP at a rate that is too high",
    make=lambda **given: made.recipe(**{**given, "method": "bp", "K": 1, "lr": 1e30, "warmup": 0.0}),
    paper=Paper(None, "Table 0, second"),
    tier=2,
)


def test_a_reproduction_has_the_papers_values_beside_ours(offbeat: Command, monkeypatch):
    monkeypatch.setitem(TABLES, "small", Table(name="small", title="Small", rows=(net_adl, net_diverges)))
    offbeat("reproduce", "small", "--epochs", 2, "--seeds", 1, "--out", "x", "--json")
    text = page(Path("x"))
    reported = json.loads(Path("x/results.json").read_text())
    ours = next(row for row in reported["rows"] if row["error"] is not None and row["paper"])
    assert f"<td>{ours['paper']['error']:.2f}</td><td>{ours['error']:.2f}</td>" in text
    assert "div." in text
    assert figures(text, "runs") == "1 of 2"


def test_a_benchmark_is_bars_with_their_spread_and_a_table(tmp_path):
    text = page(made.bench(tmp_path / "a"))
    assert "<h1>Benchmark: resnet20, K=2, b=32</h1>" in text
    assert figures(text, "fastest of Offbeat") == "185"
    assert figures(text, "Offbeat : torch") == f"{185 / 149:.2f}"  # of the median round
    factors = [new / old for new, old in zip([180, 185, 190], [100, 104, 96], strict=True)]
    assert f"<td>185 (180-190)</td><td>{median(factors):.2f}</td>" in text  # within a round, as table.md has it
    assert "fr is left out: no time." in text
    assert "Offbeat ADL is 1.24 times as fast as torch pipelining, 1F1B here" in text
    assert titles(text) == ["Samples per second", "Memory per worker", "Bytes moved per batch"]
    rows = [(row["value"], row["low"], row["high"], row["group"]) for row in data(tmp_path / "a", "bench-speed")]
    assert rows == [
        (185, 180, 190, "Offbeat"),
        (150, 149, 152, "torch.distributed"),
        (100, 96, 104, "back-propagation"),
    ]
    assert [row["value"] for row in data(tmp_path / "a", "bench-bytes-moved")] == [0, 25, 25]


@pytest.mark.parametrize("found", [[None, 1.25, 0.5, 0.0], None, "broken"])
def test_staleness_that_stage_1_has_not_measured_is_left_out(tmp_path, found):
    folder = made.scaling(tmp_path / "a")
    record = json.loads((folder / "scaling.json").read_text())
    record["points"][-1]["staleness_measured"] = found
    (folder / "scaling.json").write_text(json.dumps(record))
    assert "1.25" not in page(folder)
    drawn = {(row["series"], row["x"]) for row in data(folder, "scaling-staleness")}
    assert ("stage 1, measured", 2) in drawn
    assert ("stage 1, measured", 4) not in drawn


def test_a_scaling_study_is_lines_over_k(tmp_path):
    text = page(made.scaling(tmp_path / "a"))
    assert titles(text) == ["ADL", "GPipe, at most 4K micro-batches", "Memory", "Mean staleness"]
    drawn = {(row["series"], row["x"]): row["y"] for row in data(tmp_path / "a", "scaling-speed-up-adl")}
    assert drawn["10 GbE", 256] == 256 / (1 + 256 * 0.02)
    assert drawn["measured, one core per stage", 4] == pytest.approx(4.0)
    assert figures(text, "measured speed-up") == "4.00 x"
    assert "left out: strong: K=8: only 4 cores" in text


def test_folders_of_all_kinds_make_one_page(tmp_path):
    text = page(made.run(tmp_path / "a"), made.bench(tmp_path / "b"), made.scaling(tmp_path / "c"))
    for kind in ("Run", "Benchmark", "Scaling study"):
        assert f'<p class="kicker">{kind}</p>' in text
    assert re.search(r"<title>.* and 2 more</title>", text)
    two = page(tmp_path / "a", tmp_path / "b")
    assert re.search(r"<title>.* and 1 more</title>", two)


def test_the_top_5_error_has_a_column_only_where_a_run_has_one(tmp_path):
    run = made.run(tmp_path / "a")
    assert ">top-5 %<" not in page(run)  # of few classes
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"top5": null', '"top5": 1.25'))
    assert ">top-5 %<" in page(run)


# ---- broken and half-written


def spoil(run: Path, how: str) -> str:
    """Break something in a run folder; what the page says of it."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    if how == "config is cut off":
        (run / "config.json").write_text((run / "config.json").read_text()[:80])
        return "config.json cannot be read"
    if how == "config is a list":
        (run / "config.json").write_text("[1, 2]")
        return "config.json holds no recipe that can be read"
    if how == "config of another version":
        (run / "config.json").write_text((run / "config.json").read_text().replace('"momentum"', '"impetus"'))
        return "setting in"
    if how == "config is gone":
        (run / "config.json").unlink()
        return "there is no config.json"
    if how == "nothing recorded":
        metrics.unlink()
        return "no epoch is complete in any run yet"
    if how == "last line is half-written":
        metrics.write_text("".join(lines)[:-40])
        return "under way"
    if how == "lines are nonsense":
        metrics.write_text(lines[0] + "{nonsense\n\x00\n[1]\n" + "".join(lines[1:]))
        return "metrics.jsonl: 3 lines could not be read, left out"
    if how == "figures are missing":
        metrics.write_text("".join(line.replace('"test_error"', '"mistakes"') for line in lines))
        return "metrics.jsonl: 3 lines without the expected figures, left out"
    if how == "figures are no numbers":
        metrics.write_text("".join(re.sub(r'"(test_error|seconds)": [\d.]+', r'"\1": NaN', line) for line in lines))
        return "3 lines without the expected figures"
    if how == "staleness of other stages":
        odd = [re.sub(r'"(staleness|memory)": \[[^]]*\]', r'"\1": [1, "x"]', line) for line in lines]
        metrics.write_text("".join(odd))
        return "no staleness or memory recorded yet"
    if how == "failed":
        metrics.write_text("".join(lines[:-1]) + '{"kind": "failed", "time": 0, "reason": "stage 2 is <gone>"}\n')
        return "failed: stage 2 is &lt;gone&gt;"
    if how == "diverged":
        metrics.write_text("".join(lines[:-1]) + '{"kind": "result", "time": 0, "loss": NaN, "error": 90.0}\n')
        return "failed: the test loss is "
    if how == "resumed from nowhere":
        metrics.write_text("".join(lines) + '{"kind": "resumed", "time": 0}\n')
        return "the batch of a resumed checkpoint cannot be read"
    if how == "trace is cut off":
        made.trace(run)
        (run / "trace.json").write_text((run / "trace.json").read_text()[:500])
        return "trace.json cannot be read"
    if how == "trace of other stages":
        made.trace(run, K=2)
        return "no plan next to it"
    if how == "trace without a stage":
        made.trace(run)
        content = json.loads((run / "trace.json").read_text())
        content["traceEvents"] = [event for event in content["traceEvents"] if event["tid"] != 2]
        (run / "trace.json").write_text(json.dumps(content))
        return "no plan next to it: the trace has no forward or backward of some stage"
    if how == "trace is a folder":
        (run / "trace.json").mkdir()
        return "trace.json cannot be read"
    assert how == "diagnosis is odd"
    made.diagnosis(run)
    (run / "diagnosis.jsonl").write_text('{"stage": 1}\n' + (run / "diagnosis.jsonl").read_text() + '{"stage": 2, "gap')
    return "diagnosis.jsonl: 1 line without the expected figures, left out"


@pytest.mark.parametrize(
    "how",
    [
        "config is cut off",
        "config is a list",
        "config of another version",
        "config is gone",
        "nothing recorded",
        "last line is half-written",
        "lines are nonsense",
        "figures are missing",
        "figures are no numbers",
        "staleness of other stages",
        "failed",
        "diverged",
        "resumed from nowhere",
        "trace is cut off",
        "trace of other stages",
        "trace without a stage",
        "trace is a folder",
        "diagnosis is odd",
    ],
)
def test_broken_records_are_reported_and_the_rest_is_shown(tmp_path, how):
    run = made.run(tmp_path / "a")
    reported = spoil(run, how)
    text = html(parts([run]))
    assert reported in text
    assert "Peak memory" in text or how in ("nothing recorded", "staleness of other stages", "config is a list")
    assert reported in html(parts([run, made.run(tmp_path / "b", method="bp", K=1)])) or how in (
        "nothing recorded",
        "last line is half-written",
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"rows": 3}',
        '{"rows": [{}, 1, {"samples_per_second": []}]}',
        '{"settings": 1, "provenance": [], "rows": [{"samples_per_second": 3}]}',
        '{"rows": [{"family": "bp", "samples_per_second": [0]}, {"samples_per_second": [1, NaN]}], "bound": {}}',
    ],
)
@pytest.mark.parametrize("name", ["bench.json", "scaling.json"])
def test_a_broken_benchmark_is_reported(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    text = page(tmp_path)
    assert (
        "no row has been measured" in text
        or "no point has been measured" in text
        or ("no table: bench.json lacks" in text)
    )


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"table": "small"}', '{"table": 3, "settings": 1}'])
def test_a_broken_reproduction_is_reported(tmp_path, content):
    (tmp_path / "reproduction.json").write_text(content)
    assert "cannot be" in page(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        '{"comparison": 1}',
        '{"comparison": {"runs": [{"folder": "x"}, 2]}}',
        '{"comparison": {"runs": [], "asked": {}}}',
    ],
)
def test_a_broken_comparison_is_reported(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert "the comparison&#x27;s table cannot be made" in page(tmp_path)


# ---- the command


def test_the_command_writes_the_page_and_reports_its_size(offbeat: Command, tmp_path):
    made.run(tmp_path / "a")
    done = offbeat("report", "a")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("report.html: 6 charts, ")
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_the_same_records_give_the_same_bytes(tmp_path):
    run = made.run(tmp_path / "a")
    made.trace(run)
    assert page(run) == page(run)


def test_pictures_are_files_of_their_own(tmp_path):
    run = made.run(tmp_path / "a")
    count = write_report([run], tmp_path / "a.html", tmp_path / "deep" / "pictures")
    drawn = sorted((tmp_path / "deep" / "pictures").iterdir())
    assert len(drawn) == 2 * count == 12
    for file in drawn:
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        else:
            assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder: give the folder of a run"),
        (["empty"], "empty holds none of config.json, metrics.jsonl"),
        (["a", "--out", "no/such/report.html"], "cannot write no/such/report.html"),
        (["a", "--pictures", "file"], "--pictures file: File exists"),
        ([], "Missing argument"),
    ],
)
def test_misuse_is_one_line(offbeat: Command, tmp_path, arguments, message):
    made.run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    done = offbeat("report", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    shutil.rmtree(tmp_path / "a")
