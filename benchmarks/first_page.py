"""What README.md shows of Offbeat: the picture of three timelines, and the table of the strongest and weakest results.

`python benchmarks/results.py` writes both, and compares them with `--check`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import results_gpu
import results_network
import results_reproduction
from page import ROOT, Picture, Record, Records, between, point, records
from staleness_aims import AIM_STAGES, AIM_TABLE, best_optimizer
from staleness_records import language_tables

from offbeat.method import Method
from offbeat.methods import ADL, BP, GPipe
from offbeat.ops import Backward, Forward, Update
from offbeat.report import bench_table, until_table
from offbeat.report.formatting import counted, duration, markdown, size
from offbeat.timeline import Span, balanced, timeline

# ---- the picture

STAGES = 3
LENGTH = 36  # of the time axis, in forwards of a stage
BATCHES = 16  # more than any of the methods finishes in that time
WIDTH = 900  # pixels of the time axis
METHODS: dict[str, Method] = {
    "Back-propagation: one stage works, the others wait": BP(),
    "GPipe, a synchronous pipeline with m=4 micro-batches: stages wait while a batch fills and drains": GPipe(m=4),
    "ADL with M=2: once the pipeline is full, no stage waits; gradients are applied late": ADL(M=2),
}
KINDS: dict[type, str] = {Forward: "forward", Backward: "backward", Update: "update"}

Operation = tuple[int, str, float, float, int | None]  # stage, kind, start, end, batch


def operations(method: Method) -> list[Operation]:
    """What the stages do within the time axis. The micro-batches of a batch have its number."""

    def batch(span: Span) -> int | None:
        t = getattr(span.operation, "t", None)
        return None if t is None else t // method.m

    spans = timeline(method, BATCHES, balanced(STAGES))
    return [
        (span.k, KINDS[type(span.operation)], span.start, span.end, batch(span))
        for span in spans
        if type(span.operation) in KINDS and span.start < LENGTH
    ]


def heading(words: str, drawn: list[Operation]) -> str:
    """The words, with how many batches stage 1 has finished and the share of time in which stages work."""
    last = {batch: end for k, kind, _, end, batch in drawn if k == 1 and kind == "backward"}
    finished = sum(end <= LENGTH for end in last.values())
    busy = sum(min(end, LENGTH) - start for _, _, start, end, _ in drawn)
    return f"{words}. {finished} batches finished, stages busy {100 * busy / LENGTH / STAGES:.0f} % of the time."


def panels() -> dict[str, list[Operation]]:
    """The operations of each method, by the heading of its panel."""
    drawn = {words: operations(method) for words, method in METHODS.items()}
    return {heading(words, those): those for words, those in drawn.items()}


def picture() -> Picture:
    return Picture(ROOT / "docs/timelines.svg", json.dumps([panels(), STAGES, LENGTH, WIDTH]), svg)


def svg() -> str:
    """The panels one above the other on one time axis."""
    from offbeat.report.draw import rendered

    title = f"{STAGES} equal stages, a backward as long as two forwards, no communication"
    return rendered(chart(), "svg", title=title, width=None).decode()


def chart() -> Any:
    import altair as alt

    from offbeat.report.charts import Box, lanes

    made, data = [], dict[str, Any]()
    drawn = panels()
    for place, (title, found) in enumerate(drawn.items(), start=1):
        boxes = [Box(k, kind, start, end, batch if end <= LENGTH else None) for k, kind, start, end, batch in found]
        one = lanes(boxes, K=STAGES, length=LENGTH, unit="F, the forward of a stage")
        if place < len(drawn):  # the axis stands below the last panel
            for layer in one.layer:
                if layer.encoding.x is not alt.Undefined:
                    layer.encoding.x = layer.encoding.x.axis(None)
        data |= one.datasets
        one.datasets = alt.Undefined
        made.append(one.properties(title=alt.TitleParams(title, fontSize=13, anchor="start"), width=WIDTH))
    with warnings.catch_warnings():  # panels share the selections, which a file does not use
        warnings.filterwarnings("ignore", "Automatically deduplicated selection")
        return alt.VConcatChart(vconcat=made, spacing=18, datasets=data).resolve_scale(x="shared", color="shared")


# ---- the table

HEAD = ("measured", "setting", "ADL", "compared with", "outcome")
GPU_NETWORK, GPU_BATCH = "resnet56", 32

Cells = list[str]


def several(values: Iterable[int], form: Callable[[int], str]) -> str:
    """Each of the values once, the smallest first.

    >>> several([8, 2, 8, 4], "K={}".format)
    'K=2, K=4 and K=8'
    """
    *others, last = (form(value) for value in sorted(set(values)))
    return f"{', '.join(others)} and {last}" if others else last


def network(model: str) -> str:
    """
    >>> network("resnet110")
    'ResNet-110'
    """
    return re.sub(r"^resnet(?=\d)", "ResNet-", model)


def gpu_rows(found: Records) -> list[Cells]:
    """ADL on one GPU against BP recorded as CUDA graphs, and against exact BP whose batches of a window run at once."""
    others = {
        "BP recorded as CUDA graphs": "BP, recorded",
        "exact BP, the batches of an update at once": results_gpu.AT_ONCE,
    }
    for case in results_gpu.cases_of(found):
        plain = not results_gpu.how(case.record) and (case.model, case.batch_size) == (GPU_NETWORK, GPU_BATCH)
        if plain and {results_gpu.AIMED_AT, *others.values()} <= case.rows.keys():
            settings, adl = case.record["settings"], case.rows[results_gpu.AIMED_AT]
            setting = f"{network(case.model)}, b={case.batch_size}, K={adl['K']}, M={settings['M']}, "
            setting += f"one {case.record['provenance']['machine']}, {settings['precision']}"
            return [
                [
                    "ms per batch",
                    setting,
                    f"{median(adl['ms']):.2f}",
                    f"{title}: {median(case.rows[row]['ms']):.2f}",
                    f"{median(case.ratios(results_gpu.AIMED_AT, row)):.2f} times as fast",
                ]
                for title, row in others.items()
            ]
    return []


def cpu_runs(found: Records) -> list[tuple[Record, dict[str, Record]]]:
    """Benchmarks with a row of ADL, each with its rows by name; the best synchronous pipeline is "best"."""
    runs = []
    for record in found.values():
        rows, best = bench_table.measured(record), bench_table.best_synchronous(record)
        if "adl" in rows and best is not None:
            runs.append((record, {**rows, "best": best}))
    return runs


COMPARED = (  # rows of benchmarks, and what the second one is
    ("adl", "best", "the best synchronous pipeline, K cores"),
    ("adl-micro", "best", "the same with as many samples per update"),
    ("adl", "bp-cores", "BP on all free cores"),
)


def machine_cores(record: Record) -> int:
    """Of the machine, of which a run may have used a part."""
    found = re.search(r"(\d+) cores", record["provenance"]["machine"])
    return int(found[1]) if found else int(record["settings"]["cores"])


def cpu_rows(found: Records) -> list[Cells]:
    """ADL on one core per stage against the best synchronous pipeline on as many, and against BP on all cores."""
    lines = []
    for own, other, title in COMPARED:
        runs = [(record, rows) for record, rows in cpu_runs(found) if {own, other} <= rows.keys()]
        if not runs:
            continue
        settings = [record["settings"] for record, _ in runs]
        stages = several((one["K"] for one in settings), "K={}".format)
        networks = ", ".join(dict.fromkeys(f"{network(one['model'])}, b={one['batch_size']}" for one in settings))
        cores = several((machine_cores(record) for record, _ in runs), "{}".format)
        speeds = [[bench_table.speed(rows[name]) for _, rows in runs] for name in (own, other)]
        ours, theirs = (between(values, "{:.0f}".format) for values in speeds)
        ratios = [bench_table.times_faster(rows[own], rows[other]) for _, rows in runs]
        lines.append(
            [
                "samples per second",
                f"{networks}, {stages}, machines of {cores} cores; {len(runs)} run{'s' * (len(runs) > 1)}",
                ours,
                f"{title}: {theirs}",
                f"{between(ratios, '{:.2f}'.format)} times as fast",
            ]
        )
    return lines


SHOWN = ("resnet56-adl-1f1b-k8-m4-sc",)  # rows of reproductions


def bp_beside(found: Records, record: Record, row: Record) -> list[float]:
    """Errors of all BP runs of the same table, settings, network, b, M and learning rate, in whichever record."""
    alike = [one for one in found.values() if all(one[key] == record[key] for key in ("table", "settings"))]
    kind = results_reproduction.kind(record, row)
    done = [(one, bp) for one in alike for bp in one["rows"] if bp["error"] is not None]
    return [
        bp["error"]
        for one, bp in done
        if results_reproduction.is_bp(one, bp) and results_reproduction.kind(one, bp) == kind
    ]


def error_rows(found: Records) -> list[Cells]:
    """Chosen rows of the reproductions, each against all BP of the same setting."""
    lines = []
    for record in found.values():
        for row in record["rows"]:
            errors = bp_beside(found, record, row) if row["name"] in SHOWN and row["error"] is not None else []
            if errors:
                images = re.search(r", on (\w+)", record["title"])
                data = images[1] if images else record["title"].split(",")[0]
                lines.append(
                    [
                        "test error, %",
                        f"{data}, {record['settings']['epochs']} epochs: {row['title']}",
                        results_reproduction.ours(row),
                        f"BP, same b and M: {between(errors, '{:.2f}'.format)}",
                        between([row["error"] - error for error in errors], "{:+.2f}".format),
                    ]
                )
    return lines


LANGUAGE_MODEL = "gpt"  # of the row of slow networks and of the note on the time to a loss


def slow_network_row(found: Records) -> list[Cells]:
    """ADL over slow lines against the best synchronous pipeline and DDP, at equal samples per update."""
    profile, K = results_network.AIMED, list[int]()
    others = {results_network.SYNCHRONOUS: "the best synchronous pipeline", results_network.DDP: "DDP"}
    speeds: dict[str, list[float]] = {kind: [] for kind in ("adl", *others)}
    for record in found.values():
        settings, rows = record["settings"], results_network.rows_of(record)
        if LANGUAGE_MODEL not in (one["name"] for one in settings["networks"]):
            continue
        K.append(settings["K"])
        line = next(one for one in results_network.profiles_of(record) if one.name == profile)
        alike = {kind: [row for row in rows if results_network.kind_of(row) == kind] for kind in others}
        best = {kind: results_network.fastest(record, LANGUAGE_MODEL, profile, alike[kind]) for kind in others}
        for kind, row in {"adl": "adl", **best}.items():
            seconds = results_network.by_round(record, LANGUAGE_MODEL, profile, row).values()
            speeds[kind].append(settings["samples_per_update"] / median(seconds))
    if not K:
        return []
    ratios = [[ours / value for ours, value in zip(speeds["adl"], speeds[kind], strict=True)] for kind in others]
    return [
        [
            "samples per second",
            f"a GPT, {' and '.join(f'K={each}' for each in sorted(K))}, lines of {line.rate / 1e6:g} Mbit/s and "
            f"{1e3 * line.delay:g} ms, same samples per update; {counted(len(K), 'run')}",
            between(speeds["adl"], "{:.1f}".format),
            ", ".join(f"{name}: {between(speeds[kind], '{:.1f}'.format)}" for kind, name in others.items()),
            f"{' and '.join(between(each, '{:.2f}'.format) for each in ratios)} times as fast",
        ]
    ]


def until_notes(found: Records) -> list[str]:
    """The time to a loss of a language model, with late gradients and with the fastest synchronous training: of the
    newest record, with the ratios of earlier ones."""
    by_target: dict[Any, list[Record]] = defaultdict(list)
    for record in sorted(found.values(), key=lambda record: record["provenance"]["started"]):
        slow, settings = "network" in record["provenance"], record["settings"]
        if settings["model"].startswith(LANGUAGE_MODEL):
            by_target[settings["K"], slow, until_table.target(record)].append(record)
    return [note for records in by_target.values() for note in _until_note(records[-1], records[:-1])]


def _until_note(record: Record, earlier: list[Record]) -> list[str]:
    """The times, how many times as fast that is, also in earlier records, and the optimizers."""
    exact, late = _fastest_rows(record)
    if exact is None or late is None:
        return []
    others = {"the fastest synchronous training": exact}
    several = until_table.fastest([row for row in until_table.synchronous(record) if row["workers"] > 1])
    if several not in (None, exact):
        others["the fastest of several workers"] = several
    same = len({row["optimizer"] for row in (late, *others.values())}) == 1
    took, *theirs = (_took(row, with_optimizer=not same) for row in (late, *others.values()))
    times = [" ".join(took), *(f"{words} ({name}) {time}" for words, (name, time) in zip(others, theirs, strict=True))]
    ratios = [f"{until_table.seconds(row) / until_table.seconds(late):.2f}" for row in others.values()]
    network = record["provenance"].get("network")
    links = f"a line of {network}" if network else "fast links"
    optimizer = f", {late['optimizer']}" if same else ""
    text = (
        f"Time until a GPT reaches {until_table.target(record)}, K={record['settings']['K']}, {links}{optimizer}, one "
        f"run each: {'; '.join(times)}. ADL is {' and '.join(ratios)} times as fast"
    )
    if before := [f"{ratio:.2f}" for one in earlier if _is_fair(one) and (ratio := _ratio(one))]:
        against = " against the first of the two" if len(others) > 1 else ""
        text += f"; in earlier records{against} {' and '.join(before)} times"
    text += "."
    alike = until_table.fastest([row for row in until_table.late(record) if row["optimizer"] == exact["optimizer"]])
    if alike not in (None, late):
        text += " With the optimizer of the fastest synchronous training: "
        text += f"{' '.join(_took(alike, with_optimizer=True))}."
    if not _is_fair(record):
        text += f" No synchronous training had {late['optimizer']}."
    return [point(text)]


def _took(row: Record, *, with_optimizer: bool) -> tuple[str, str]:
    """What trained, and how long."""
    optimizer = f" with {row['optimizer']}" if with_optimizer else ""
    return f"{row['title'].removeprefix('Offbeat ')}{optimizer}", duration(until_table.seconds(row))


def _fastest_rows(record: Record) -> tuple[Record | None, Record | None]:
    """The fastest synchronous row, and the fastest with late gradients."""
    return until_table.fastest(until_table.synchronous(record)), until_table.fastest(until_table.late(record))


def _ratio(record: Record) -> float | None:
    exact, late = _fastest_rows(record)
    return until_table.seconds(exact) / until_table.seconds(late) if exact and late else None


def _is_fair(record: Record) -> bool:
    """Whether a synchronous row was trained with the optimizer of the fastest late row."""
    late = _fastest_rows(record)[1]
    return late is not None and late["optimizer"] in {row["optimizer"] for row in until_table.synchronous(record)}


def language_rows(found: Records) -> list[Cells]:
    """Of what is recommended for the larger language model, the row with the recommended optimizer at the shortest
    delay and the one with the largest difference to BP."""
    lines = []
    for table in (one for one in language_tables(found) if one.slug == AIM_TABLE):
        differences = {row: table.to_best_bp(row) for row in table.recommended(AIM_STAGES)}
        known = {row: value for row, value in differences.items() if value is not None}
        chosen = [row for row in known if row.optimizer == best_optimizer(table)]
        shortest = sorted(chosen, key=lambda row: row.staleness)[:1]
        for row in dict.fromkeys([*shortest, *sorted(known, key=known.__getitem__)[-1:]]):
            bp = table.best_bp(row.K, row.optimizer)
            lines.append(
                [
                    "validation loss, nats",
                    f"a GPT on Python source, {row.runs[0].updates[-1]:,} updates: {row.title}",
                    row.shown(3),
                    f"BP, same optimizer and samples: {bp.shown(3) if bp else ''}",
                    f"{known[row]:+.3f}",
                ]
            )
    return lines


def short_row(compared: Records) -> list[Cells]:
    """The comparison of a short schedule at the largest K, against BP."""
    rows = [(record["asked"], row) for record in compared.values() for row in record["comparison"]["rows"]]
    bp = next((row for _, row in rows if row["label"] == "bp"), None)
    late = [(asked, row) for asked, row in rows if row["label"] == "adl"]
    if bp is None or not late:
        return []
    asked, adl = max(late, key=lambda pair: pair[1]["K"])
    setting = f"CIFAR-10, {asked['epochs']} epochs: {network(asked['model'])}, ADL, K={adl['K']}, M={adl['M']}"
    return [
        [
            "test error, %",
            setting,
            f"{adl['error']:.2f}",
            f"BP, same samples per update: {bp['error']:.2f}",
            f"{adl['error'] - bp['error']:+.2f}",
        ]
    ]


def _memory(row: Record) -> float:
    """Bytes of the worker that needs most."""
    return float(row["memory_per_worker"])


def notes(benches: Records, reproductions: Records) -> list[str]:
    """What stands against these figures."""
    runs, lines = cpu_runs(benches), []
    shown = [row for record in reproductions.values() for row in record["rows"] if row["name"] in SHOWN]
    if any(row["n"] == 1 for row in shown):
        lines.append(
            point(
                "An error of ADL is that of one seed, or with a range in parentheses the median of several. Where a "
                "range is shown for BP, it was trained more than once in that setting: a difference within the range "
                "means little."
            )
        )
    if ratios := [bench_table.times_faster(rows["adl"], rows["ddp"]) for _, rows in runs if "ddp" in rows]:
        lines.append(
            point(
                f"In these CPU runs, ADL is {between(ratios, '{:.2f}'.format)} times as fast as "
                "DistributedDataParallel, which computes exact gradients, on as many cores."
            )
        )
    if runs:
        held = [between([_memory(rows[name]) for _, rows in runs], size) for name in ("adl", "best")]
        parts = []
        for row, title in (("adl-micro", "needs"), ("adl-recompute", "and with recompute")):
            if those := [rows for _, rows in runs if row in rows]:
                memory = [_memory(rows[row]) / _memory(rows["best"]) for rows in those]
                speed = [bench_table.times_faster(rows[row], rows["best"]) for rows in those]
                shown = [between(ratios, "{:.2f}".format) for ratios in (memory, speed)]
                parts.append(f"{title} {shown[0]} times its memory at {shown[1]} times its speed")
        lines.append(
            point(
                f"In these runs, the worker that needs most memory holds {held[0]} with ADL, and {held[1]} with the "
                "best synchronous pipeline.",
                *([f"With as many samples per update as that, ADL {', '.join(parts)}."] if parts else []),
            )
        )
    return lines


def table() -> str:
    """The strongest and the weakest measured results, from the records that are there."""
    compared, benches = records("methods-cifar10"), records("bench")
    again = records("reproduction")
    rows = [
        *gpu_rows(records("gpu")),
        *cpu_rows(benches),
        *slow_network_row(records("network")),
        *error_rows(again),
        *short_row(compared),
        *language_rows(again),
    ]
    return "\n".join([markdown(HEAD, rows), "", *notes(benches, again), *until_notes(records("until"))])
