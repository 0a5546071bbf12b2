"""`offbeat bench`: the command, what it writes, its time limit, misuse."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bench_cases import SETTING
from command import check_refused
from preloaded import PYTHON
from processes import ENVIRONMENT, START, STOP, wait_for

from offbeat.studies.bench import request as request_module
from offbeat.studies.bench import rounds
from offbeat.studies.bench.cuts import placed
from offbeat.studies.bench.request import BenchRequest
from offbeat.studies.bench.rows import (
    ROWS,
)

pytestmark = pytest.mark.usefixtures("forked_children", "pictures")


CONTRACT = {
    "name": str,
    "family": str,
    "exact": bool,
    "workers": int,
    "samples_per_second": list,
    "seconds_per_batch": list,
    "memory_per_worker": int,
    "bytes_moved": int,
    "note": str,
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_the_command_writes_all_results_and_continues_after_a_row_fails(offbeat, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds.WorkerGroup, "seconds", failing(rounds.WorkerGroup.seconds))
    monkeypatch.setattr(rounds, "StudyRunner", partial(speaking, rounds.StudyRunner))
    done = offbeat(
        "bench",
        "-K",
        2,
        "--model",
        "resnet8",
        "--batch-size",
        32,
        "--shape",
        "3,16,16",
        "--partition",
        "flops",
        "--against",
        "torch-1f1b,gpipe",
        "--micro-batches",
        4,
        "--repetitions",
        2,
        "--batches",
        2,
        "--out",
        "found",
        "--json",
    )
    assert done.code == 0, done.err
    cuts, shared, *_ = done.err.splitlines()
    assert cuts.endswith("resnet8, 8 of 32 samples, cuts [11]")
    assert shared.startswith("offbeat: 2 workers on 1 core: cores are shared")
    assert "gpipe is left out: worker 0 has ended" in done.err
    out = tmp_path / "found"
    record = json.loads((out / "bench.json").read_text())
    assert json.loads(done.out)["rows"] == record["rows"]
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.svg", "bench.png", "table.md"}
    assert record["left_out"] == {"gpipe": "worker 0 has ended: exit code -9"}
    timed = [row for row in record["rows"] if row["seconds_per_batch"]]
    assert [row["name"] for row in timed] == ["bp", "torch-1f1b", "adl"]
    for row in timed:
        assert all(isinstance(row[key], kind) for key, kind in CONTRACT.items()), row
        assert len(row["seconds_per_batch"]) == len(row["samples_per_second"]) == 2
        assert all(value > 0 for value in row["seconds_per_batch"])
        assert row["samples_per_second"] == pytest.approx([32 / value for value in row["seconds_per_batch"]])
        assert row["memory_per_worker"] > 0
        assert (row["bytes_moved"] > 0) == (row["workers"] > 1)
    adl = timed[2]
    assert (adl["exact"], adl["staleness"], adl["staleness_measured"]) == (False, [0.5, 0.0], [0.5, 0.0])
    assert [len(stages) for stages in record["bound"]["stages"]] == [2, 2]
    assert record["bound"]["seconds_per_batch"] == [max(stages) for stages in record["bound"]["stages"]]
    assert record["settings"]["rounds"] == 2
    assert record["settings"]["cores_shared"] is True
    assert "--out" not in record["provenance"]["command"]
    page = (out / "table.md").read_text()
    assert re.search(r"^\| Offbeat ADL, 128 samples per update \|.*\| late by 0.5 \|", page, re.MULTILINE)
    assert "m=4" in page
    assert "gpipe is left out: worker 0 has ended" in page


@pytest.mark.usefixtures("one_core")
def test_a_benchmark_with_the_same_folder_adds_the_rounds_it_does_not_have(offbeat, tmp_path):
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 8, "--partition", "flops", "--against", "adl")
    command = (*command, "--batches", 2, "--json", "--out", "found")
    first = json.loads(offbeat(*command, "--repetitions", 1).out)
    both = json.loads(offbeat(*command, "--repetitions", 2).out)
    assert both["settings"]["rounds"] == 2
    for before, after in zip(first["rows"], both["rows"], strict=True):
        assert (len(before["seconds_per_batch"]), len(after["seconds_per_batch"])) == (1, 2)
        assert after["seconds_per_batch"][0] == before["seconds_per_batch"][0]
    assert both["bound"]["seconds_per_batch"][0] == first["bound"]["seconds_per_batch"][0]
    assert both["settings"]["cuts"] == first["settings"]["cuts"]
    check_refused(
        offbeat, (*command, "-M", 2), "already holds bench.json with M = 4, not 2", "give another folder as --out"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_rows_with_the_same_samples_per_update_split_them_into_m_batches(offbeat):
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-per-update", 16, "-M", 4, "--partition", "flops")
    done = offbeat(*command, "--against", "ddg", "--batches", 2, "--repetitions", 1, "--json", "--out", "found")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    rows = {row["name"]: row for row in record["rows"]}
    for row in rows.values():
        assert row["samples_per_second"] == pytest.approx([16 / value for value in row["seconds_per_batch"]])
    headers = rows["adl"]["bytes_moved"] / rows["ddg"]["bytes_moved"]  # of four messages per update instead of one
    assert 1 <= headers < 1.1
    assert rows["adl"]["note"] == "an update is split into 4 batches of 4"
    assert rows["adl"]["staleness_measured"] == rows["adl"]["staleness"]
    assert record["bound"]["seconds_per_batch"] == [max(stages) for stages in record["bound"]["stages"]]
    assert (record["settings"]["batch_per_update"], record["settings"]["batch_size"]) == (16, 16)
    page = Path("found/table.md").read_text()
    assert page.startswith("# mlp, 16 samples per update, K=2, M=4")
    assert "by all workers together in one update" in page


@pytest.mark.usefixtures("one_core")
def test_every_row_has_the_number_of_micro_batches_with_which_it_is_the_fastest(offbeat):
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 16, "-M", 3, "--partition", "flops")
    against = ("--against", "gpipe,adl-micro,adl-recompute,adl-1f1b-micro", "--batches", 2, "--repetitions", 1)
    done = offbeat(*command, *against, "--json", "--out", "found")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    rows = {row["name"]: row for row in record["rows"]}
    micro = {"adl-micro": 2, "adl-recompute": 2, "adl-1f1b-micro": 1}  # with their lags in stage 1
    assert list(rows) == ["bp", "adl", *micro, "gpipe"]
    for name in ("gpipe", *micro):
        sweep = rows[name]["sweep"]
        assert {"2", "4"} <= {*sweep}
        assert str(rows[name]["micro_batches"]) == min(sweep, key=sweep.get)
    assert {name: row["samples_per_update"] for name, row in rows.items()} == dict.fromkeys(rows, 16) | {"adl": 48}
    for name, lag in micro.items():
        row, m = rows[name], rows[name]["micro_batches"]
        assert row["staleness"] == row["staleness_measured"] == [lag / m, 0]
        assert row["samples_per_second"] == pytest.approx([16 / value for value in row["seconds_per_batch"]])
        assert row["bytes_moved"] >= rows["adl"]["bytes_moved"], "of as many samples, with a header per micro-batch"
    page = Path("found/table.md").read_text()
    assert "Offbeat ADL, 48 samples per update" in page
    assert f"Offbeat ADL, micro-batches, recompute, m={rows['adl-recompute']['micro_batches']}" in page
    assert "At 16 samples per update, " in page


@pytest.mark.usefixtures("one_core")
def test_cuts_are_planned_for_every_number_of_samples_that_rows_compute_on(offbeat):
    command = ("bench", "-K", 2, "--model", "resnet8", "--shape", "3,8,8", "--batch-size", 16, "--micro-batches", 4)
    command = (*command, "--partition", "flops", "--against", "torch-gpipe,adl-micro,gpipe", "--batches", 2, "--json")
    first = json.loads(offbeat(*command, "--repetitions", 1, "--out", "found").out)
    whole, part = (
        list(placed(replace(SETTING, model="resnet8", shape=(3, 8, 8), batch_size=b), by="flops").cuts) for b in (16, 4)
    )
    assert whole != part
    assert first["settings"]["cuts"] == whole
    assert first["settings"]["cuts_by_samples"]["4"]["cuts"] == part
    wanted = {"bp": None, "torch-gpipe": part, "adl": whole, "adl-micro": part, "gpipe": part}
    rows = {row["name"]: row for row in first["rows"]}
    assert {name: row["cuts"] for name, row in rows.items()} == wanted
    assert len(rows["adl-micro"]["bound"]["seconds_per_batch"]) == 1
    assert f"stages compute: {whole}; torch-gpipe, adl-micro, gpipe: {part}." in Path("found/table.md").read_text()
    both = json.loads(offbeat(*command, "--repetitions", 2, "--out", "found").out)
    assert both["settings"]["cuts_by_samples"] == first["settings"]["cuts_by_samples"]
    rows = {row["name"]: row for row in both["rows"]}
    assert {name: row["cuts"] for name, row in rows.items()} == wanted
    assert len(rows["adl-micro"]["bound"]["seconds_per_batch"]) == 2
    given = json.loads(offbeat(*command, "--repetitions", 1, "--cuts", whole[0], "--out", "given").out)
    assert [row["cuts"] for row in given["rows"]] == [None, *[whole] * 4]
    assert not [row for row in given["rows"] if "bound" in row]
    moved = {row["name"]: row["bytes_moved"] for row in given["rows"]}
    assert moved["adl"] == rows["adl"]["bytes_moved"]
    assert moved["torch-gpipe"] != rows["torch-gpipe"]["bytes_moved"]
    assert moved["adl-micro"] != rows["adl-micro"]["bytes_moved"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="cuts are measured with a core per stage")
def test_planning_leaves_time_to_time_the_rows(offbeat):
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 16, "--micro-batches", 4, "--against", "torch-gpipe")
    done = offbeat(*command, "--budget-minutes", 0.001, "--out", "found")
    assert done.code == 0, done.err
    assert "units into 2 stages by the times of the units: no time to time stages" in done.err
    assert "no time to plan cuts for 4 of 16 samples: those for 16 are used" in done.err
    assert "no time for 2 more rounds in 0.001 minutes" in done.err
    record = json.loads(Path("found/bench.json").read_text())
    assert record["settings"]["rounds"] == 1
    assert "cuts_by_samples" not in record["settings"]
    assert [len(row["seconds_per_batch"]) for row in record["rows"]] == [1, 1, 1]
    assert {tuple(row["cuts"]) for row in record["rows"] if row["cuts"]} == {tuple(record["settings"]["cuts"])}


class Ticking:
    """A clock of a study that a test moves."""

    def __init__(self) -> None:
        self.seconds, self.lines = 0.0, []

    def report(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(("minutes", "limits"), [(None, [math.inf] * 3), (5, [100 / 3, 35.0, 40.0]), (1, [20 / 3])])
def test_planning_takes_a_third_of_the_time_limit(monkeypatch, minutes, limits):
    """Each size takes 30 s here."""
    runner, given = Ticking(), []

    def timed(setting, *, seconds=math.inf, **options):
        given.append(seconds)
        runner.seconds += 30.0
        return placed(setting, **{**options, "by": "flops"})

    monkeypatch.setattr(request_module, "placed", timed)
    request = BenchRequest("mlp", batch_size=16, K=2, micro_batches=(2, 4), minutes=minutes)
    made = request.placed(request.setting(), [ROWS["adl"], ROWS["torch-gpipe"]], None, runner)
    assert given == pytest.approx(limits)
    assert list(made.cuts_by_samples) == ["8", "4"][: len(limits) - 1]
    left = [line for line in runner.lines if line.startswith("no time")]
    assert len(left) == 3 - len(limits)


def below(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(tmp_path):
    out = tmp_path / "found"
    command = [
        PYTHON,
        "-m",
        "offbeat",
        "bench",
        "-K",
        "2",
        "--model",
        "mlp",
        "--batch-size",
        "8",
        "--against",
        "adl",
        "--repetitions",
        "100000",
        "--partition",
        "flops",
        "--out",
        str(out),
    ]
    run = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def rounds_done() -> bool:
        return run.poll() is not None or (
            (out / "bench.json").exists()
            and len(json.loads((out / "bench.json").read_text())["bound"]["seconds_per_batch"]) > 2
        )

    try:
        assert wait_for(rounds_done, START)
        (fork_server,) = children = below(run.pid)
        children += below(fork_server)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=STOP)
    finally:
        run.kill()
    assert run.returncode == 130, errors
    assert errors.splitlines()[-1].startswith(f"offbeat: stopped by Ctrl-C; repeat the command with --out {out}")
    assert len(json.loads((out / "bench.json").read_text())["rows"]) == 2
    assert (out / "table.md").exists()
    assert len(children) == 1 + 3
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), STOP)


def speaking(runner, out, minutes, show):
    assert not show  # --json prints the record alone
    return runner(out, minutes, show=True)


def failing(seconds):
    def killed_first(workers, *given, **more):
        if workers.row.name == "gpipe":
            workers.processes[0].kill()
            workers.processes[0].wait()
        return seconds(workers, *given, **more)

    return killed_first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "torch-gpip"), ("unknown row 'torch-gpip'", "torch-gpipe")),
        (("--against", ","), ("names no row",)),
        (("--model", "resnet2"), ("unknown model 'resnet2'",)),
        (("--model", "resnet8", "-K", "500"), ("500 stages", "only", "a deeper model than resnet8")),
        (("-K", "1"), ("-K 1", "use 2 or more")),
        (("-K", "0"), ("-K 0", "from 1 up")),
        (("--batches", "0"), ("--batches 0",)),
        (("--budget-minutes", "0"), ("--budget-minutes 0",)),
        (("--partition", "mesured"), ("unknown partition", "measured")),
        (("--device", "gpu"), ("unknown device",)),
        (("--micro-batches", "4,x"), ("--micro-batches", "use numbers")),
        (("--precision", "bf16"), ("--precision bf16 on the cpu",)),
        (("-M", 0), ("-M 0",)),
        (("--batch-per-update", 0), ("--batch-per-update 0",)),
        (("--batch-per-update", 16, "-M", 3), ("--batch-per-update 16 with M = 3", "use a multiple of 3")),
        (("--batch-per-update", 16, "--batch-size", 16), ("--batch-size 16 with --batch-per-update 16",)),
        (("-M", 2, "--method", "adl:M=3"), ("M is 3 in 'adl:M=3' and 2", "give it once")),
        (("--method", "adl:beta=3"), ("adl takes no beta",)),
        (("--method", "adl:M=3", "--method", "adl:M=2"), ("'adl' is given twice in --method",)),
        (("--model", "resnet20", "-K", "3", "--cuts", "5"), ("--cuts 5 gives 2 stages, not -K 3: give 2 cuts",)),
        (("scaling", "--depths", "resnet21"), ("unknown model 'resnet21'",)),
        (("scaling", "--stages", "2,0"), ("--stages 0",)),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat, arguments, words):
    check_refused(offbeat, ("bench", *arguments), *words)


def test_a_folder_that_holds_a_record_is_refused(offbeat, tmp_path):
    (tmp_path / "found").mkdir()
    (tmp_path / "found/bench.json").write_text("{}")
    check_refused(offbeat, ("bench", "--model", "mlp", "-K", "2", "--out", "found"), "already holds bench.json")
