"""What is published is what was recorded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from preloaded import PYTHON
from published import script

from offbeat import models
from offbeat.methods import METHODS
from offbeat.partitioning import Profile, profile, solve

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "docs/results").glob("*.json"))
COMPARED = [path for path in RECORDS if path.name.startswith("methods-cifar10")]
COUNTED = json.loads((ROOT / "docs/results/balance.json").read_text())["rows"]


@pytest.fixture
def copied(tmp_path):
    """Pages, records and the script that makes the ones of the others."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def checked(root: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, root / "benchmarks/results.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def made(root: Path) -> str:
    """The page of results, made of the records that are there."""
    subprocess.run([PYTHON, root / "benchmarks/results.py"], check=True, timeout=60)
    return (root / "docs/results.md").read_text()


def row(root: Path, torture: str) -> str:
    """The line of a record in the table of what was wanted and seen."""
    return next(line for line in made(root).splitlines() if line.startswith(f"| torture-{torture}.json |"))


def changed(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_pages_of_other_records_are_not_current(copied):
    assert checked(copied).returncode == 0

    def faster(record):
        next(row for row in record["found"][0]["rows"] if row["name"] == "ADL, K=8")["ms"] = [0.5, 0.5, 0.5]

    changed(copied / "docs/results/gpu-h200-b32.json", faster)
    reported = checked(copied)
    assert reported.returncode == 1
    assert "results.md, README.md" in reported.stderr
    assert "svg" not in reported.stderr


def test_a_picture_of_other_curves_is_not_current(copied):
    def better(record):
        record["comparison"]["rows"][0]["curves"][0][2] -= 1

    changed(copied / "docs/results/methods-cifar10-k8.json", better)
    assert "methods-cifar10.svg" in checked(copied).stderr


def test_a_picture_of_another_benchmark_is_not_current(copied):
    def faster(record):
        record["rows"][0]["samples_per_second"] = [1.0, 1.0]

    changed(copied / "docs/results/bench-16cores-resnet110-k4.json", faster)
    assert "bench-16cores-resnet110-k4.svg" in checked(copied).stderr


def test_the_readme_has_the_memory_of_adl_at_equal_samples_per_update():
    text = " ".join((ROOT / "README.md").read_text().split())
    shown = re.search(r"ADL needs ([\d.]+) to ([\d.]+) times its memory at ([\d.]+) to ([\d.]+) times its speed", text)
    memory, speed = [], []
    for path in (ROOT / "docs/results").glob("bench-*-micro*.json"):
        rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
        speeds = {name: median(row["samples_per_second"]) for name, row in rows.items() if row["samples_per_second"]}
        best = max((name for name in speeds if name.startswith("torch-")), key=speeds.__getitem__)
        memory.append(rows["adl-micro"]["memory_per_worker"] / rows[best]["memory_per_worker"])
        speed.append(speeds["adl-micro"] / speeds[best])
    assert [float(one) for one in shown.groups()] == pytest.approx(
        [min(memory), max(memory), min(speed), max(speed)], abs=0.02
    )


def test_a_table_typed_by_hand_is_not_current(copied):
    readme = copied / "README.md"
    table = readme.read_text().split("<!-- results: ")[1]
    figure = re.search(r"\d\.\d\d times as fast", table)[0]
    readme.write_text(readme.read_text().replace(figure, "9.99 times as fast"))
    assert "README.md" in checked(copied).stderr


def test_a_picture_of_other_timelines_is_not_current(copied):
    script = copied / "benchmarks/first_page.py"
    script.write_text(script.read_text().replace("ADL(M=2)", "ADL(M=3)"))
    assert checked(copied).stderr.startswith("not current: timelines.svg;")


def test_the_readmes_table_has_at_most_ten_rows_and_the_losses():
    table = (ROOT / "README.md").read_text().split("<!-- results: ")[1].split("<!-- end")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert 0 < len(rows) <= 10
    outcomes = [row.split("|")[-2].strip() for row in rows]
    assert any(outcome.startswith("0.") for outcome in outcomes)  # slower than what it is compared with
    assert any(float(outcome) > 1 for outcome in outcomes if re.fullmatch(r"\+[\d.]+", outcome))  # points of error


def test_the_ratios_of_the_readmes_times_are_how_many_times_as_fast_adl_is():
    """They said how many times as long "the first" takes as "the last", of rows in one list."""
    notes = " ".join((ROOT / "README.md").read_text().split()).split("- Time until ")[1:]
    assert len(notes) >= 3
    for note in notes:
        took, *others = (float(time) for time in re.findall(r" ([\d.]+) s[;.]", note))
        ratios = re.search(r"ADL is ([\d.]+)(?: and ([\d.]+))? times as fast", note).groups()
        assert [other / took for other in others] == pytest.approx(
            [float(ratio) for ratio in ratios if ratio], abs=0.01
        )


def test_the_first_page_has_the_largest_difference_of_the_recommended_rows(copied):
    """It had chosen rows, of which none was the largest any more."""
    record = copied / "docs/results/reproduction-gpt-starts.json"
    name = "nadam-adl-1f1b-k12-m16-corrected-warmup-double-rate"

    def worse(content: dict) -> None:
        for row in content["rows"]:
            for run in row["runs"] if row["name"] == name else ():
                run |= {"loss": 5.0, "losses": [5.0] * 5}

    changed(record, worse)
    made(copied)
    lines = [line for line in (copied / "README.md").read_text().splitlines() if "| a GPT on Python source" in line]
    differences = [float(line.rsplit("|", 2)[1]) for line in lines]
    assert differences == sorted(differences)
    assert re.search(r": (\w+), .* M=(\d+),", lines[0]).groups() == ("Muon", "16")
    assert "NAdam, ADL on the 1F1B lag, K=12, M=16" in lines[-1]
    assert differences[-1] > 3


def test_the_first_pages_count_the_methods_that_there_are():
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        assert f"one of {len(METHODS) - 1}\nother methods" in page.read_text()
    assert f": {len(METHODS)} methods, " in (ROOT / "README.md").read_text()


def test_an_aim_that_was_missed_is_shown_as_missed(copied):
    def failed(record):
        record["good"] = False

    changed(copied / "docs/results/torture-latency.json", failed)
    assert row(copied, "latency").endswith("| **missed** |")


def test_kills_that_were_not_done_or_not_as_wanted_are_missed(copied):
    kills = copied / "docs/results/torture-kills.json"

    def done(record, trials, good):
        record["summary"] |= {"trials": trials, "good": good}
        record["provenance"]["command"] = ["python", "benchmarks/torture.py", "kills", "--count", "100"]

    for trials, good, verdict in ((100, 100, "yes"), (99, 99, "**missed**"), (100, 99, "**missed**")):
        changed(kills, lambda record, trials=trials, good=good: done(record, trials, good))
        assert row(copied, "kills").endswith(f"| {verdict} |")


def test_the_page_is_made_of_the_torture_records_that_are_there(copied):
    for path in (copied / "docs/results").glob("torture-*.json"):
        if path.stem != "torture-soak":
            path.unlink()
    page = made(copied)
    assert "results/torture-soak.json" in page
    assert "torture-kills" not in page


def test_the_page_on_reliability_contains_no_figures_of_its_own():
    tried = (ROOT / "docs/reliability.md").read_text().split("## How it is tried")[1]
    reported = [line for line in tried.splitlines() if not line.startswith("    ")]
    assert not re.search(r"\d", " ".join(reported))
    anchor = re.search(r"results\.md#([\w-]+)", tried)[1]
    titles = re.findall(r"^## (.*)$", (ROOT / "docs/results.md").read_text(), re.MULTILINE)
    assert anchor in [title.lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_the_errors_of_a_comparison_are_those_of_its_epochs(path):
    record = json.loads(path.read_text())
    rows = {row["label"]: row for row in record["comparison"]["rows"]}
    assert len(record["runs"]) == len(rows) * record["asked"]["seeds"]
    for label, row in rows.items():
        runs = [run for run in record["runs"].values() if run["label"] == label]
        curves = [[epoch["test_error"] for epoch in run["epochs"]] for run in sorted(runs, key=lambda run: run["seed"])]
        assert curves == row["curves"]
        assert all(len(curve) == record["asked"]["epochs"] for curve in curves)
        assert row["error"] == pytest.approx(median(curve[-1] for curve in curves))
        assert row["error_range"] == [min(curve[-1] for curve in curves), max(curve[-1] for curve in curves)]
        assert {run["recipe"]["K"] for run in runs} == {record["asked"]["K"]}
        assert not row["failed"]


@cache
def costs(model: str, pixels: int, batch_size: int) -> Profile:
    """The deterministic ones, which are the same for every K."""
    with torch.device("meta"):
        network = models.build(model, shape=(3, pixels, pixels))
        return profile(network, torch.empty(batch_size, 3, pixels, pixels), timed=False)


@pytest.mark.parametrize(
    "row", [row for row in COUNTED if row["model"] != "resnet1202"], ids=lambda row: f"{row['model']}-{row['K']}"
)
def test_the_balance_by_the_deterministic_cost_is_what_it_was(row):
    found = costs(row["model"], row["pixels"], row["batch_size"])
    solution = solve(found.costs(), row["K"], legal=found.legal_cuts)
    assert (solution.balance, list(solution.cuts)) == (pytest.approx(row["balance"]), row["cuts"])


def test_pages_are_written_or_compared_after_the_balance_is_computed(copied):
    code = f"import sys; sys.path.insert(0, {str(copied / 'benchmarks')!r}); import results; "
    code += "results.deterministic = lambda: results.json.loads((results.RECORDS / 'balance.json').read_text()); "
    command = [PYTHON, "-c", code + "results.main()", "--balance", "--check"]
    assert subprocess.run(command, timeout=60).returncode == 0


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_provenance_and_no_folder_names(path):
    record = json.loads(path.read_text())
    source = (record.get("comparison") or record)["provenance"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", source["commit"])
    assert source["machine"]
    assert source["versions"]["torch"]
    assert "command" in source or source["set"]  # where it was not recorded, that is said
    assert not re.search(r'"/(tmp|home|root|data|work)\b', path.read_text())


def test_a_single_round_is_shown_without_a_spread():
    page = script("page")
    assert page.shown([1.5, 1.5, 1.5], 1) == "1.50"
    assert page.shown([1.5, 1.25, 2.0], 3) == "1.50 (1.25-2.00)"
