"""What is recommended against late gradients, and how far the aims of docs/staleness.md are met, from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from staleness_records import ImageExperiment, MeasuredRow, MeasuredTable

from offbeat.recommended import recommend
from offbeat.report.formatting import markdown
from offbeat.runs.optimizers import OPTIMIZERS

REFERENCE = "adamw"  # whose BP the recommended configuration is compared with
AIM_TABLE = "gpt"  # of which an aim that was not measured is listed, too
AIM_STAGES = 12
AIMS = ((1.0, 0.01), (2.75, 0.03), (11.0, 0.15))  # up to that many updates late at most so many nats above BP
CHOICE_STAGES = (4, 12, 24)  # where the recommended configuration is to be no worse than BP with AdamW
COMPENSATED = ("auto", "sc")  # what is recommended for SGD

ImageTables = Mapping[ImageExperiment, MeasuredTable]
Average = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Aim:
    """An aim of an experiment and its outcome: what was measured, by configuration, and whether each met it.

    wanted   the configurations that the aim is about
    means    the same as `measured`, of means instead of medians
    """

    experiment: str
    text: str
    measured: dict[str, float]
    limit: float
    wanted: list[str]
    digits: int = 3
    means: dict[str, float] = field(default_factory=dict)

    def _met(self, name: str) -> bool:
        return round(self.measured[name], self.digits) <= self.limit

    def _shown(self, name: str) -> str:
        means = f" (of means {self.means[name]:+.{self.digits}f})" if name in self.means else ""
        return f"{name} {self.measured[name]:+.{self.digits}f}{means}"

    @property
    def cells(self) -> list[str]:
        met = [self._shown(name) for name in self.measured if self._met(name)]
        missed = [self._shown(name) for name in self.measured if not self._met(name)]
        unknown = [name for name in self.wanted if name not in self.measured]
        return [self.experiment, self.text, *("; ".join(names) for names in (met, missed, unknown))]


def title_of(optimizer: str) -> str:
    return OPTIMIZERS[optimizer].title


def updates_late(staleness: float) -> str:
    """
    >>> updates_late(0.6875), updates_late(1.0)
    ('0.688 updates', '1 update')
    """
    return f"{staleness:.3g} update{'s' * (staleness != 1)}"


def starts_text(tables: Sequence[MeasuredTable]) -> str:
    """How long the synchronous starts are that were measured, and those of method `auto` where they differ."""
    found = {}
    for row in (row for table in tables for row in table.rows if isinstance(row.warmup, int)):
        for updates in sorted({run.updates[-1] for run in row.runs if run.updates}):
            other = f" (method `auto` has {row.start_of_auto})" if row.from_start_of_auto else ""
            found[updates, row.warmup] = f"{row.warmup} of {updates:,} updates{other}"
    starts = ", ".join(found[key] for key in sorted(found))
    return f"Synchronous starts of language models had {starts}." if starts else ""


def method_of(K: int, batch: int = 64, *, latency: float = 0.0) -> str:
    """The method that is recommended if time is proportional to samples."""
    settings = {"latency": latency}
    return recommend(K, batch=batch, settings=settings, seconds=lambda size: 1e-3 * size).method.name


def recommended_rows(table: MeasuredTable, K: int) -> dict[str, MeasuredRow]:
    """For each optimizer what is recommended with the largest M that was measured."""
    return {row.optimizer: row for row in table.recommended(K) if row.method == method_of(K)}


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


def late_aims(table: MeasuredTable) -> list[Aim]:
    """How far recommended rows at AIM_STAGES are above BP with the same optimizer, by staleness."""
    found, last = [], 0.0
    for limit, margin in AIMS:
        measured, wanted = {}, []
        for optimizer in table.optimizers:
            rows = [row for row in table.recommended(AIM_STAGES, optimizer) if last < row.staleness <= limit]
            differences = {name_of(row) + table.remarks(row): table.to_best_bp(row) for row in rows}
            known = {name: value for name, value in differences.items() if value is not None}
            wanted += [] if known or table.slug != AIM_TABLE else [title_of(optimizer)]
            measured |= known
        where = f"over {last:g}, up to {limit:g}" if last else f"up to {limit:g}"
        text = f"{where} update{'s' * (limit > 1)} late: at most +{margin:g}"
        found += [Aim(table.title, text, measured, margin, wanted)] if measured or wanted else []
        last = limit
    return found


def name_of(row: MeasuredRow) -> str:
    """Its optimizer and M, and its method if it is not the recommended one.

    >>> def row(method): return MeasuredRow("r", "", "muon", method, 12, 4, "auto", 16, None, ())
    >>> name_of(row("adl-1f1b")), name_of(row("2bw"))
    ('Muon M=4', 'Muon `2bw` M=4')
    """
    method = f" `{row.method}`" if row.method != method_of(row.K) else ""
    return f"{title_of(row.optimizer)}{method} M={row.M}"


def choice_aim(table: MeasuredTable) -> Aim:
    """That the recommended configuration is as good as BP with the usual optimizer."""
    chosen = best_optimizer(table)
    name = f", with {title_of(chosen)}" if chosen else ""
    text = f"all K{name}: no worse than BP with {title_of(REFERENCE)}"
    measured = {f"K={K}": value for K, value in above_reference(table).get(chosen or "", {}).items()}
    return Aim(table.title, text, measured, 0.0, [f"K={K}" for K in CHOICE_STAGES])


def image_differences(table: MeasuredTable, K: int, average: Average = median) -> dict[str, float]:
    """The error of the recommended method and corrector minus that of BP with the same M and batch size, each averaged
    over its seeds."""
    found = {}
    for row in table.rows:
        if row.K == K and row.method == method_of(K) and row.corrector in COMPENSATED:
            same = (one for one in table.rows if (one.M, one.batch_size) == (row.M, row.batch_size))
            bp = next((one for one in same if one.method == "bp"), None)
            name = ", ".join([f"M={row.M}", *([row.start] if row.start else [])]) + table.remarks(row)
            found |= {name: average(row.values) - average(bp.values)} if bp else {}
    return found


def image_aims(experiment: ImageExperiment, table: MeasuredTable) -> list[Aim]:
    return [
        Aim(
            table.title,
            f"K={K}: at most {limit:g} points of error above BP with the same M",
            measured := image_differences(table, K),
            limit,
            [] if measured else ["all"],
            2,
            image_differences(table, K, mean),
        )
        for K, limit in experiment.aims.items()
    ]


def aims_table(tables: list[MeasuredTable], images: ImageTables) -> str:
    """All aims, and by which configurations they are met and missed."""
    found = []
    for table in tables:
        choice = choice_aim(table)
        found += [*late_aims(table), *([choice] if choice.measured or table.slug == AIM_TABLE else [])]
    found += [aim for experiment, table in images.items() for aim in image_aims(experiment, table)]
    return markdown(["experiment", "aim", "met", "missed", "not measured"], [aim.cells for aim in found])
