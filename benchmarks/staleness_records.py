"""The rows of reproduction records, of all records with the same data and length together, for docs/staleness.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from page import Record, Records
from results_reproduction import EPOCHS, task_of

from offbeat.recommended import LATE, ONE_IN, SYNCHRONOUS
from offbeat.report.formatting import ranged
from offbeat.runs.tables import TABLES
from offbeat.runs.tables.gpt import CORRECTORS, RECOMMENDED
from offbeat.runs.task import LANGUAGE


@dataclass(frozen=True)
class FinishedRun:
    """One run that has ended.

    value      lowest loss of a language model after an epoch, as with early stopping; last error % of a classifier
    last       loss or error % after the last epoch
    losses     after each epoch; empty in records of earlier versions
    updates, seconds   from the start until then
    staleness  mean of stage 1 in updates
    """

    seed: int
    value: float
    last: float
    losses: tuple[float, ...]
    updates: tuple[int, ...]
    seconds: tuple[float, ...]
    staleness: float

    def reached(self, loss: float) -> tuple[float, float] | None:
        """Updates and seconds until the loss, linear between the ends of epochs; None if it is not reached.

        >>> run = FinishedRun(0, 1.0, 1.0, (3.0, 2.0, 1.0), (100, 200, 300), (5.0, 10.0, 15.0), 0.0)
        >>> run.reached(1.5), run.reached(3.5), run.reached(0.5)
        ((250.0, 12.5), (100.0, 5.0), None)
        """
        points = list(zip(self.losses, self.updates, self.seconds, strict=True))
        for at, (value, updates, seconds) in enumerate(points):
            if value > loss:
                continue
            before, first, start = points[at - 1] if at else (value, updates, seconds)
            share = (before - loss) / (before - value) if before > loss else 1.0
            return first + share * (updates - first), start + share * (seconds - start)
        return None


@dataclass(frozen=True)
class MeasuredRow:
    """A row of a table with all its runs that have ended.

    warmup   synchronous updates before the late ones, or the methods before as text
    """

    name: str
    title: str
    optimizer: str
    method: str
    K: int
    M: int
    corrector: str | None
    batch_size: int
    baseline: str | None
    runs: tuple[FinishedRun, ...]
    diverged: int = 0
    warmup: int | str | None = None

    @property
    def recommended(self) -> bool:
        """Whether it has the recommended corrector, which is none for some optimizers."""
        return self.corrector == RECOMMENDED or (self.corrector is None and self.optimizer in CORRECTORS)

    @property
    def apart_from_rate(self) -> tuple[object, ...]:
        """What rows have in common that differ in the learning rate alone."""
        return self.K, self.optimizer, self.method, self.M, self.corrector, self.warmup

    @property
    def start(self) -> str:
        """Its synchronous start in words; empty if there is none."""
        if isinstance(self.warmup, str):
            return f"first `{self.warmup}`"
        return f"first {self.warmup} updates synchronous" if self.warmup else ""

    @property
    def start_of_auto(self) -> int:
        """Synchronous updates that method `auto` has in a run of this length, if it has any."""
        known = [run.updates[-1] for run in self.runs if run.updates]
        return min([SYNCHRONOUS, *(updates // ONE_IN for updates in known)])

    @property
    def from_start_of_auto(self) -> float:
        """How many updates shorter or longer its synchronous start is than that."""
        return abs(self.warmup - self.start_of_auto) if isinstance(self.warmup, int) else inf

    @property
    def values(self) -> list[float]:
        return [run.value for run in self.runs]

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    @property
    def staleness(self) -> float:
        return median(run.staleness for run in self.runs)

    def above(self, other: MeasuredRow) -> float:
        """How far its value is above the other's: the median over the seeds that both have, which begin with the same
        weights and see the same batches; the difference of the medians where there is no such seed.

        >>> def row(*values): return MeasuredRow("r", "", "sgd", "bp", 1, 1, None, 8, None, tuple(
        ...     FinishedRun(seed, value, value, (), (), (), 0.0) for seed, value in values))
        >>> row((0, 1.5), (1, 2.5)).above(row((0, 1.0), (1, 2.25), (2, 9.0))), row((3, 1.5)).above(row((0, 1.0)))
        (0.375, 0.5)
        """
        others = {run.seed: run.value for run in other.runs}
        found = [run.value - others[run.seed] for run in self.runs if run.seed in others]
        return median(found) if found else self.value - other.value

    def shown(self, digits: int) -> str:
        """Median (lowest-highest)."""
        return ranged(self.values, digits)


def lowest(rows: Iterable[MeasuredRow]) -> MeasuredRow | None:
    """The row with the lowest value, each compared with the others over the seeds that both have: the medians of
    different seeds differ by their seeds, too.

    >>> def row(name, *values): return MeasuredRow(name, "", "sgd", "bp", 1, 1, None, 8, None, tuple(
    ...     FinishedRun(seed, value, value, (), (), (), 0.0) for seed, value in values))
    >>> lowest([row("one seed", (0, 1.5)), row("three", (0, 1.25), (1, 2.5), (2, 1.75))]).name
    'three'
    """
    best: MeasuredRow | None = None
    for row in rows:
        best = row if best is None or row.above(best) < 0 else best
    return best


@dataclass(frozen=True)
class MeasuredTable:
    """The rows of records that can be compared: the same table, data and number of updates.

    slug      its part of the names of files
    records   their names
    """

    slug: str
    title: str
    records: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]

    @property
    def stages(self) -> list[int]:
        """The values of K that rows with late gradients have."""
        return sorted({row.K for row in self.rows if row.staleness > 0})

    @property
    def optimizers(self) -> list[str]:
        return list(dict.fromkeys(row.optimizer for row in self.rows))

    def row(self, name: str | None) -> MeasuredRow | None:
        return next((row for row in self.rows if row.name == name), None)

    def late(
        self, K: int, optimizer: str | None = None, *, corrected: bool | None = None, warmup: bool = False
    ) -> list[MeasuredRow]:
        """The rows with late gradients, by staleness: with the recommended corrector, without any, or all; those that
        are late from the start, or those with a synchronous start."""
        found = [row for row in self.rows if row.K == K and row.staleness > 0 and bool(row.warmup) == warmup]
        found = [row for row in found if optimizer is None or row.optimizer == optimizer]
        if corrected is not None:
            found = [row for row in found if (row.recommended if corrected else row.corrector is None)]
        return sorted(found, key=lambda row: (row.staleness, row.method, row.M))

    def at_best_rates(
        self, K: int, optimizer: str | None = None, *, corrected: bool | None = None, warmup: bool = False
    ) -> list[MeasuredRow]:
        """The same: of rows that differ in the synchronous start, those whose start is closest to that of method
        `auto`; of rows that differ in the learning rate, the one with the lowest loss."""
        groups: dict[tuple[object, ...], list[MeasuredRow]] = {}
        for row in self.late(K, optimizer, corrected=corrected, warmup=warmup):
            groups.setdefault((row.optimizer, row.method, row.M, row.corrector), []).append(row)
        found = []
        for rows in groups.values():
            closest = min(row.from_start_of_auto for row in rows)
            best = lowest(row for row in rows if row.from_start_of_auto == closest)
            found += [best] if best else []
        return found

    def recommended(self, K: int, optimizer: str | None = None) -> list[MeasuredRow]:
        """The rows with the recommended corrector, by M: after a synchronous start where `auto` has one and it was
        measured."""
        found: dict[tuple[str, str, int], MeasuredRow] = {}
        for warmup in (False, True):
            for row in self.at_best_rates(K, optimizer, corrected=True, warmup=warmup):
                if not warmup or row.staleness > LATE:
                    found[row.optimizer, row.method, row.M] = row
        return sorted(found.values(), key=lambda row: row.M)

    def without_warmup(self, row: MeasuredRow) -> MeasuredRow | None:
        """The row that differs from this one, which has a synchronous start, in that alone."""
        same = replace(row, warmup=None).apart_from_rate
        found = (other for other in self.late(row.K) if other.apart_from_rate == same)
        return next((other for other in found if other.baseline == row.baseline), None)

    def bps(self, K: int, optimizer: str) -> list[MeasuredRow]:
        """BP at the learning rates of the late rows, or at its best one if no late row names it."""
        named = {row.baseline for row in self.late(K, optimizer)}
        best = self.best_bp(K, optimizer)
        return [row for row in self.rows if row.name in named] or ([best] if best else [])

    def best_bp(self, K: int, optimizer: str) -> MeasuredRow | None:
        """BP at the learning rate with the lowest loss."""
        return lowest(row for row in self.rows if row.K == K and row.optimizer == optimizer and row.method == "bp")

    def remarks(self, row: MeasuredRow, *, recommended: bool = True) -> str:
        """What else than its staleness distinguishes a late row from that BP; of a recommended one also whether the
        synchronous start was not measured that `auto` has."""
        best = self.best_bp(row.K, row.optimizer)
        alike = (other for other in self.rows if other.apart_from_rate == row.apart_from_rate)
        rate = best is not None and best.name not in (other.baseline for other in alike)
        start = recommended and row.staleness > LATE and not row.warmup
        found = ["other rate"] * rate + ["no start"] * start
        return f" ({', '.join(found)})" if found else ""

    def to_bp(self, row: MeasuredRow) -> float | None:
        """The loss minus that of BP with the same optimizer, learning rate and stages."""
        other = self.row(row.baseline)
        return None if other is None else row.above(other)

    def to_best_bp(self, row: MeasuredRow) -> float | None:
        """The loss minus that of BP with the same optimizer and stages at its best learning rate."""
        other = self.best_bp(row.K, row.optimizer)
        return None if other is None else row.above(other)


def _rows(record: Record) -> Iterator[MeasuredRow]:
    """The rows of which a run has ended without diverging."""
    language = task_of(record) is LANGUAGE
    for row in record["rows"]:
        done = [run for run in row["runs"] if run["state"] == "done"]
        settings = {run["seed"]: record["runs"][f"{row['name']}-seed{run['seed']}"] for run in done}
        if not done:
            continue
        first = settings[done[0]["seed"]]
        yield MeasuredRow(
            name=row["name"],
            title=row["title"],
            optimizer=first.get("optimizer", "sgd"),
            method=first["method"],
            K=first["K"],
            M=first["M"],
            corrector=first["corrector"],
            batch_size=first["batch_size"],
            baseline=row.get("baseline"),
            runs=tuple(
                FinishedRun(
                    seed=run["seed"],
                    value=min(run["loss"], *run.get("losses", ())) if language else run["error"],
                    last=run["loss" if language else "error"],
                    losses=tuple(run.get("losses", ())),
                    updates=tuple(settings[run["seed"]].get("updates", ())),
                    seconds=tuple(run["times"]) if "updates" in settings[run["seed"]] else (),
                    staleness=settings[run["seed"]]["staleness"][0],
                )
                for run in done
            ),
            diverged=sum(run["state"] == "diverged" for run in row["runs"]),
            warmup=first.get("staleness_warmup"),
        )


def _joined(records: Sequence[Record]) -> tuple[MeasuredRow, ...]:
    """The rows of all records; those of one name are one row, and a run that two records contain counts once."""
    found: dict[str, MeasuredRow] = {}
    for row in (row for record in records for row in _rows(record)):
        there = found.get(row.name)
        if there is not None:
            new = tuple(run for run in row.runs if run not in there.runs)
            row = replace(row, runs=there.runs + new, diverged=there.diverged + row.diverged)
        found[row.name] = row
    return tuple(found.values())


def language_tables(records: Records) -> list[MeasuredTable]:
    """The records of language models, in tables that can be compared."""
    groups: dict[str, Records] = {}
    for name, record in records.items():
        if task_of(record) is LANGUAGE:
            settings = record["settings"]
            key = [record.get("text"), settings["epochs"], settings.get("batch_per_update")]
            groups.setdefault(json.dumps([record["table"], *key]), {})[name] = record
    found: list[MeasuredTable] = []
    for table in TABLES:
        those = [group for group in groups.values() if next(iter(group.values()))["table"] == table]
        for number, group in enumerate(those, start=1):
            first, rows = next(iter(group.values())), _joined(list(group.values()))
            alike = len({record["title"] for record in group.values()}) == 1
            title = first["title"] if alike else f"{TABLES[table].title}, {updates_of(rows)}"
            slug = table.removesuffix("-staleness") + f"-{number}" * (number > 1)
            found += [MeasuredTable(slug, title, tuple(group), rows)] if rows else []
    return found


def updates_of(rows: Sequence[MeasuredRow]) -> str:
    """The updates of the runs, in words."""
    most = {run.updates[-1] for row in rows for run in row.runs if run.updates}
    return " or ".join(f"{count:,}" for count in sorted(most)) + " updates" if most else "all runs"


@dataclass(frozen=True, eq=False)
class ImageExperiment:
    """A network on images, with the length at which its rows are compared.

    aims   points of error above BP with the same M, by K
    """

    slug: str
    network: str
    data: str
    table: str
    epochs: int
    aims: Mapping[int, float]

    def table_of(self, records: Records) -> MeasuredTable:
        """Its rows in the records of that table and length; none if there are no such records."""
        those = {
            name: record
            for name, record in records.items()
            if record["table"] == self.table
            and record["settings"]["epochs"] == self.epochs
            and self.data in record["title"]
        }
        begins = f"{self.network.lower().replace('-', '')}-"
        rows = tuple(row for row in _joined(list(those.values())) if row.name.startswith(begins))
        return MeasuredTable(self.slug, f"{self.network} on {self.data}, {self.epochs} epochs", tuple(those), rows)


IMAGES = (
    ImageExperiment("cifar10", "ResNet-56", "CIFAR-10", "cifar10-table", EPOCHS, {8: 0.1, 28: 0.1}),
    ImageExperiment("imagenette", "ResNet-18", "Imagenette", "imagenet-table", 40, {8: 0.5}),
)
