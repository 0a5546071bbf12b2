"""The table of a record of `offbeat bench --until-loss`, and what follows from it; from the record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offbeat.report.bench_table import gradient, noted, other_cuts, rows_left_out, source, title, where
from offbeat.report.formatting import counted, duration, markdown

Record = dict[str, Any]
TrainedRecord = dict[str, Any]
LearningRun = dict[str, Any]
HEAD = ("row", "optimizer", "lr", "time", "samples", "x fastest sync.", "samples/s", "gradient", "other lr")


def best_run(runs: Sequence[LearningRun]) -> LearningRun | None:
    """The run that reached the target in the shortest time; where none did, the one with the lowest loss or error.

    >>> best_run([{"seconds": None, "best": 1.0}, {"seconds": 9.0, "best": 2.0}, {"seconds": 8.0, "best": 2.0}])
    {'seconds': 8.0, 'best': 2.0}
    """
    known = [run for run in runs if run["best"] is not None]
    return min(
        known, key=lambda run: (math.inf if run["seconds"] is None else run["seconds"], run["best"]), default=None
    )


def seconds(row: TrainedRecord) -> float | None:
    """The time to the target with the best learning rate; None where it was not reached."""
    best = best_run(row["runs"])
    return best["seconds"] if best else None


def fastest(rows: Sequence[TrainedRecord]) -> TrainedRecord | None:
    """The row that reached the target first."""
    there = [row for row in rows if seconds(row) is not None]
    return min(there, key=lambda row: seconds(row) or 0.0, default=None)


def synchronous(record: Record) -> list[TrainedRecord]:
    return [row for row in record["rows"] if row["exact"]]


def late(record: Record) -> list[TrainedRecord]:
    return [row for row in record["rows"] if not row["exact"]]


def outcome(run: LearningRun, metric: str) -> str:
    """What became of a run, in a few words."""
    if run["seconds"] is not None:
        return f"reached after {duration(run['seconds'])}, {run['samples']:,.0f} samples"
    lowest = "" if run["best"] is None else f", best {metric} {run['best']:.4g}"
    reason = f" ({run['reason']})" if run["outcome"] == "failed" else ""
    return f"{run['outcome']}{reason}{lowest}"


def speed(run: LearningRun) -> float | None:
    """Samples per second of training in the whole run."""
    last = run["curve"][-1] if run["curve"] else None
    return last["samples"] / last["seconds"] if last and last["seconds"] else None


def cells(record: Record) -> list[list[str]]:
    """A line per row that has runs, with its best learning rate; columns as in HEAD."""
    metric, first = record["settings"]["metric"], fastest(synchronous(record))
    found = []
    for row in record["rows"]:
        best = best_run(row["runs"])
        if best is None:
            continue
        per_second = speed(best)
        fastest_time = seconds(first) if first else None
        ratio = fastest_time / best["seconds"] if fastest_time and best["seconds"] else None
        others = [run for run in row["runs"] if run is not best]
        found.append(
            [
                title(row),
                row["optimizer"],
                f"{best['lr']:g}",
                duration(best["seconds"]) if best["seconds"] is not None else outcome(best, metric),
                "" if best["samples"] is None else f"{best['samples']:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if per_second is None else f"{per_second:,.0f}",
                gradient(row),
                "; ".join(f"{run['lr']:g}: {_short(run)}" for run in sorted(others, key=lambda run: run["lr"])),
            ]
        )
    return found


def _short(run: LearningRun) -> str:
    return run["outcome"] if run["seconds"] is None else duration(run["seconds"])


def target(record: Record) -> str:
    settings = record["settings"]
    return f"validation {settings['metric']} {settings['target']:g}{' %' if settings['metric'] == 'error' else ''}"


def heading(record: Record) -> str:
    given = record["settings"]
    return (
        f"{given['model']} on {given['data']} until {target(record)}, {given['batch_size']} samples per update, "
        f"K={given['K']}, {where(record)}"
    )


def advice(record: Record) -> list[str]:
    """Which row is the better choice, by this run."""
    exact, others = fastest(synchronous(record)), fastest(late(record))
    made = []
    if exact is None and others is None:
        outcomes = {run["outcome"] for row in record["rows"] for run in row["runs"]}
        if not outcomes or "no time" in outcomes:
            return ["No row has reached the target yet: repeat the command with more time to continue."]
        return ["No row reached the target: repeat with more samples, or with a higher loss or error."]
    if others is None and exact is not None:
        if late(record):
            made.append(
                f"No row with late gradients reached the target; {_named(exact)} did after "
                f"{duration(seconds(exact) or 0.0)}. It is the better choice here."
            )
    elif exact is None and others is not None:
        if synchronous(record):
            made.append(f"Only rows with late gradients reached the target, {_named(others)} first.")
    elif exact is not None and others is not None:
        made.append(_compared(exact, others))
        same = fastest([row for row in late(record) if row["optimizer"] == exact["optimizer"]])
        if same is not None and same is not others:
            made.append(f"With the same optimizer: {_compared(exact, same)}")
    return made


def _named(row: TrainedRecord) -> str:
    return f"{row['title']} with {row['optimizer']}"


def _compared(exact: TrainedRecord, other: TrainedRecord) -> str:
    first, second = best_run(exact["runs"]), best_run(other["runs"])
    assert first is not None
    assert second is not None
    factor, samples = first["seconds"] / second["seconds"], second["samples"] / first["samples"]
    delay = f"{max(other['staleness']):.3g}"
    needs = f"It needs {samples:.2f} times the samples, and the delay of its gradients is up to {delay} in updates."
    optimizers = (
        ""
        if exact["optimizer"] == other["optimizer"]
        else " They have different optimizers: with --optimizer all rows have the same."
    )
    if factor > 1:
        return (
            f"{_named(other)} reaches the target in {1 / factor:.2f} of the time of {_named(exact)}, the fastest "
            f"synchronous row. {needs}{optimizers}"
        )
    return (
        f"{_named(exact)} reaches the target first: the fastest row with late gradients, {_named(other)}, takes "
        f"{1 / factor:.2f} times as long. {needs} The synchronous row is the better choice here.{optimizers}"
    )


def notes(record: Record) -> list[str]:
    """What each row's figures mean, and what holds for all."""
    given = record["settings"]
    return [
        *noted(record["rows"]),
        f"All rows have the same initial weights, order of samples and samples per update. {_rates(record)} The "
        f"learning rate increases over the first {given['warmup_samples']:,} samples and is constant after.",
        f"Time and samples: to the first of the validations (every {counted(given['every'], 'update')}, on "
        f"{given['validation_samples']:,} samples) at or below the target, on a straight line from the one before it. "
        f"Validations are not part of the time. A run ends after {given['samples']:,} samples.",
        "x fastest sync.: time of the fastest row with exact gradients divided by that of the row; above 1 is faster. "
        "Late: how many updates old the gradients of stage 1 are, on average, by formula.",
        "Every run was made once, with one seed: small differences are within noise.",
        *other_cuts(record),
        *rows_left_out(record),
    ]


def _rates(record: Record) -> str:
    """Which learning rates the rows were trained with; a record that was cut off has fewer than three of some."""
    tried = [sum(run["outcome"] != "no time" for run in row["runs"]) for row in record["rows"]]
    if not any(tried):
        return "The time ended before any run did."
    if min(tried) == 3:
        return (
            "Every row is trained with 1/2, 1 and 2 times the default learning rate of its optimizer; the one that "
            "reaches the target first is shown."
        )
    rates = "their default learning rates alone" if max(tried) == 1 else f"{min(tried)} to {max(tried)} learning rates"
    return (
        f"The time ended before all runs were made: rows were trained with {rates}, instead of 1/2, 1 and 2 times the "
        "default, and rows that are not shown were not trained."
    )


def page(record: Record) -> str:
    """until.md."""
    return "\n".join(
        [
            f"# {heading(record)}",
            "",
            markdown(HEAD, cells(record)),
            "",
            *(f"- {line}" for line in (*advice(record), *notes(record))),
            "",
            source(record),
            "",
        ]
    )


def show(record: Record, where: str) -> None:
    """On the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    made = Table(title=heading(record), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for column in ("row", "optimizer", "lr", "time", "samples", "x fastest\nsync.", "samples/s", "late\nby"):
        made.add_column(column, justify="left" if column in ("row", "optimizer") else "right", no_wrap=column != "time")
    rows = [row for row in record["rows"] if best_run(row["runs"])]
    for row, line in zip(rows, cells(record), strict=True):
        made.add_row(row["name"], *line[1:7], f"{max(row['staleness'], default=0.0):.3g}")
    console.print(made)
    for text in (*advice(record), *notes(record)):
        console.print(f"- {text}", soft_wrap=True, markup=False)
    console.print(f"records: {where}", soft_wrap=True, markup=False)
