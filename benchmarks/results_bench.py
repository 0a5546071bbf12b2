"""The sections of docs/results.md that show the records of `offbeat bench`, `offbeat bench --until-loss` and
`offbeat bench scaling`, if any.

docs/results/bench-*.json, until-*.json, scaling-*.json: the record of a run, renamed; a picture of the same name
beside one (bench-*.svg, scaling-*.svg) is shown, too
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from types import ModuleType

from page import RECORDS, Picture, Record, between, point, prose, records, source

from offbeat.report.formatting import markdown, markdown_rows, ranged, size


def picture(name: str, title: str) -> list[str]:
    """A line that shows the picture beside a record, where there is one."""
    drawn = RECORDS / name.replace(".json", ".svg")
    return [f"![{title}](results/{drawn.name})", ""] if drawn.exists() else []


def pictures() -> Iterator[Picture]:
    """The pictures that are beside a record."""
    from offbeat.report.draw import bench_rendered, scaling_rendered

    for kind, rendered in (("bench", bench_rendered), ("scaling", scaling_rendered)):
        for name, record in records(kind).items():
            if (path := RECORDS / name.replace(".json", ".svg")).exists():
                yield Picture(path, json.dumps(record, sort_keys=True), partial(_svg, rendered, record))


def _svg(rendered: Callable[[Record, str], bytes], record: Record) -> str:
    return rendered(record, "svg").decode()


def rows_section(name: str, record: Record, table: ModuleType, picture_title: str = "") -> list[str]:
    """The rows of a record as its table shows them; bench_table and until_table have the same functions."""
    return [
        f"### {table.heading(record)}",
        "",
        markdown(list(table.HEAD), table.cells(record)),
        "",
        *(picture(name, picture_title) if picture_title else []),
        *(point(said) for said in table.advice(record)),
        "",
        *(point(said) for said in table.notes(record)),
        *(point(f"Measured {remark}.") for remark in [record["provenance"].get("remark")] if remark),
        "",
        source(name, record),
        "",
    ]


REPLICATED = (4, 16, 64)  # stages whose replicas are shown
Speeds = dict[tuple[str, ...], dict[str, list[float]]]  # of a line of a table, by link


def _replicated(simulation: Record) -> list[str]:
    """The simulated speed-up of replicas; nothing for a record without them."""
    rows = [row for row in simulation.get("replica_rows", []) if row["K"] in REPLICATED]
    copies = sorted({row["replicas"] for row in rows})
    by_link: Speeds = {}
    for row in rows:
        by_link.setdefault((row["method"], f"K={row['K']}"), {}).setdefault(row["link"], []).append(row["speedup"])
    table = [[method, K, links, *speeds] for (method, K), links, speeds in _alike(by_link)]
    return [markdown(["method", "stages", "link", *(f"R={R}" for R in copies)], table), ""] if rows else []


def _alike(by_link: Speeds) -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    """Speed-ups as text; links with the same ones are one line."""
    for line, speeds in by_link.items():
        same: dict[tuple[str, ...], list[str]] = {}
        for link, values in speeds.items():
            same.setdefault(tuple(f"{value:.3g}" for value in values), []).append(link)
        for shown, links in same.items():
            yield line, ", ".join(links), list(shown)


def scaling_section(name: str, record: Record) -> list[str]:
    simulation = record["simulation"]
    rows = []
    for one in record["points"]:
        measured = one["staleness_measured"][0]
        rows.append(
            {
                "what grows": one["axis"],
                "network": one["model"],
                "b": str(one["batch_size"]),
                "K": str(one["K"]),
                "replicas": str(one.get("replicas", 1)),
                "ms per batch": ranged([1000 * value for value in one["seconds_per_batch"]]),
                "predicted": f"{1000 * one['predicted']:,.0f}" if "predicted" in one else "",
                "MB, largest worker": f"{max(one['memory']) / 1e6:,.0f}",
                "MB, counted": f"{max(one['memory_counted']) / 1e6:,.0f}",
                "staleness of stage 1": "" if measured is None else f"{measured:.2f}",
                "by formula": f"{one['staleness'][0]:.2f}",
            }
        )
    stages = list(dict.fromkeys(row["K"] for row in simulation["rows"]))
    by_link: Speeds = {}
    for row in simulation["rows"]:
        by_link.setdefault((row["method"],), {}).setdefault(row["link"], []).append(row["speedup"])
    clock = [[method, links, *speeds] for (method,), links, speeds in _alike(by_link)]
    told = ", ".join(
        f"{link} {1e3 * values['latency']:g} ms and {values['bandwidth'] / 1e9:g} GB/s"
        for link, values in simulation["links"].items()
        if values["bandwidth"]
    )
    return [
        f"### How it scales: {simulation['model']}, b={simulation['batch_size']}, M={simulation['M']}",
        "",
        markdown_rows(rows),
        "",
        *picture(name, "Speed-up by the clock with measured points; memory, staleness and time per batch"),
        prose(f"By the clock, speed-up over BP on one worker: {simulation['meaning']}. Links: {told}."),
        "",
        markdown(["method", "link", *(f"K={K}" for K in stages)], clock),
        "",
        *_replicated(simulation),
        *(point(f"Left out: {reason}.") for reason in record["left_out"]),
        *([""] if record["left_out"] else []),
        source(name, record),
        "",
    ]


AIMS = 1.4, 0.9  # of ADL: times the best synchronous pipeline, and of the bound
SHOWN = ("bp", "bp-cores", "torch-gpipe", "torch-1f1b", "torch-interleaved", "ddp", "adl")  # in the table of all runs


def summary() -> list[str]:
    """Samples per second of ADL and of torch's own, a line for each record, and what speaks against ADL."""
    from offbeat.report import bench_table

    found = [(record, bench_table.measured(record)) for record in records("bench").values()]
    compared = [
        (record, rows, best)
        for record, rows in found
        if (best := bench_table.best_synchronous(record)) and "adl" in rows and record["bound"]["seconds_per_batch"]
    ]
    if not compared:
        return []
    shown = (*SHOWN, *(name for name in bench_table.EQUAL if any(name in rows for _, rows in found)))
    titles = {name: row["title"] for _, rows, _ in compared for name, row in rows.items()}
    lines, missed, unsure = [], [], []
    against: dict[str, list[float]] = {"bp-cores": [], "ddp": [], "adl": [], "best": []}
    for record, rows, best in compared:
        adl, settings = rows["adl"], record["settings"]
        figures = [bench_table.by_round(adl, other) for other in (best, record["bound"])]
        name = f"{settings['model']}, b={settings['batch_size']}, K={settings['K']}"
        lines.append(
            {
                "one core per worker": name,
                "cores": str(settings["cores"]),
                "rounds": str(settings["rounds"]),
                **{titles.get(row, row): f"{bench_table.speed(rows[row]):.0f}" if row in rows else "" for row in shown},
                "ADL / best synchronous pipeline": ranged(figures[0], 2),
                "ADL / bound of its cuts": ranged(figures[1], 2),
            }
        )
        for figure, aim, what in zip(figures, AIMS, ("times", "of the bound"), strict=True):
            told = f"{name} {median(figure):.2f} of {aim} {what}"
            if round(median(figure), 2) < aim:
                missed.append(told)
            elif round(min(figure), 2) < aim:
                unsure.append(f"{told} (its rounds: {', '.join(f'{one:.2f}' for one in figure)})")
        against["bp-cores"] += [bench_table.times_faster(rows["bp-cores"], adl)] if "bp-cores" in rows else []
        against["ddp"] += [bench_table.times_faster(adl, rows["ddp"])] if "ddp" in rows else []
        against["adl"].append(adl["memory_per_worker"])
        against["best"].append(best["memory_per_worker"])

    ranges = {
        name: between(values, size if name in ("adl", "best") else "{:.2f}".format)
        for name, values in against.items()
        if values
    }
    said = []
    if against["bp-cores"]:
        said.append(f"BP on all cores of a run is {ranges['bp-cores']} times as fast as ADL on K of them, and exact.")
    if against["ddp"]:
        said.append(
            f"ADL is {ranges['ddp']} times as fast as DistributedDataParallel on as many cores, "
            "which is exact: where the network fits one worker, take that."
        )
    said += [
        f"A worker of ADL holds up to {ranges['adl']}, one of the best synchronous pipeline {ranges['best']}.",
        f"Aims are {AIMS[0]} and {AIMS[1]}. Missed: {'; '.join(missed) or 'none'}."
        + (f" Not in every round: {'; '.join(unsure)}." if unsure else ""),
    ]
    return ["Samples per second in all runs:", "", markdown_rows(lines), "", *map(point, said), ""]


def time_to_a_loss() -> list[str]:
    """Nothing where there are no records."""
    from offbeat.report import until_table

    found = records("until")
    if not found:
        return []
    intro = "`offbeat bench --until-loss`: every row is trained on data until a validation loss or error."
    lines = ["## Time to a loss", "", intro, ""]
    return lines + [line for name, record in found.items() for line in rows_section(name, record, until_table)]


def section() -> list[str]:
    """Nothing where there are no records."""
    from offbeat.report import bench_table

    benches, studies = records("bench"), records("scaling")
    if not benches and not studies:
        return time_to_a_loss()
    lines = ["## Beside what people use today", ""]
    if benches:
        lines += [
            prose(
                "`offbeat bench`: all rows in one run on one machine, in rounds that time every row once. All rows",
                "have the same cuts unless others are listed (interleaved: cuts of its own).",
            ),
            "",
            *summary(),
        ]
    for name, record in benches.items():
        lines += rows_section(name, record, bench_table, "Samples per second of every row")
    for name, record in studies.items():
        lines += scaling_section(name, record)
    return lines + time_to_a_loss()
