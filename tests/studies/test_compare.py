"""`offbeat compare`: one recipe for all methods, a run folder each, a table of what they recorded, and going on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from command import Command, Outcome, check_refused
from fixed_times import few_laps
from preloaded import PYTHON
from processes import another_process

from offbeat.errors import FolderTaken
from offbeat.methods import METHODS
from offbeat.runs import begin, lock
from offbeat.studies.compare import MethodSpec, recipe_of
from offbeat.studies.runner import StudyRunner
from offbeat.studies.training import StudyRun, TrainingRuns

pytestmark = pytest.mark.usefixtures("forked_children")

TINY = ("--model", "mlp", "--data", "synthetic", "--samples", 80, "--classes", 3, "--batch-size", 4)
SMALL = (*TINY, "-K", 2, "-M", 2, "--epochs", 2, "--engine", "simulate", "--threads-per-stage", 1)


def compare(offbeat: Command, methods: str, *arguments: object, seeds: int = 1) -> Outcome:
    return offbeat("compare", "--methods", methods, *SMALL, "--seeds", seeds, "--out", "x", *arguments)


MADE: dict[int, tuple[Outcome, Path]] = {}


@pytest.fixture
def compared(offbeat, tmp_path_factory) -> Callable[[int], Outcome]:
    """A finished comparison of bp and adl over so many seeds, in x: made once, then copied."""

    def make(seeds: int) -> Outcome:
        if seeds not in MADE:
            outcome, kept = compare(offbeat, "bp,adl", seeds=seeds), tmp_path_factory.mktemp("made") / "x"
            assert outcome.code == 0, outcome
            shutil.move("x", kept)
            MADE[seeds] = outcome, kept
        shutil.copytree(MADE[seeds][1], "x")
        return MADE[seeds][0]

    return make


def told(outcome: Outcome) -> dict[str, dict]:
    """The rows that --json printed, by label."""
    assert outcome.code == 0, outcome.err
    return {row["label"]: row for row in json.loads(outcome.out)["rows"]}


def lines(run: str, kind: str) -> list[dict]:
    every = [json.loads(line) for line in (Path("x") / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def recipe(run: str) -> dict:
    return json.loads((Path("x") / run / "config.json").read_text())["recipe"]


def model_bytes(run: str) -> bytes:
    return (Path("x") / run / "model.safetensors").read_bytes()


def no_training(monkeypatch) -> None:
    monkeypatch.setattr("offbeat.runs.begin.begin", lambda *_, **__: pytest.fail("trained"))


# ---- one recipe


def test_every_run_is_a_run_folder_and_the_table_is_what_they_recorded(offbeat):
    rows = told(compare(offbeat, "bp,adl", "--json", seeds=3))
    for label, row in rows.items():
        results = [lines(f"{label}-seed{seed}", "result")[0] for seed in range(3)]
        errors = [result["error"] for result in results]
        assert row["errors"] == {str(seed): error for seed, error in enumerate(errors)}
        assert row["error"] == median(errors)
        assert row["error_range"] == [min(errors), max(errors)]
        assert row["samples_per_second"] == median(result["samples_per_second"] for result in results)
        assert row["staleness"] == results[0]["staleness"]
        assert row["memory"] == [max(stage) for stage in zip(*(result["memory"] for result in results))]
        assert min(row["memory"]) > 0
        assert row["curves"] == [
            [line["test_error"] for line in lines(f"{label}-seed{seed}", "epoch")] for seed in range(3)
        ]
        for seed in range(3):
            assert recipe(f"{label}-seed{seed}")["seed"] == seed
            assert model_bytes(f"{label}-seed{seed}")
    assert (rows["bp"]["staleness"], rows["adl"]["staleness"]) == ([0, 0], [1, 0])
    assert rows["bp"]["speed_up"] == 1
    assert rows["adl"]["speed_up"] == rows["adl"]["samples_per_second"] / rows["bp"]["samples_per_second"]
    assert json.loads(Path("x/comparison.json").read_text())["rows"] == list(rows.values())


def test_a_run_of_a_comparison_is_the_run_that_train_makes(offbeat, compared):
    compared(1)
    assert offbeat("train", *SMALL, "--method", "adl", "--out", "x/alone").code == 0
    assert model_bytes("alone") == model_bytes("adl-seed0")
    assert recipe("alone") == recipe("adl-seed0")


def test_the_partition_is_chosen_once_and_recorded_in_the_comparison_and_every_run(offbeat):
    with few_laps():
        compare(offbeat, "bp,adl", "--partition", "measured", "--epochs", 1, seeds=2)
    partition = json.loads(Path("x/config.json").read_text())["comparison"]["partition"]
    assert partition["K"] == 2
    assert len(partition["cuts"]) == 1
    for run in ("bp-seed0", "bp-seed1", "adl-seed0", "adl-seed1"):
        assert (recipe(run)["cuts"], recipe(run)["units"]) == (partition["cuts"], partition["units"])


def asked(**settings: object) -> dict:
    return {"methods": [], "match": "batch", "seeds": 1, "M": 4, "batch_size": 32, "lr": None, "K": 2, **settings}


def test_m_applies_to_delayed_methods_and_the_rate_follows_the_samples_per_update():
    for label, M in {"bp": 1, "bp:M=3": 3, "adl": 4, "adl:M=2": 2}.items():
        made = recipe_of(MethodSpec.of(label), asked())
        assert (made.M, made.batch_size) == (M, 32)
        assert made.lr == 0.1 * 32 * M / 256


def test_matching_the_effective_batch_gives_methods_with_m_1_larger_batches():
    for label, (M, b) in {"bp": (1, 128), "bp:M=2": (2, 64), "adl": (4, 32), "adl:M=8": (8, 16)}.items():
        made = recipe_of(MethodSpec.of(label), asked(match="effective"))
        assert (made.M, made.batch_size) == (M, b)
        assert made.lr == pytest.approx(0.1 * 128 / 256)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_splits_the_same_samples_per_update(name):
    made = recipe_of(MethodSpec.of(name), asked(match="effective", batch_size=None, batch_per_update=128))
    assert (made.batch_size * made.M, made.batch_per_update) == (128, 128)
    assert made.lr == 0.1 * 128 / 256


def test_samples_per_update_are_in_recipes_table_and_title(offbeat):
    given = [part for part in SMALL if part not in ("--batch-size", 4)]
    outcome = offbeat(
        "compare", *given, "--methods", "bp,adl,adl:M=4", "--seeds", 1, "--out", "x", "--batch-per-update", 8
    )
    assert outcome.code == 0, outcome.err
    assert {recipe(f"{run}-seed0")["batch_size"] for run in ("bp", "adl", "adl-M=4")} == {8, 4, 2}
    assert {recipe(f"{run}-seed0")["batch_per_update"] for run in ("bp", "adl", "adl-M=4")} == {8}
    assert {recipe(f"{run}-seed0")["lr"] for run in ("bp", "adl", "adl-M=4")} == {0.1 * 8 / 256}
    assert len({str(recipe(f"{run}-seed0")["cuts"]) for run in ("bp", "adl", "adl-M=4")}) == 1
    assert "8 samples per update" in outcome.out.splitlines()[0]
    rows = {row["label"]: row for row in json.loads(Path("x/comparison.json").read_text())["rows"]}
    assert {row["samples_per_update"] for row in rows.values()} == {8}


def test_samples_per_update_that_a_later_row_cannot_have_are_refused_before_any_run(offbeat):
    given = [part for part in SMALL if part not in ("--batch-size", 4)]
    arguments = ("compare", *given, "--methods", "adl,bp", "--batch-per-update", 100)
    check_refused(offbeat, arguments, "--batch-per-update 100 in batches of 100, but an epoch has 80 samples: use")


@pytest.mark.parametrize("methods", ["bp,auto:M=4,adl", "auto:M=4,bp,adl"])
def test_auto_among_batches_of_equal_size_is_named_with_its_samples_per_update(offbeat, methods):
    """Title and notes said that all rows have the b or the samples per update of one of them."""
    outcome = compare(offbeat, methods)
    assert outcome.code == 0, outcome.err
    made = json.loads(Path("x/comparison.json").read_text())
    assert {row["label"]: row["samples_per_update"] for row in made["rows"]} == {"bp": 4, "auto:M=4": 8, "adl": 8}
    assert made["title"].endswith("--match batch")
    assert made["notes"][0].startswith("match batch: b = 4 for all but auto:M=4 (b = 2), each method at its own M; ")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_recipe_in_a_comparison(name):
    made = recipe_of(MethodSpec.of(name), asked())
    method = made.make_method()
    assert made.lr == 0.1 * 32 * method.M / 256
    assert (made.M, made.weights, made.window) == (method.M, method.weights, method.window)
    assert made.K in (1, 2)


def test_settings_of_a_method_stand_after_its_name_with_commas_between_them(offbeat):
    outcome = compare(offbeat, "adl:M=1,weights=hybrid,dni:lr=0.001,conditional=yes", "--lr", 0.01)
    assert outcome.code == 0, outcome.err
    adl, dni = recipe("adl-M=1-weights=hybrid-seed0"), recipe("dni-lr=0.001-conditional=yes-seed0")
    assert adl["settings"] == {"M": 1, "weights": "hybrid", "window": "count"}
    assert (dni["lr"], dni["settings"]["lr"], dni["settings"]["conditional"]) == (0.01, 0.001, True)


def test_a_method_that_trains_whole_networks_runs_with_one_stage_which_is_stated(offbeat):
    outcome = compare(offbeat, "adl,asgd:N=3")
    assert outcome.code == 0
    assert [recipe(f"{run}-seed0")["K"] for run in ("adl", "asgd-N=3")] == [2, 1]
    assert "asgd:N=3: K=1" in outcome.out
    assert lines("asgd-N=3-seed0", "result")[0]["staleness"] == [2]


# ---- the table


def test_the_table_names_the_match_and_the_samples_per_batchnorm_statistic(offbeat, compared):
    batch = compared(2)
    assert "--match batch" in batch.out.splitlines()[0]
    assert "b = 4 for all" in batch.out
    shutil.rmtree("x")
    effective = compare(offbeat, "bp,adl", "--match", "effective")
    assert "--match effective" in effective.out.splitlines()[0]
    assert "8 samples per update" in effective.out
    rows = [line.split()[:4] for line in effective.out.splitlines() if line.startswith(("  bp ", "  adl "))]
    assert rows == [["bp", "1", "8", "8"], ["adl", "2", "8", "4"]]
    markdown = Path("x/comparison.md").read_text()
    assert "--match effective" in markdown.splitlines()[0]
    assert "| bp | 1 | 8 | 8 |" in markdown


def test_the_table_fits_a_terminal_of_any_width_and_shortens_no_figure(offbeat, monkeypatch):
    for columns in (80, 120):  # the runs are trained once
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = compare(offbeat, "bp,adl:window=aligned:weights=replay", seeds=2)
        table = outcome.out.split("\n- ")[0]
        assert columns / 2 < max(map(len, table.splitlines())) <= columns
        assert "…" not in outcome.out


def test_names_and_figures_of_three_stages_are_whole_in_80_columns(offbeat, monkeypatch):
    """A method's name was broken within its words, and the columns of stages were cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    outcome = compare(offbeat, "bp,adl:corrector=sc", "-K", 3)
    table = outcome.out.split("\n- ")[0]
    assert "corrector=sc" in table
    rows = table.rpartition("─")[2].rstrip().splitlines()
    staleness = " ".join(row.rstrip().rpartition("  ")[2] for row in rows if "0" in row).split()
    assert staleness == ["0.00", "0.00", "0.00", "2.00", "1.00", "0.00"]
    assert "BN" not in table  # the same for all


def test_replayed_forwards_report_staleness_of_input_and_jacobian_separately(offbeat):
    outcome = compare(offbeat, "bp,adl:weights=replay")
    assert "1.00/0 0.00/0" in Path("x/comparison.md").read_text()
    assert "by construction of replay" in outcome.out
    row = told(compare(offbeat, "bp,adl:weights=replay", "--json"))["adl:weights=replay"]
    assert (row["staleness"], row["jacobian"]) == ([1, 0], [0, 0])


def test_the_peak_memory_of_each_stage_is_the_largest_of_its_runs(offbeat, compared):
    compared(2)
    peaks = {"adl-seed0": [3_000_000, 19_000_000], "adl-seed1": [5_000_000, 7_000_000]}
    for run, memory in peaks.items():
        file = Path("x") / run / "metrics.jsonl"
        written = [json.loads(line) for line in file.read_text().splitlines()]
        for line in written:
            if line["kind"] in ("epoch", "result"):
                line["memory"] = memory
        file.write_text("".join(json.dumps(line) + "\n" for line in written))
    assert told(compare(offbeat, "bp,adl", "--json", seeds=2))["adl"]["memory"] == [5_000_000, 19_000_000]
    assert "| 5.0 19 |" in Path("x/comparison.md").read_text()


def test_the_curves_are_pictures_of_every_methods_errors(offbeat, compared, pictures):
    compared(2)
    assert compare(offbeat, "bp,adl", seeds=2).code == 0  # which trains nothing again
    assert Path("x/curves.png").read_bytes().startswith(b"\x89PNG")
    svg = Path("x/curves.svg").read_text()
    last = {row["label"]: row["error"] for row in json.loads(Path("x/comparison.json").read_text())["rows"]}
    assert last.keys() == {"bp", "adl"}
    assert all(f">{name}  {error:.2f} %</text>" in svg for name, error in last.items())


def test_without_a_method_that_keeps_all_locks_there_is_no_speed_up(offbeat):
    assert told(compare(offbeat, "adl", "--json"))["adl"]["speed_up"] is None


# ---- what fails


def test_a_run_that_is_not_finite_is_reported_in_its_row_and_the_others_continue(offbeat):
    # with M = 1000 the one update comes after the last evaluation
    outcome = compare(offbeat, "bp,bp:M=1000", "--lr", "1e30", seeds=2)
    assert outcome.code == 0
    assert ["failed" in line for line in outcome.out.splitlines() if line.startswith("  bp ")] == [True, False]
    assert "bp, seed 1: no result (the loss of batch" in outcome.out
    row = told(compare(offbeat, "bp,bp:M=1000", "--lr", "1e30", "--json", seeds=2))
    assert set(row["bp"]["failed"]) == {"0", "1"}
    assert row["bp"]["error"] is None
    assert row["bp:M=1000"]["failed"] == {}
    assert row["bp:M=1000"]["speed_up"] == 1


def test_a_network_that_is_not_finite_at_the_end_has_no_result(offbeat):
    compare(offbeat, "bp:M=1000")
    batches = lines("bp-M=1000-seed0", "epoch")[-1]["batches"]
    shutil.rmtree("x")
    outcome = compare(offbeat, f"bp:M={batches}", "--lr", "1e30")  # one update, right before the last evaluation
    assert len(lines(f"bp-M={batches}-seed0", "result")) == 1
    assert outcome.code == 1
    assert "the test loss is nan at the end" in outcome.out


def test_nothing_but_failures_is_exit_code_1(offbeat):
    outcome = compare(offbeat, "bp,bp:window=aligned", "--lr", "1e30")
    assert outcome.code == 1
    rows = [line for line in outcome.out.splitlines() if line.startswith("  bp")]
    assert len(rows) == 2
    assert all("failed" in row for row in rows)
    assert "Traceback" not in outcome.err


def test_an_error_in_one_run_is_reported_in_its_row_and_kept_in_its_folder(offbeat, monkeypatch):
    def defective(recipe, *arguments, **options):
        if recipe.method == "bp":
            raise ZeroDivisionError("of all things")
        return whole_begin(recipe, *arguments, **options)

    whole_begin = begin.begin
    monkeypatch.setattr(begin, "begin", defective)
    rows = told(compare(offbeat, "bp,adl", "--json"))
    assert rows["bp"]["failed"] == {"0": "ZeroDivisionError: of all things"}
    assert "in defective" in Path("x/bp-seed0/traceback.txt").read_text()
    assert rows["adl"]["failed"] == {}
    assert rows["adl"]["speed_up"] is None


# ---- going on


def test_what_is_finished_is_not_run_again(offbeat, compared, monkeypatch):
    first = compared(2)
    no_training(monkeypatch)
    again = compare(offbeat, "bp,adl", seeds=2)
    assert again.code == 0
    assert again.out == first.out
    assert "4 of 4 runs are finished" in again.err


def test_a_run_that_was_stopped_is_moved_aside_and_run_again_to_the_same_bits(offbeat, compared):
    compared(2)
    before = {run: model_bytes(run) for run in ("bp-seed0", "bp-seed1", "adl-seed0", "adl-seed1")}
    file = Path("x/adl-seed1/metrics.jsonl")
    file.write_text(file.read_text().split('{"kind": "result"')[0] + '{"kind": "epo')  # killed while it wrote
    (Path("x/adl-seed1") / "model.safetensors").unlink()
    stamps = {run: (Path("x") / run / "config.json").stat().st_mtime_ns for run in before}
    assert compare(offbeat, "bp,adl", seeds=2).code == 0
    assert {run: model_bytes(run) for run in before} == before
    changed = [run for run in before if (Path("x") / run / "config.json").stat().st_mtime_ns != stamps[run]]
    assert changed == ["adl-seed1"]
    assert Path("x/unfinished/adl-seed1-1/metrics.jsonl").exists()


def test_ctrl_c_loses_nothing_that_is_finished(offbeat, monkeypatch):
    ran = []

    def stopped(recipe, *arguments, **options):
        ran.append(recipe.method)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return whole_begin(recipe, *arguments, **options)

    whole_begin = begin.begin
    monkeypatch.setattr(begin, "begin", stopped)
    before = signal.getsignal(signal.SIGINT)
    outcome = compare(offbeat, "bp,adl")
    signal.signal(signal.SIGINT, before)  # the command ignores a second one, and so would the processes of later tests
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1].startswith("offbeat: stopped by Ctrl-C; repeat the command to continue in x")
    kept = model_bytes("bp-seed0")
    assert compare(offbeat, "bp,adl").code == 0
    assert ran == ["bp", "adl", "adl"]
    assert model_bytes("bp-seed0") == kept


DIFFERENT = {
    "methods": (("--methods", "bp,adl:M=3"), "methods: bp,adl there, bp,adl:M=3 here"),
    "epochs": (("--epochs", 3), "epochs: 2 there, 3 here"),
    "seeds": (("--seeds", 2), "seeds: 1 there, 2 here"),
    "match": (("--match", "effective"), "match: batch there, effective here"),
    "rate": (("--lr", 0.1), "lr: not given there, 0.1 here"),
    "a setting more": (("--momentum", 0.5), "momentum: not given there, 0.5 here"),
}


def test_another_configuration_in_the_folder_is_refused_in_one_line(offbeat, compared, monkeypatch):
    compared(1)
    no_training(monkeypatch)
    base = ("compare", "--methods", "bp,adl", *SMALL, "--seeds", 1, "--out", "x")
    for arguments, words in DIFFERENT.values():
        check_refused(offbeat, (*base, *arguments), "x holds another comparison", words, "give another folder as --out")


def test_a_folder_that_holds_something_else_is_refused(offbeat):
    assert offbeat("train", *SMALL, "--out", "x").code == 0
    base = ("compare", "--methods", "bp", *SMALL, "--out")
    check_refused(offbeat, (*base, "x"), "does not hold a comparison")
    Path("file").write_text("in the way")
    check_refused(offbeat, (*base, "file"), "file", "give another folder as --out")


def test_a_finished_run_of_another_recipe_is_refused(offbeat, compared):
    compared(1)
    file = Path("x/adl-seed0/config.json")
    file.write_text(file.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))
    check_refused(
        offbeat, ("compare", "--methods", "bp,adl", *SMALL, "--seeds", 1, "--out", "x"), "adl-seed0", "another recipe"
    )


# ---- several at a time


@pytest.mark.slow
def test_runs_at_a_time_are_processes_that_give_the_same_bits(offbeat, compared):
    outcome = compare(offbeat, "bp,adl", "--jobs", 2)
    assert outcome.code == 0, outcome.err
    together = {run: model_bytes(run) for run in ("bp-seed0", "adl-seed0")}
    assert "2 runs at the same time shared the machine" in outcome.out
    shutil.rmtree("x")
    compared(1)
    assert {run: model_bytes(run) for run in together} == together


def test_a_job_leaves_a_folder_alone_that_another_process_uses(tmp_path):
    run = StudyRun("bp", 0, recipe_of(MethodSpec.of("bp"), asked(model="mlp", data="synthetic", K=1)))
    folder = tmp_path / "x" / run.name
    runs = TrainingRuns(StudyRunner(tmp_path / "x", show=False), tmp_path / "x")
    with another_process(folder) as other, pytest.raises(FolderTaken, match=f"process {other.pid}"):
        runs.execute_jobs([run], 2)
    assert [path.name for path in folder.iterdir()] == [lock.FILE]


@pytest.mark.slow
def test_a_process_that_fails_is_a_row_with_the_reason(offbeat):
    rows = told(compare(offbeat, "bp,bp:M=1000", "--lr", "1e30", "--jobs", 2, "--json"))
    assert rows["bp"]["failed"]["0"].startswith("the loss of batch")
    assert rows["bp:M=1000"]["failed"] == {}


@contextmanager
def two_at_a_time(folder: Path) -> Iterator[subprocess.Popen]:
    """A comparison in a process of its own, when both of its endless runs have begun to train."""
    command = [
        PYTHON,
        "-m",
        "offbeat",
        "compare",
        "--methods",
        "bp,adl",
        *map(str, SMALL),
        "--seeds",
        "1",
        "--out",
        "x",
        "--jobs",
        "2",
        "--epochs",
        "100000",
    ]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + 100
            while not all(Path("x", run, "metrics.jsonl").exists() for run in ("bp-seed0", "adl-seed0")):
                assert time.monotonic() < until
                assert process.poll() is None
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_stops_all_concurrent_runs_and_each_records_it(offbeat, tmp_path):
    with two_at_a_time(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("offbeat: stopped by Ctrl-C; repeat the command to continue in x")
    assert "Traceback" not in said
    for run in ("bp-seed0", "adl-seed0"):
        assert len(lines(run, "interrupted")) == 1


@pytest.mark.slow
def test_no_run_outlives_a_comparison_that_is_killed(offbeat, tmp_path):
    with two_at_a_time(tmp_path) as process:
        process.kill()
    time.sleep(2)
    sizes = [Path("x", run, "metrics.jsonl").stat().st_size for run in ("bp-seed0", "adl-seed0")]
    time.sleep(2)
    assert sizes == [Path("x", run, "metrics.jsonl").stat().st_size for run in ("bp-seed0", "adl-seed0")]


# ---- bad input

REFUSED: dict[str, tuple[tuple, tuple[str, ...]]] = {
    "no methods": (("--methods", ","), ("--methods names no method",)),
    "an unknown method": (("--methods", "bp,ald"), ("'ald'", "did you mean 'adl'")),
    "a method twice": (("--methods", "bp,adl,bp"), ("'bp' is given twice",)),
    "an unknown setting": (("--methods", "adl:N_=2"), ("adl takes no N_", "M (default 4), window (default count)")),
    "the same in two forms": (("--methods", "adl:M=1:weights=hybrid,adl:M=1,weights=hybrid"), ("is given twice",)),
    "a setting without value": (("--methods", "adl:M"), ("adl:M", "give each setting once")),
    "a setting twice": (("--methods", "adl:M=1:M=2"), ("give each setting once",)),
    "a setting in words": (("--methods", "adl:M=two"), ("'M=two': use an integer",)),
    "a truth that is none": (("--methods", "ddg:barrier=2"), ("barrier=2", "yes or no")),
    "a setting that the method does not take": (("--methods", "adl:m=4"), ("adl takes no m",)),
    "an unknown match": (("--methods", "adl", "--match", "batches"), ("'batches'", "did you mean 'batch'")),
    "no seeds": (("--methods", "adl", "--seeds", 0), ("--seeds 0",)),
    "no jobs": (("--methods", "adl", "--jobs", 0), ("--jobs 0",)),
    "M=0": (("--methods", "adl", "-M", 0), ("-M 0",)),
    "K=0": (("--methods", "adl", "-K", 0), ("-K 0",)),
    "K above the units": (("--methods", "adl", "-K", 99), ("99 stages",)),
    "nobody beside": (("--methods", "adl", "--side-by-side", 0), ("--side-by-side 0",)),
    "both ways at once": (("--methods", "adl", "--side-by-side", 2, "--jobs", 2), ("use one of the two",)),
    "processes by turns": (("--methods", "adl", "--side-by-side", 2, "--engine", "processes"), ("--engine simulate",)),
    "jobs of processes": (("--methods", "adl", "--jobs", 2, "--engine", "processes"), ("--engine simulate",)),
    "an unknown model": (("--methods", "adl", "--model", "resnet65"), ("did you mean 'resnet56'",)),
    "a rate below 0": (("--methods", "adl", "--lr", -1), ("--lr -1",)),
    "batches that do not match": (("--methods", "adl:M=3", "--match", "effective"), ("8 samples per update",)),
    "an update that cannot be split": (
        ("--methods", "adl:M=3", "--batch-per-update", 8),
        ("--batch-per-update 8 with M = 3", "use a multiple of 3"),
    ),
    "batches of more samples than an epoch": (
        ("--methods", "adl,bp", "--batch-size", 60, "--match", "effective"),
        ("bp with --match effective: batches of 120 samples, but an epoch has 80, give a smaller --batch-size or -M",),
    ),
    "a batch of more samples than an epoch": (
        ("--methods", "adl,bp", "--batch-size", 81),
        ("--batch-size 81, but an epoch has 80 samples: use --batch-size 80 or less",),
    ),
    "equal batches with equal updates": (
        ("--methods", "bp", "--match", "batch", "--batch-per-update", 8),
        ("--match batch with --batch-per-update 8, which makes updates equal: leave out one of them",),
    ),
    "too many seeds": (
        ("--methods", "adl", "--seeds", 10**9),
        ("--seeds 1000000000: use a whole number from 1 to 1000",),
    ),
    "two sizes": (
        ("--methods", "adl:M=2", "--batch-per-update", 64),
        ("--batch-size 4 with --batch-per-update 64", "leave out"),
    ),
    "no methods at all": ((), ("--methods",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(offbeat, name):
    arguments, words = REFUSED[name]
    check_refused(offbeat, ("compare", *SMALL, *arguments), *words)


@pytest.mark.parametrize("engine", [("--engine", "processes"), ()])
def test_more_processes_than_can_share_the_cores_are_refused_before_any_run(engine, offbeat, monkeypatch):
    """The runs of one stage were trained, then those of adl failed one by one."""
    monkeypatch.setattr("offbeat.runs.launch.cores", lambda: 1)
    given = ("compare", "--methods", "bp,adl", *TINY, "-K", 9, "--epochs", 1, *engine)
    check_refused(offbeat, given, "-K 9: 9 processes on 1 core, use 8 or fewer", "--engine simulate")


def test_under_torchrun_it_is_refused(offbeat, monkeypatch):
    monkeypatch.setattr("offbeat.runs.launch.joined_group", lambda: True)
    monkeypatch.setattr("offbeat.cli.leave", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    check_refused(offbeat, ("compare", "--methods", "bp", *SMALL), "torchrun")
