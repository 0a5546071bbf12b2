"""Write docs/staleness.md and its pictures from the records of `offbeat reproduce` in docs/results.

python benchmarks/staleness.py              write them
python benchmarks/staleness.py --check      only compare, and fail where they are not current
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from page import RECORDS, ROOT, Picture, listed, point, prose, publish, records
from staleness_pictures import by_choice, by_stages, by_staleness
from staleness_records import IMAGES, ImageExperiment, MeasuredRow, MeasuredTable, language_tables

from offbeat.methods import with_settings
from offbeat.recommended import DELAY, EFFICIENT, LATE, ONE_IN, SYNCHRONOUS, correctors_by_optimizer, recommend
from offbeat.report.formatting import markdown, markdown_rows
from offbeat.runs.optimizers import OPTIMIZERS
from offbeat.runs.tables.gpt import RECOMMENDED

PAGE = ROOT / "docs/staleness.md"
COMMAND = "python benchmarks/staleness.py"
REFERENCE = "adamw"  # whose BP the recommended configuration is compared with
MARGIN = 0.1  # nats above the lowest loss of that BP: the loss to which time and updates are measured

# Aims: at most that much above BP with the same optimizer, in nats, for rows of that K up to that staleness in updates
AFTER_START = "after a synchronous start"
AIM_TABLE = "gpt"  # of which an aim that was not measured is listed, too
AIM_STAGES = 12
AIMS = ((1.0, 0.01), (2.75, 0.03), (11.0, 0.15))
CHOICE_STAGES = (4, 12, 24)  # where the recommended configuration is to be no worse than BP with AdamW
COMPENSATED = ("auto", "sc")  # what is recommended for SGD

ImageTables = Mapping[ImageExperiment, MeasuredTable]
Average = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Aim:
    """An aim and its outcome: what was measured, by configuration, and whether each met it.

    wanted   the configurations that the aim is about
    means    the same as `measured`, of means instead of medians
    """

    text: str
    measured: dict[str, float]
    limit: float
    wanted: list[str]
    digits: int = 3
    means: dict[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        met = [name for name, value in self.measured.items() if round(value, self.digits) <= self.limit]
        missed = [name for name in self.measured if name not in met]
        unknown = [name for name in self.wanted if name not in self.measured]
        found = {"**met**": met, "**missed**": missed, "not measured": unknown}
        parts = {word: ", ".join(names) for word, names in found.items() if names}
        return next(iter(parts)) if len(parts) == 1 else "; ".join(f"{word}: {names}" for word, names in parts.items())

    @property
    def cells(self) -> list[str]:
        shown = (
            f"{name} {value:+.{self.digits}f}"
            + (f" (of means {self.means[name]:+.{self.digits}f})" if name in self.means else "")
            for name, value in self.measured.items()
        )
        return [self.text, ", ".join(shown) or "-", self.outcome]


def title_of(optimizer: str) -> str:
    return OPTIMIZERS[optimizer].title


# ---- what is recommended


def method_of(K: int, batch: int = 64, *, latency: float = 0.0) -> str:
    """The method that is recommended if time is proportional to samples."""
    settings = {"latency": latency}
    return recommend(K, batch=batch, settings=settings, seconds=lambda size: 1e-3 * size).method.name


def recommended_rows(table: MeasuredTable, K: int) -> dict[str, MeasuredRow]:
    """For each optimizer what is recommended with the largest M that was measured."""
    return {row.optimizer: row for row in table.recommended(K, method_of(K))}


def above_reference(table: MeasuredTable) -> dict[str, dict[int, float]]:
    """The loss of the recommended rows minus that of BP with AdamW at its best learning rate, by optimizer and K."""
    found: dict[str, dict[int, float]] = {}
    for K in table.stages:
        bp = table.best_bp(K, REFERENCE)
        for optimizer, row in recommended_rows(table, K).items() if bp else ():
            found.setdefault(optimizer, {})[K] = row.above(bp)
    return found


def best_optimizer(table: MeasuredTable) -> str | None:
    """The optimizer whose largest difference over all K is the smallest, among those measured at most values of K."""
    found = above_reference(table)
    return min(found, key=lambda name: (-len(found[name]), max(found[name].values())), default=None)


# ---- aims


def late_aims(table: MeasuredTable) -> list[dict[str, str]]:
    """The differences to BP of late rows at AIM_STAGES by aim, from the first update and after a synchronous start."""
    found, last = [], 0.0
    late = [row for warmup in (False, True) for row in table.at_best_rates(AIM_STAGES, corrected=True, warmup=warmup)]
    for limit, margin in AIMS:
        differences: dict[str, dict[str, list[float | None]]] = {optimizer: {} for optimizer in table.optimizers}
        for row in late:
            if last < row.staleness <= limit and (difference := table.to_best_bp(row)) is not None:
                name = f"{title_of(row.optimizer)}, `{row.method}` M={row.M}"
                differences[row.optimizer].setdefault(name, [None, None])[bool(row.warmup)] = difference
        where = f"over {last:g}, up to {limit:g}" if last else f"up to {limit:g}"
        aim = f"{where} update{'s' * (limit > 1)} late: at most +{margin:g}"
        last = limit
        for optimizer, those in differences.items():
            unknown = {title_of(optimizer): [None, None]} if table.slug == AIM_TABLE else {}
            for name, pair in (those or unknown).items():
                shown = [_marked(value, margin) for value in pair] if those else ["not measured", "not measured"]
                found.append({"aim": aim, "row": name, "from the first update": shown[0], AFTER_START: shown[1]})
    return found


def _marked(value: float | None, limit: float) -> str:
    """Bold where it is within the limit."""
    if value is None:
        return ""
    return f"**{value:+.3f}**" if round(value, 3) <= limit else f"{value:+.3f}"


def choice_aim(table: MeasuredTable) -> Aim:
    """That the recommended configuration is as good as BP with the usual optimizer."""
    chosen = best_optimizer(table)
    differences = above_reference(table).get(chosen or "", {})
    name = f", with {title_of(chosen)}" if chosen else ""
    text = f"recommended configuration{name}: no worse than BP with {title_of(REFERENCE)} at any K"
    measured = {f"K={K}": value for K, value in differences.items()}
    return Aim(text, measured, 0.0, [f"K={K}" for K in CHOICE_STAGES])


def image_differences(table: MeasuredTable, K: int, average: Average = median) -> dict[str, float]:
    """The error of the recommended method and corrector minus that of BP with the same M and batch size, each averaged
    over its seeds."""
    found = {}
    for row in table.rows:
        if row.K == K and row.method == method_of(K) and row.corrector in COMPENSATED:
            same = (one for one in table.rows if (one.M, one.batch_size) == (row.M, row.batch_size))
            bp = next((one for one in same if one.method == "bp"), None)
            name = f"M={row.M}" + (f" after {row.warmup} synchronous updates" if row.warmup else "")
            found |= {name: average(row.values) - average(bp.values)} if bp else {}
    return found


def image_aims(experiment: ImageExperiment, table: MeasuredTable) -> list[Aim]:
    return [
        Aim(
            f"{table.title}, K={K}: within {limit:g} points of error of BP with the same M",
            measured := image_differences(table, K),
            limit,
            list(measured) or ["all"],
            2,
            image_differences(table, K, mean),
        )
        for K, limit in experiment.aims.items()
    ]


def aims_section(tables: list[MeasuredTable], images: ImageTables) -> list[str]:
    lines = ["## Aims, met and missed", ""]
    head = ["aim", "measured, difference to BP", "outcome"]
    for table in tables:
        late, choice = late_aims(table), choice_aim(table)
        what = f"{table.title}: nats above BP with the same optimizer, K={AIM_STAGES}; bold where the aim is met."
        lines += [prose(what), "", markdown_rows(late), ""] if late else []
        lines += [markdown(head, [choice.cells]), ""] if choice.measured or table.slug == AIM_TABLE else []
    lines += [] if tables else ["There is no record of a language model yet.", ""]
    found = [aim.cells for experiment, table in images.items() for aim in image_aims(experiment, table)]
    lines += [markdown(head, found), ""]
    late = [row for table in tables for row in table.rows if row.staleness > 0]
    single = sum(len(row.runs) == 1 for row in late)
    seeds = (
        [f"{single} of the {len(late)} rows of language models with late gradients have a single run."]
        if single
        else []
    )
    return [
        *lines,
        prose(
            "Rows with the recommended corrector; for NAdam that is none. Losses are the lowest after an epoch, as",
            "with early stopping; errors are the last. BP is at the best of its learning rates that were measured, and",
            "each late row at the best of its own, which may be fewer: differences at the same rate are below. A",
            "difference is the median over the seeds that both rows have; of errors, that of the medians. With few",
            "seeds, small ones mean little.",
            *seeds,
            "The optimizer of the recommended configuration is the one that did best in these same runs.",
        ),
        "",
    ]


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
    start = f"first {row.warmup} updates synchronous"
    return (*([corrector] if row.corrector else []), *([start] if row.warmup else []))


def rate_of(bp: MeasuredRow) -> list[str]:
    """The learning rate of BP in words, as a multiple of the optimizer's default; none if it is the default."""
    return [part for part in bp.title.split(", ") if part.endswith("the learning rate")]


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
    """Rows that have a higher loss with the recommended corrector than without."""
    found = []
    for row in table.rows:
        if row.corrector == RECOMMENDED:
            same = (other for other in table.late(row.K, row.optimizer, corrected=False) if other.method == row.method)
            plain = next((other for other in same if (other.M, other.baseline) == (row.M, row.baseline)), None)
            if plain is not None and round(row.above(plain), 3) > 0:
                setting = f"{title_of(row.optimizer)}, `{row.method}`, K={row.K}, M={row.M}"
                found.append(f"{setting} ({row.above(plain):+.3f})")
    return [point(f"Worse with the recommended corrector than without: {listed(found)}.")] if found else []


def synchronous_starts(table: MeasuredTable) -> list[str]:
    """What synchronous updates before the late ones changed, seed by seed."""
    found = []
    for row in table.rows:
        other = table.without_warmup(row) if row.warmup else None
        late = {run.seed: run.value for run in other.runs} if other else {}
        differences = [f"{run.value - late[run.seed]:+.3f}" for run in row.runs if run.seed in late]
        if differences:
            setting = f"{title_of(row.optimizer)}, `{row.method}`, K={row.K}, M={row.M}"
            found.append(f"{setting}: {', '.join(differences)} (first {row.warmup} updates)")
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
        "Validation loss in nats per token above that of BP with the same optimizer and learning rate:",
        "",
    ]
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
        *(
            f"![Test error against the number of stages](results/{picture.name})\n"
            for picture in stages_pictures(table)
        ),
        markdown(["row", "K", "M", "staleness of stage 1", "error %", "runs"], rows),
        "",
        *sources(table),
    ]


def stages_pictures(table: MeasuredTable) -> list[Picture]:
    """Error against K, where there are several values of it beside that of BP."""
    return [by_stages(table)] if len({row.K for row in table.rows}) > 2 else []


# ---- what to choose


def choice_section(tables: list[MeasuredTable]) -> list[str]:
    K = AIM_STAGES
    method = method_of(K)
    situations = [
        ["one stage", f"`{method_of(1)}`"],
        ["several stages, a message takes no longer than a stage computes", f"`{method}`"],
        ["several stages, a message takes longer than that", f"`{method_of(K, latency=1e6)}`"],
    ]
    correctors = {
        M: correctors_by_optimizer(with_settings(method, {"M": M, "corrector": "auto"}), K) for M in (16, 4, 1)
    }
    optimizers = list(correctors[1])
    late = {M: with_settings(method, {"M": M}).staleness(1, K) for M in correctors}
    rows = [[f"{late[M]:.3g} updates (K={K}, M={M})", *by.values()] for M, by in correctors.items()]
    lines = [
        "## What to choose",
        "",
        prose(
            '`method="auto"` with the samples per update (`batch=`, `--batch-per-update`) chooses all of this but the',
            "optimizer; `offbeat plan` prints it.",
        ),
        "",
        markdown(["situation", "method"], situations),
        "",
        prose(
            "M is the largest power of two whose measured time per sample is at most",
            f"{EFFICIENT:g} times the shortest; it stops where stage 1 is {DELAY:g} updates late. The correctors",
            "follow from the optimizer and the delay of each stage:",
        ),
        "",
        markdown(["staleness of stage 1", *optimizers], rows),
        "",
        prose(
            f"Where M cannot be large, so that stage 1 is more than {LATE:g} updates late, the first {SYNCHRONOUS}",
            f"updates are synchronous (`--staleness-warmup {SYNCHRONOUS}`; `auto:staleness_warmup=0` leaves them out);",
            f"`offbeat train` limits them to {100 // ONE_IN} % of the run, and `Pipeline.fit` warns if they are more",
            "than half of it.",
            "In processes the M batches of each fill and drain the pipeline, so that it takes (M+K-1)/M times as long",
            f"as a late one: {(4 + K - 1) / 4:.3g} times at K={K} and M=4, and K times at M=1.",
        ),
        "",
    ]
    for table in tables:
        lines += choice_of(table, method)
    return [*lines, "More on each choice: [choosing K, M and a method](choosing.md).", ""]


def choice_of(table: MeasuredTable, method: str) -> list[str]:
    """What was measured of the recommended configuration, and the optimizer that follows."""
    found = above_reference(table)
    best = best_optimizer(table)
    if best is None:
        return []
    rows = []
    for optimizer in sorted(found, key=table.optimizers.index):
        cells = [
            f"{found[optimizer][K]:+.3f} (M={recommended_rows(table, K)[optimizer].M})" if K in found[optimizer] else ""
            for K in table.stages
        ]
        name = title_of(optimizer)
        rows.append([f"**{name}**" if optimizer == best else name, *cells])
    head = ["optimizer", *(f"K={K}" for K in table.stages)]
    worst = max(found[best].values())
    return [
        prose(
            f"{table.title}: validation loss of `{method}` with the recommended corrector and start, at the largest M",
            f"that was measured, minus that of BP with {title_of(REFERENCE)} at its best learning rate. The largest",
            f"difference over all K is smallest with {title_of(best)}: {worst:+.3f} nats.",
        ),
        "",
        markdown(head, rows),
        "",
        f"![Loss of the recommended method by M](results/{by_choice(table, method, REFERENCE).name})",
        "",
    ]


# ---- the page


def page(tables: list[MeasuredTable], images: ImageTables) -> str:
    lines = [
        "# Staleness: what late gradients cost",
        "",
        f"Generated by `{COMMAND}` from the records in `docs/results`; do not edit.",
        "",
        prose(
            "Stages that never wait for each other apply gradients late. The delay of stage k in updates is its lag in",
            "batches divided by M, the gradients per update: K-k batches on the 1F1B lag, 2(K-k) on ADL's. This page",
            "shows what the delay costs, how much depends on the optimizer, and what to choose.",
        ),
        "",
        *aims_section(tables, images),
    ]
    for table in tables:
        lines += language_section(table)
    for table in images.values():
        lines += images_section(table)
    return "\n".join([*lines, *choice_section(tables)]).rstrip() + "\n"


def pictures(tables: list[MeasuredTable], images: ImageTables) -> list[Picture]:
    method = method_of(AIM_STAGES)
    return [
        *(by_staleness(table) for table in tables if table.stages),
        *(by_choice(table, method, REFERENCE) for table in tables if best_optimizer(table)),
        *(picture for table in images.values() for picture in stages_pictures(table)),
    ]


def main() -> None:
    again = records("reproduction")
    tables = language_tables(again)
    images = {experiment: experiment.table_of(again) for experiment in IMAGES}
    drawn = pictures(tables, images)
    left_over = set(RECORDS.glob("staleness-*.svg")) - {picture.path for picture in drawn}
    publish({PAGE: page(tables, images)}, COMMAND, pictures=drawn, left_over=left_over)


if __name__ == "__main__":
    main()
