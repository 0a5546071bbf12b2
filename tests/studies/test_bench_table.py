"""What a record of `offbeat bench` says: its table, advice and picture, and the page of results."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest
from bench_cases import texts_in

from offbeat.report import bench_table
from offbeat.report.draw import draw_bench
from offbeat.studies.bench.rows import (
    ROWS,
)

pytestmark = pytest.mark.usefixtures("pictures")


def row(name: str, seconds: list[float], *, staleness: tuple[float, ...] = (), m: int | None = None) -> dict:
    listed = ROWS[name]
    return {
        "name": name,
        "title": listed.title,
        "family": listed.family,
        "exact": not any(staleness),
        "workers": 2,
        "staleness": list(staleness),
        "micro_batches": m,
        "sweep": {str(m): seconds[0]} if m else {},
        "seconds_per_batch": seconds,
        "samples_per_second": [8 / value for value in seconds],
        "memory_per_worker": 20_000_000,
        "bytes_moved": 1_000_000,
        "note": "",
    }


def made(*rows: dict, bound: tuple[float, ...] = (0.9, 1.1)) -> dict:
    settings = {
        "model": "mlp",
        "batch_size": 8,
        "K": 2,
        "M": 4,
        "device": "cpu",
        "cores_shared": False,
        "rounds": 2,
        "batches": 2,
        "cores": 2,
        "load": 0.1,
        "cuts": [3],
        "memory": "counted",
    }
    provenance = {"command": ["offbeat", "bench"], "commit": "0" * 40, "versions": {"torch": "2"}, "machine": "m"}
    return {
        "settings": settings,
        "rows": list(rows),
        "left_out": {"ddg": "no reason"},
        "provenance": provenance,
        "bound": {
            "seconds_per_batch": list(bound),
            "samples_per_second": [8 / value for value in bound],
            "stages": [[value, value / 2] for value in bound],
            "meaning": "slowest",
        },
    }


def test_windows_at_once_are_a_synchronous_pipeline_to_be_compared_with():
    record = made(
        row("bp", [2.0, 2.0]),
        row("bp-windows", [1.5, 1.5], staleness=(0.0, 0.0)),
        row("adl", [1.0, 1.0], staleness=(0.5, 0.0)),
    )
    assert bench_table.best_synchronous(record)["name"] == "bp-windows"
    assert ROWS["bp-windows"].title_on("cuda") == "BP, windows at once"


def test_ratios_are_taken_within_a_round():
    record = made(
        row("bp", [2.0, 4.0]),
        row("torch-gpipe", [1.0, 1.6], m=4),
        row("torch-1f1b", [1.25, 2.5], m=4),
        row("adl", [1.0, 1.25], staleness=(0.5, 0.0)),
    )
    rows = bench_table.measured(record)
    assert bench_table.times_faster(rows["adl"], rows["bp"]) == median([2.0, 3.2])
    assert bench_table.best_synchronous(record)["name"] == "torch-gpipe"
    assert bench_table.share_of_bound(rows["adl"], record) == pytest.approx(median([0.9 / 1.0, 1.1 / 1.25]))
    assert bench_table.share_of_bound(rows["bp"], record) is None  # the cuts bound no loop
    line = bench_table.cells(record)[3]
    assert line[2:6] == ["2.60", f"{median([1.0, 1.6 / 1.25]):.2f}", "0.89", "late by 0.5"]
    assert bench_table.cells(record)[-1][0] == "no-communication bound of the cuts"


def test_a_row_is_compared_with_the_bound_of_its_own_cuts():
    record = made(
        row("bp", [2.0, 4.0]),
        row("torch-gpipe", [1.0, 1.0], m=4) | {"cuts": [2]},
        row("torch-1f1b", [1.0, 1.0], m=8) | {"cuts": [1]},
        row("adl", [1.0, 1.0], staleness=(0.5, 0.0)) | {"cuts": [3]},
        row("adl-micro", [1.0, 1.0], staleness=(0.5, 0.0), m=4) | {"cuts": [2], "bound": {"seconds_per_batch": [0.8]}},
        row("ddg", [1.25, 1.25], staleness=(1.0, 0.0)) | {"cuts": [3]},
    )
    shares = {name: bench_table.share_of_bound(row, record) for name, row in bench_table.measured(record).items()}
    assert shares == {"bp": None, "torch-gpipe": 0.8, "torch-1f1b": None, "adl": 1.0, "adl-micro": 0.8, "ddg": 0.8}
    told = "Cuts, for the samples on which stages compute: [3]; torch-gpipe, adl-micro: [2]; torch-1f1b: [1]."
    assert told in bench_table.notes(record)
    assert bench_table.other_cuts(made(row("adl", [1.0], staleness=(0.5, 0.0)))) == []


def test_the_advice_follows_the_figures_in_both_directions():
    late = (0.5, 0.0)
    slower = made(row("bp", [3.0]), row("ddp", [1.0]), row("adl", [1.2], staleness=late), bound=(1.0,))
    assert bench_table.advice(slower)[0].startswith(
        "torch DistributedDataParallel is 1.20 times as fast as Offbeat ADL here: the network fits one worker"
    )
    faster = made(row("bp", [3.0]), row("ddp", [1.5]), row("adl", [1.0], staleness=late), bound=(1.0,))
    said = bench_table.advice(faster)[0]
    assert said.startswith("Offbeat ADL is 1.50 times as fast as torch DistributedDataParallel here")
    assert "exact" in said
    alike = made(
        row("bp", [3.0]), row("torch-gpipe", [1.0], m=2), row("gpipe", [1.01], m=2), row("adl", [1.0], staleness=late)
    )
    said = " ".join(bench_table.advice(alike))
    assert "Offbeat GPipe is as fast as torch pipelining, GPipe here (0.99)" in said
    assert "m=2: 0.99" in said


def test_rows_of_a_round_that_was_not_finished_are_compared_as_far_as_it_went():
    record = made(row("bp", [2.0, 4.0]), row("adl", [1.0], staleness=(0.5, 0.0)))
    assert bench_table.times_faster(*(bench_table.measured(record)[name] for name in ("adl", "bp"))) == 2.0
    assert "ddg is left out: no reason." in bench_table.page(record)


def test_a_record_without_rounds_has_a_page_and_no_empty_table(capsys):
    record = made(row("bp", []), bound=())
    record["settings"]["rounds"] = 0
    bench_table.show(record, "runs/found")
    shown = capsys.readouterr().out
    assert "mlp, b=8, K=2, M=4, one core per worker; no row was timed" in shown
    assert "ddg is left out: no reason." in shown
    assert "samples/s" not in shown
    assert "Bound" not in shown
    assert bench_table.page(record).startswith("# mlp, b=8, K=2, M=4, one core per worker; no row was timed\n")
    record["provenance"]["network"] = "a slow line"
    assert "one core per worker, a slow line between workers; no row was timed" in bench_table.page(record)


def test_a_round_that_was_not_finished_is_one():
    record = made(row("bp", [1.0]), bound=())
    record["settings"]["rounds"] = 0
    assert bench_table.heading(record).endswith("median (least-most) of 1 round")


def test_a_busy_machine_is_reported():
    record = made(row("bp", [2.0]), row("adl", [1.0], staleness=(0.5, 0.0)))
    assert "busy" not in bench_table.page(record)
    record["settings"]["load"] = 3.5
    assert "busy with something else when this began (load 3.5 on 2 cores)" in bench_table.page(record)


def test_a_bar_for_every_row_that_was_timed_and_a_line_for_the_bound(tmp_path):
    record = made(row("bp", [2.0]), row("ddg", []), row("adl", [1.0], staleness=(0.5, 0.0)))
    draw_bench(record, tmp_path / "bars.svg")
    texts = texts_in(tmp_path / "bars.svg")
    bars = {row["title"]: f"{median(row['samples_per_second']):,.0f}" for row in bench_table.measured(record).values()}
    assert len(bars) == 2
    for title, speed in bars.items():
        assert any(text.startswith(title) for text in texts)
        assert speed in texts
    assert "slowest stage alone" in texts
    assert not any("DDG" in text or "ddg" in text for text in texts)


def test_records_make_sections_of_the_page_and_none_makes_none(tmp_path, bench_page):
    assert bench_page.section() == []
    record = made(row("bp", [2.0, 2.0]), row("adl", [1.0, 1.0], staleness=(0.5, 0.0)))
    (tmp_path / "bench-2cores-mlp-k2.json").write_text(json.dumps(record))
    said = "\n".join(bench_page.section())
    assert re.search(r"^\| Offbeat ADL \|.*\| late by 0.5 \|", said, re.MULTILINE)
    assert "bench-2cores-mlp-k2.svg" not in said
    draw_bench(record, tmp_path / "bench-2cores-mlp-k2.svg")
    assert "(results/bench-2cores-mlp-k2.svg)" in "\n".join(bench_page.section())
    assert bench_page.summary() == []  # no synchronous pipeline to compare with
    others = [
        row("bp", [2.0, 2.0]),
        row("bp-cores", [0.5, 0.5]),
        row("torch-1f1b", [1.3, 1.5], m=4),
        row("ddp", [0.8, 0.8]),
    ]
    record = made(*others, row("adl", [1.0, 1.0], staleness=(0.5, 0.0)), bound=(0.7, 0.7))
    (tmp_path / "bench-2cores-mlp-k2.json").write_text(json.dumps(record))
    said = " ".join(" ".join(bench_page.summary()).split())
    assert "| mlp, b=8, K=2 | 2 | 2 | 4 | 16 | | 6 | | 10 | 8 | 1.40 (1.30-1.50) | 0.70 (0.70-0.70) |" in said
    assert "BP on all cores of a run is 2.00 times as fast as ADL on K of them" in said
    assert "ADL is 0.80 times as fast as DistributedDataParallel" in said
    assert "Missed: mlp, b=8, K=2 0.70 of 0.9 of the bound." in said
    assert "Not in every round: mlp, b=8, K=2 1.40 of 1.4 times (its rounds: 1.30, 1.50)." in said
