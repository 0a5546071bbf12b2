"""The table of a record of `offbeat bench`, and which row is the better choice when; from the record alone."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from offbeat.report.formatting import counted, markdown, ranged, size

Record = dict[str, Any]
RowRecord = dict[str, Any]
HEAD = ("row", "samples/s", "x BP", "x best sync.", "of the bound", "gradient", "memory", "moved")
BUSY = 0.5  # other processes per core
ALIKE = 0.03  # relative difference below which two rows count as equally fast


def measured(record: Record) -> dict[str, RowRecord]:
    """The rows that were timed at least once, by name."""
    return {row["name"]: row for row in record["rows"] if row["seconds_per_batch"]}


def speed(row: RowRecord) -> float:
    return median(row["samples_per_second"])


def is_pipeline(row: RowRecord) -> bool:
    """Whether each worker of a row holds a stage, so that the bound of the cuts applies to it."""
    return bool(row["staleness"]) or row["micro_batches"] is not None


def best_synchronous(record: Record) -> RowRecord | None:
    """The fastest pipeline whose gradient is exact."""
    found = [row for row in measured(record).values() if row["exact"] and is_pipeline(row)]
    return max(found, key=speed, default=None)


def times_faster(row: RowRecord, other: RowRecord) -> float:
    """Median over the rounds of one row's speed divided by the other's in the same round.

    >>> times_faster({"seconds_per_batch": [1.0, 2.0]}, {"seconds_per_batch": [3.0, 4.0, 9.0]})
    2.5
    """
    return median(by_round(row, other))


def by_round(row: RowRecord, other: RowRecord) -> list[float]:
    """The same, of every round."""
    pairs = zip(other["seconds_per_batch"], row["seconds_per_batch"], strict=False)  # a round may not be complete
    return [a / b for a, b in pairs]


def bound_of(row: RowRecord, record: Record) -> Record | None:
    """The bound of the cuts of a row, where it was measured."""
    rows = {other["name"]: other for other in record["rows"]}
    bounds = [(rows.get("adl", {}), record["bound"])]
    bounds += [(other, other["bound"]) for other in rows.values() if "bound" in other]
    same = (bound for other, bound in bounds if other.get("cuts") == row.get("cuts") and bound["seconds_per_batch"])
    return next(same, None) if is_pipeline(row) else None


def share_of_bound(row: RowRecord, record: Record) -> float | None:
    """The time of the slowest stage alone on the cuts of the row, divided by the row's in the same round."""
    bound = bound_of(row, record)
    return times_faster(row, bound) if bound else None


def other_cuts(record: Record) -> list[str]:
    """The cuts of the record, and those of rows with other ones; nothing where all rows share them."""
    whole = list(record["settings"]["cuts"])
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        if (own := row.get("cuts")) not in (None, whole):
            found.setdefault(str(own), []).append(row["name"])
    others = [f"{', '.join(names)}: {own}" for own, names in found.items()]
    return [f"Cuts, for the samples on which stages compute: {'; '.join([str(whole), *others])}."] if others else []


def title(row: RowRecord) -> str:
    return row["title"] + (f", m={row['micro_batches']}" if row["micro_batches"] else "")


def source(record: Record) -> str:
    """Where a record comes from."""
    made = record["provenance"]
    return (
        f"`{' '.join(made['command'])}`, commit {(made['commit'] or 'unknown')[:12]}, torch "
        f"{made['versions']['torch']}, {made['machine']}; cuts {list(record['settings']['cuts'])}."
    )


def gradient(row: RowRecord) -> str:
    """Exact, or how many updates late."""
    if row["exact"]:
        return "exact"
    return f"late by {max(row['staleness']):.3g}"


def cells(record: Record) -> list[list[str]]:
    """A line per row, in the order of the record; columns as in HEAD."""
    rows, best = measured(record), best_synchronous(record)

    def speeds(row: RowRecord) -> list[str]:
        others = (rows.get("bp"), best)
        return [ranged(row["samples_per_second"]), *(f"{times_faster(row, one):.2f}" if one else "" for one in others)]

    found = []
    for row in rows.values():
        share = share_of_bound(row, record)
        held = [gradient(row), size(row["memory_per_worker"]), size(row["bytes_moved"])]
        found.append([title(row), *speeds(row), "" if share is None else f"{share:.2f}", *held])
    if record["bound"]["seconds_per_batch"]:
        found.append(["no-communication bound of the cuts", *speeds(record["bound"]), "1", "", "", ""])
    return found


def setting(record: Record) -> str:
    """The network, and where it was timed."""
    given = record["settings"]
    per_update = given.get("batch_per_update")
    samples = f"{per_update} samples per update" if per_update else f"b={given['batch_size']}"
    return f"{given['model']}, {samples}, K={given['K']}, M={given['M']}, {where(record)}"


def where(record: Record) -> str:
    """The cores of the workers, and the network between them, if the record has it."""
    given, network = record["settings"], record["provenance"].get("network")
    cores = "one GPU" if given["device"] == "cuda" else "one core per worker"
    if given["cores_shared"]:
        cores = f"{counted(given['cores'], 'core')} shared by the workers"
    return f"{cores}, {network} between workers" if network else cores


def heading(record: Record) -> str:
    if not measured(record):
        return f"{setting(record)}; no row was timed"
    rounds = max(1, record["settings"]["rounds"])  # 0: the first one was not finished
    return f"{setting(record)}; median (least-most) of {counted(rounds, 'round')}"


def compared(row: RowRecord, other: RowRecord) -> str:
    """'A is 1.20 times as fast as B', or that they are alike, from the figures of the run."""
    factor = times_faster(row, other)
    if abs(factor - 1) <= ALIKE:
        return f"{row['title']} is as fast as {other['title']} here ({factor:.2f})"
    if factor < 1:
        row, other, factor = other, row, 1 / factor
    return f"{row['title']} is {factor:.2f} times as fast as {other['title']} here"


def advice(record: Record) -> list[str]:
    """Which row is the better choice when, by this run."""
    rows, best = measured(record), best_synchronous(record)
    adl, made = rows.get("adl"), []
    if adl is None:
        return []
    late = f"ADL's gradients are up to {max(adl['staleness']):.3g} updates late"
    if ddp := rows.get("ddp"):
        made.append(_against_ddp(adl, ddp, late))
    if best:
        made += _at_equal_samples(record, best)
        made.append(
            f"{compared(adl, best)}; it holds {size(adl['memory_per_worker'])} per worker at most, the other "
            f"{size(best['memory_per_worker'])}. The synchronous one is the better choice where the exact "
            f"gradient is worth that much time, or where memory is short: {late}."
        )
    if cores := rows.get("bp-cores"):
        made.append(
            f"{compared(adl, cores)}. Back-propagation on all cores needs no second process: the larger the batch and "
            "the layers, the better it uses them."
        )
    if "gpipe" in rows and "torch-gpipe" in rows:
        ours, theirs = rows["gpipe"], rows["torch-gpipe"]
        same = sorted(set(ours["sweep"]) & set(theirs["sweep"]), key=int)
        each = ", ".join(f"m={m}: {theirs['sweep'][m] / ours['sweep'][m]:.2f}" for m in same)
        made.append(compared(ours, theirs) + (f"; torch's time / ours for each m tried: {each}." if each else "."))
    share = share_of_bound(adl, record)
    if share is not None:
        made.append(f"ADL reaches {share:.2f} of the speed of its slowest stage alone.")
    return made


EQUAL = ("adl-micro", "adl-recompute", "adl-1f1b-micro")  # rows with the samples per update of the synchronous ones


def _at_equal_samples(record: Record, best: RowRecord) -> list[str]:
    """ADL with as many samples per update as the best synchronous pipeline."""
    rows = measured(record)
    made = []
    for row in (rows[name] for name in EQUAL if name in rows):
        memory = row["memory_per_worker"] / best["memory_per_worker"]
        made.append(
            f"At {row['samples_per_update']} samples per update, {compared(row, best)}. A worker of ADL holds up to "
            f"{size(row['memory_per_worker'])} there, {memory:.2f} times as much as one of the other; its gradients "
            f"are up to {max(row['staleness']):.3g} updates late."
        )
    return made


def _against_ddp(adl: RowRecord, ddp: RowRecord, late: str) -> str:
    moved = f"it moves {size(ddp['bytes_moved'])} per batch, ADL {size(adl['bytes_moved'])}"
    holds = f"each of its workers holds the whole network ({size(ddp['memory_per_worker'])} with its activations)"
    if times_faster(adl, ddp) > 1 + ALIKE:
        return (
            f"{compared(adl, ddp)}. DDP is still the better choice where the gradient must be exact and the network "
            f"fits one worker: {holds}; {moved}; ADL pays with memory ({size(adl['memory_per_worker'])} per worker "
            f"at most), and {late}."
        )
    return (
        f"{compared(ddp, adl)}: the network fits one worker and links are fast, and its gradient is exact, so it is "
        f"the better choice here. {holds[0].upper()}{holds[1:]}; {moved}. ADL is the better choice where the network "
        "does not fit one worker, where a worker's part of the batch would be small, or where the gradients of all "
        "weights are too much for the links."
    )


def notes(record: Record) -> list[str]:
    """What each row's figures mean, and what holds for all."""
    return [*noted(measured(record).values()), *common_notes(record)]


def noted(rows: Iterable[RowRecord]) -> list[str]:
    """The notes of rows; those with the same one share a line."""
    titles: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["note"]:
            titles.setdefault(row["note"], {})[row["title"]] = None
    return [f"{'; '.join(names)}: {note}" for note, names in titles.items()]


def common_notes(record: Record) -> list[str]:
    unit = "update" if record["settings"].get("batch_per_update") else "batch"
    made = [
        "x BP: times as fast as BP on one worker; x best sync.: as the fastest pipeline with exact gradients. Ratios, "
        "and shares of the bound, are taken within each round; the median of the rounds is given.",
        "Late: how many updates old the gradient of stage 1 is, on average, by formula; that of the last stage "
        "is never late.",
        f"Memory: {record['settings']['memory']}. Moved: by all workers together in one {unit}.",
        f"Bound: {record['bound']['meaning']}.",
        *other_cuts(record),
    ]
    if record["settings"]["device"] == "cpu":
        batches = counted(record["settings"]["batches"], "batch", "batches")
        made.insert(1, f"A round times {batches} of a row with K workers, or whole windows of M where it accumulates.")
    if record["settings"]["load"] > BUSY * record["settings"]["cores"]:
        load, cores = record["settings"]["load"], record["settings"]["cores"]
        made.append(
            f"The machine was busy with something else when this began (load {load:g} on "
            f"{counted(cores, 'core')}): these times are not reliable."
        )
    return made + rows_left_out(record)


def rows_left_out(record: Record) -> list[str]:
    return [f"{name} is left out: {reason}." for name, reason in record["left_out"].items()]


def page(record: Record) -> str:
    """table.md."""
    lines = [
        f"# {heading(record)}",
        "",
        markdown(HEAD, cells(record)),
        "",
        "## When which",
        "",
        " ".join(advice(record)),
        "",
        "## What the rows are",
        "",
        *(f"- {note}" for note in notes(record)),
        "",
        source(record),
        "",
    ]
    return "\n".join(lines)


def _larger_updates(record: Record) -> list[str]:
    """Which rows, by the names that the terminal shows, have other samples per update than one batch."""
    batch = record["settings"]["batch_size"]
    found = {row["name"]: row.get("samples_per_update", batch) for row in measured(record).values()}
    rows = [f"{name} {samples}" for name, samples in found.items() if samples != batch]
    return [f"Samples per update: {batch}; {', '.join(rows)}."] if rows else []


def show(record: Record, where: str) -> None:
    """On the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not measured(record):
        for text in (heading(record), *(f"- {reason}" for reason in rows_left_out(record))):
            console.print(text, soft_wrap=True)
        return
    made = Table(title=heading(record), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    made.add_column("row", no_wrap=True)
    for column in ("m", "late\nby", "MB per\nworker", "MB\nmoved", "samples/s", "x BP", "x best\nsync.", "of\nbound"):
        made.add_column(column, justify="right", no_wrap=True)
    rows = [*measured(record).values(), *([record["bound"]] if record["bound"]["seconds_per_batch"] else [])]
    for row, line in zip(rows, cells(record), strict=True):
        if "name" not in row:
            made.add_row("bound", "", "", "", "", *line[1:5])
            continue
        late = max(row["staleness"], default=0.0)
        made.add_row(
            row["name"],
            str(row["micro_batches"] or ""),
            f"{late:.3g}",
            f"{row['memory_per_worker'] / 1e6:,.0f}",
            f"{row['bytes_moved'] / 1e6:,.1f}",
            *line[1:5],
        )
    console.print(made)
    for text in (*advice(record), *_larger_updates(record), *common_notes(record)):
        console.print(f"- {text}", soft_wrap=True)
    console.print(f"records: {where}", soft_wrap=True)
