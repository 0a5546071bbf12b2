"""docs/staleness-tables.md: every table of docs/staleness.md in full, with time and updates to a loss."""

from __future__ import annotations

from statistics import median
from typing import Any

from page import Picture, listed, point, prose
from staleness_aims import AIM_STAGES, AIMS, REFERENCE, ImageTables, title_of
from staleness_pictures import by_staleness
from staleness_records import MeasuredRow, MeasuredTable

from offbeat.report.formatting import markdown, markdown_rows
from offbeat.runs.tables.gpt import RECOMMENDED

MARGIN = 0.1  # nats above the lowest loss of BP with REFERENCE: the loss to which time and updates are measured
AFTER_START = "after a synchronous start"


# ---- with and without a synchronous start


def starts_rows(table: MeasuredTable) -> list[dict[str, str]]:
    """The differences to BP of late rows at AIM_STAGES, from the first update and after a synchronous start."""
    found: dict[tuple[float, str, str, int], dict[str, str]] = {}
    for warmup in (False, True):
        for row in table.at_best_rates(AIM_STAGES, corrected=True, warmup=warmup):
            difference = table.to_best_bp(row)
            if difference is not None:
                key = (row.staleness, row.optimizer, row.method, row.M)
                title = f"{title_of(row.optimizer)}, `{row.method}` M={row.M}"
                line = found.setdefault(
                    key,
                    {
                        "updates late": f"{row.staleness:.3g}",
                        "row": title,
                        "from the first update": "",
                        AFTER_START: "",
                    },
                )
                line[AFTER_START if warmup else "from the first update"] = _marked(difference, row.staleness)
    return [found[key] for key in sorted(found)]


def _marked(difference: float, late: float) -> str:
    """Bold where it is within the aim at that staleness."""
    limit = next((margin for most, margin in AIMS if late <= most), 0.0)
    return f"**{difference:+.3f}**" if round(difference, 3) <= limit else f"{difference:+.3f}"


# ---- tables of a language model


def differences_table(table: MeasuredTable, K: int) -> str:
    """BP of each optimizer, and how far the late rows are above it."""
    late = [*table.late(K), *table.late(K, warmup=True)]
    columns = sorted({(row.staleness, row.method, row.M) for row in late})
    head = [f"K={K}", "BP", *(f"`{method}` M={M}: {updates:.3g} updates" for updates, method, M in columns)]
    rows = []
    for optimizer in table.optimizers:
        for bp in table.bps(K, optimizer):
            groups: dict[tuple[str, ...], dict[Any, MeasuredRow]] = {(): {}}
            for row in (*table.late(K, optimizer), *table.late(K, optimizer, warmup=True)):
                if row.baseline == bp.name:
                    groups.setdefault(corrections_of(row), {})[row.staleness, row.method, row.M] = row
            for corrections in sorted(groups):
                cells = [difference_cell(table, groups[corrections].get(column)) for column in columns]
                title = ", ".join([title_of(optimizer), *rate_of(bp), *corrections])
                rows.append([title, "" if corrections else bp.shown(3), *cells])
    return markdown(head, rows)


def corrections_of(row: MeasuredRow) -> tuple[str, ...]:
    """What is done against its staleness, in words."""
    corrector = "recommended corrector" if row.corrector == RECOMMENDED else f"`{row.corrector}`"
    return (*([corrector] if row.corrector else []), *([row.start] if row.start else []))


def rate_of(row: MeasuredRow) -> list[str]:
    """The learning rate in words, as a multiple of the optimizer's default; none if it is the default."""
    return [part for part in row.title.split(", ") if part.endswith("the learning rate")]


def setting_of(row: MeasuredRow) -> str:
    return ", ".join([title_of(row.optimizer), f"`{row.method}`", f"K={row.K}", f"M={row.M}", *rate_of(row)])


def difference_cell(table: MeasuredTable, row: MeasuredRow | None) -> str:
    """The difference to BP; without BP the loss."""
    if row is None:
        return ""
    difference = table.to_bp(row)
    diverged = f", {row.diverged} diverged" if row.diverged else ""
    return (f"{row.value:.3f}" if difference is None else f"{difference:+.3f}") + diverged


def better_rates(table: MeasuredTable) -> list[str]:
    """Optimizers whose BP has a lower loss at another learning rate than that of the late rows."""
    lines = []
    for K in table.stages:
        for optimizer in table.optimizers:
            own, best = table.bps(K, optimizer), table.best_bp(K, optimizer)
            if best and best not in own:
                rate = ", ".join(rate_of(best)) or "the default rate"
                lines.append(
                    point(f"{title_of(optimizer)} at K={K}: BP has {best.value:.3f} with {rate}; no late row has it.")
                )
    return lines


def worse_with_corrector(table: MeasuredTable) -> list[str]:
    """Rows that have a higher loss with the recommended corrector than without, both late from the first update."""
    found = []
    for row in table.rows:
        if row.corrector == RECOMMENDED and not row.warmup:
            same = (other for other in table.late(row.K, row.optimizer, corrected=False) if other.method == row.method)
            plain = next((other for other in same if (other.M, other.baseline) == (row.M, row.baseline)), None)
            if plain is not None and round(row.above(plain), 3) > 0:
                found.append(f"{setting_of(row)} ({row.above(plain):+.3f})")
    return [point(f"Worse with the recommended corrector than without: {listed(found)}.")] if found else []


def synchronous_starts(table: MeasuredTable) -> list[str]:
    """What synchronous updates before the late ones changed, seed by seed."""
    found = []
    for row in table.rows:
        other = table.without_warmup(row) if row.warmup else None
        late = {run.seed: run.value for run in other.runs} if other else {}
        differences = [f"{run.value - late[run.seed]:+.3f}" for run in row.runs if run.seed in late]
        if differences:
            found.append(f"{setting_of(row)}: {', '.join(differences)} ({row.start.removesuffix(' synchronous')})")
    return [point(f"With a synchronous start, per seed: {'; '.join(found)}.")] if found else []


def reached_cells(row: MeasuredRow, loss: float) -> list[str]:
    """Updates and minutes to the loss: the median of the runs that reach it."""
    found = [reached for run in row.runs if (reached := run.reached(loss)) is not None]
    if not found:
        return ["not reached", ""]
    some = f" ({len(found)} of {len(row.runs)} runs)" if len(found) < len(row.runs) else ""
    updates, seconds = (median(values) for values in zip(*found, strict=True))
    return [f"{updates:,.0f}{some}", f"{seconds / 60:.1f}"]


def progress_table(table: MeasuredTable, K: int, loss: float) -> str:
    head = ["row", "runs", "lowest loss", "last loss", "staleness", "ms per update", "updates", "minutes"]
    rows = []
    for row in [one for one in table.rows if one.K == K and one.method == "bp"] + [
        *table.late(K),
        *table.late(K, warmup=True),
    ]:
        timed = [run for run in row.runs if run.losses and run.updates]
        if timed:
            pace = median(1e3 * run.seconds[-1] / run.updates[-1] for run in timed)
            last, late = median(run.last for run in timed), f"{row.staleness:.2f}"
            count = str(len(row.runs))
            rows.append([row.title, count, row.shown(3), f"{last:.3f}", late, f"{pace:.1f}", *reached_cells(row, loss)])
    return markdown(head, rows) if rows else ""


def language_section(table: MeasuredTable) -> list[str]:
    lines = [f"## {table.title}", ""]
    lines += [
        prose(
            "Every row has the same samples per update, the same learning rate as its BP and the same stages, so that",
            "with one optimizer staleness is the only difference. Mean staleness of stage 1 in updates, as measured;",
            "later stages have less, except with `2bw`.",
        ),
        "",
        *([f"![Validation loss against staleness](results/{by_staleness(table).name})", ""] if table.stages else []),
    ]
    if starts := starts_rows(table):
        lines += [
            prose(
                f"Nats above BP with the same optimizer at its best learning rate, K={AIM_STAGES}, recommended",
                "corrector; bold where the aim is met:",
            ),
            "",
            markdown_rows(starts),
            "",
        ]
    lines += ["Validation loss in nats per token above that of BP with the same optimizer and learning rate:", ""]
    for K in table.stages:
        lines += [differences_table(table, K), ""]
    notes = synchronous_starts(table) + worse_with_corrector(table) + better_rates(table)
    return [*lines, *notes, *([""] if notes else []), *progress_section(table), *sources(table)]


def progress_section(table: MeasuredTable) -> list[str]:
    lines = []
    for K in table.stages:
        bp = table.best_bp(K, REFERENCE)
        if bp is not None and (found := progress_table(table, K, bp.value + MARGIN)):
            lines += [f"Updates and minutes to a loss of {bp.value + MARGIN:.3f}, K={K}:", "", found, ""]
    if not lines:
        return []
    return [
        "### Time and updates to a fixed loss",
        "",
        prose(
            f"The loss is the lowest one of BP with {title_of(REFERENCE)} at the same K plus {MARGIN:g} nats,",
            "interpolated between the ends of epochs. All stages of a run share one device, often with other runs at",
            "the same time: minutes compare these rows on that device, and are not those of K devices.",
        ),
        "",
        *lines,
    ]


def sources(table: MeasuredTable) -> list[str]:
    names = ", ".join(f"[{name}](results/{name})" for name in table.records)
    return [prose(f"Records: {names}; their commands and commits are in [results](results.md)."), ""]


# ---- images


def images_section(table: MeasuredTable) -> list[str]:
    if not table.rows:
        return []
    rows = [
        [row.title, str(row.K), str(row.M), f"{row.staleness:.2f}", row.shown(2), str(len(row.runs))]
        for row in sorted(table.rows, key=lambda row: (row.K, row.M, row.method, row.corrector or ""))
    ]
    return [
        f"## {table.title}",
        "",
        prose(
            "SGD with momentum, batches of b samples, M batches per update, and a learning rate in proportion to both:",
            "compare with BP of the same M. Runs of all records together.",
        ),
        "",
        markdown(["row", "K", "M", "staleness of stage 1", "error %", "runs"], rows),
        "",
        *sources(table),
    ]


# ---- the page


def page(tables: list[MeasuredTable], images: ImageTables, command: str) -> str:
    late = [row for table in tables for row in table.rows if row.staleness > 0]
    single = sum(len(row.runs) == 1 for row in late)
    lines = [
        "# Staleness: all tables",
        "",
        f"Generated by `{command}` from the records in `docs/results`; do not edit.",
        "",
        prose(
            "The measurements of [what late gradients cost](staleness.md). Losses are the lowest after an epoch, as",
            "with early stopping; errors are the last. A difference to BP is the median over the seeds that both rows",
            "have; of errors, that of the medians. BP is at the best of its learning rates that were measured, each",
            "late row at the best of its own, which may be fewer. With few seeds, small differences mean little.",
            *([f"{single} of the {len(late)} rows of language models have a single run."] if single else []),
        ),
        "",
    ]
    for table in tables:
        lines += language_section(table)
    for table in images.values():
        lines += images_section(table)
    return "\n".join(lines).rstrip() + "\n"


def pictures(tables: list[MeasuredTable]) -> list[Picture]:
    return [by_staleness(table) for table in tables if table.stages]
