"""A comparison of methods as a table: what its runs have recorded, and nothing else. Its columns:

    error          test error % (of text: bits per byte) at the last epoch; the median over the seeds, and their range
    samples/s      (of text: tokens/s) the median over the seeds of each run's own median epoch
    x BP           ratio of these medians, against the first method that keeps all locks
    staleness      measured, per stage, in updates

Runs that failed are in none of the medians; their row states it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from offbeat.report.formatting import counted, document
from offbeat.runs.recipe import Recipe, from_json, make_recipe
from offbeat.runs.record import lines
from offbeat.runs.task import CLASSIFICATION, LearningTask, task_named

ALL_LOCKS = {"forward", "backward", "update"}
SHORT_HEADINGS = {  # of the table in a terminal
    "per update": "per\nupdate",
    "BN batch": "BN\nbatch",
    "peak MB per stage": "peak\nMB",
    "staleness per stage": "stale-\nness",
}
LONGEST_SETTING = 14  # characters that fit beside the other columns in 80
STAGES_IN_FULL = 4  # of more stages, only the first and the last are shown; the JSON has all


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A method over its seeds. Figures are of the runs that finished, None where none did.

    batchnorm_batch   samples that BatchNorm normalises together: the batch, or the mean micro-batch
    memory            peak bytes of each stage, the largest of the runs
    staleness         of each stage; where forwards are replayed it is the age of the input
    jacobian          staleness of the local Jacobian, where it is not that of the input: 0 by construction of replay
    errors            the metric of the task at the last epoch, by seed; error: their median
    curves            the metric after each epoch, one list per seed
    failed            seed -> why there is no result
    """

    label: str
    method: str
    K: int
    M: int
    weights: str
    batch_size: int
    samples_per_update: int
    batchnorm_batch: float
    lr: float
    errors: dict[int, float]
    error: float | None
    error_range: tuple[float, float] | None
    samples_per_second: float | None
    speed_up: float | None = None
    memory: list[int] | None
    staleness: list[float] | None
    jacobian: list[float] | None
    curves: list[list[float]]
    failed: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, what they have in common, and what must be known to read them."""

    title: str
    match: str
    task: str
    baseline: str | None  # the row that speed-ups are over
    notes: list[str]
    rows: list[ComparisonRow]
    provenance: dict[str, Any]

    @property
    def learning_task(self) -> LearningTask:
        return task_named(self.task)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(folder: Path) -> Comparison:
    """The comparison in a folder, as far as its runs are recorded."""
    path = folder / "config.json"
    written = json.loads(path.read_text())
    asked, runs = written["comparison"]["asked"], written["comparison"]["runs"]
    rows: list[ComparisonRow] = []
    recipes: list[Recipe] = []
    for label in dict.fromkeys(run["label"] for run in runs):
        mine = [run for run in runs if run["label"] == label]
        recipes.append(make_recipe(**from_json(mine[0]["recipe"], path)))
        rows.append(_row(label, recipes[-1], {run["seed"]: lines(folder / run["folder"]) for run in mine}))
    baseline = next(
        (
            row
            for row, recipe in zip(rows, recipes, strict=True)
            if set(recipe.make_method().locks) == ALL_LOCKS and row.samples_per_second
        ),
        None,
    )
    jobs = written["comparison"]["jobs"]
    if baseline and baseline.samples_per_second and jobs == 1:  # otherwise other runs use the machine, too
        speed = baseline.samples_per_second
        rows = [replace(row, speed_up=row.samples_per_second and row.samples_per_second / speed) for row in rows]
    return Comparison(
        title=_title(asked, recipes),
        match=asked["match"],
        task=recipes[0].task.name,
        baseline=baseline.label if baseline else None,
        rows=rows,
        notes=list(_notes(asked, jobs, rows, recipes, baseline)),
        provenance=written["provenance"],
    )


def _row(label: str, recipe: Recipe, records: dict[int, list[dict[str, Any]]]) -> ComparisonRow:
    method = recipe.make_method()
    results = {
        seed: line
        for seed, record in records.items()
        for line in record
        if line["kind"] == "result" and isfinite(line["loss"])
    }
    task = recipe.task
    errors = {seed: result[task.key] for seed, result in results.items()}
    ages = _by_stage([result["staleness"] for result in results.values()], median)
    peaks = [
        line["memory"]
        for record in records.values()
        for line in record
        if line["kind"] in ("epoch", "result") and line.get("memory")
    ]
    return ComparisonRow(
        label=label,
        method=recipe.method,
        K=recipe.K,
        M=recipe.M,
        weights=recipe.weights,
        batch_size=recipe.batch_size,
        samples_per_update=recipe.samples_per_update,
        batchnorm_batch=recipe.batch_size / method.m,
        lr=recipe.lr,
        errors=errors,
        error=median(errors.values()) if errors else None,
        error_range=(min(errors.values()), max(errors.values())) if errors else None,
        samples_per_second=median(task.speed(run) for run in results.values()) if results else None,
        memory=_by_stage(peaks, max),
        staleness=ages,
        jacobian=[0.0] * len(ages) if ages and method.weights == "replay" else None,
        curves=[
            [line[f"test_{task.key}"] for line in record if line["kind"] == "epoch"] for record in records.values()
        ],
        failed={seed: _reason(record) for seed, record in records.items() if seed not in results},
    )


def _by_stage(runs: Sequence[Sequence[Any]], how: Any) -> list[Any] | None:
    return [how(stage) for stage in zip(*runs, strict=True)] if runs else None


def _reason(record: list[dict[str, Any]]) -> str:
    last = record[-1] if record else {"kind": "nothing"}
    if last["kind"] == "result":
        return f"the test loss is {last['loss']} at the end: lower the learning rate"
    return str(last["reason"]) if last["kind"] == "failed" else "not finished"


# ---- text


def _title(asked: dict[str, Any], recipes: list[Recipe]) -> str:
    first, seeds = recipes[0], asked["seeds"]
    K = max(recipe.K for recipe in recipes)
    per_update = asked.get("batch_per_update")
    match = f"{per_update} samples per update" if per_update else f"--match {asked['match']}"
    return f"{first.model} on {first.data}, K={K}, {counted(first.epochs, 'epoch')}, {counted(seeds, 'seed')}, {match}"


def _rule(asked: dict[str, Any], recipes: list[Recipe]) -> str:
    """What is the same for all methods, and what is not."""
    per_update = asked.get("batch_per_update") or asked["batch_size"] * asked["M"]
    rates = {recipe.lr for recipe in recipes}
    linear = asked["lr"] is None and recipes[0].optimizer == "sgd"
    rate = "lr = 0.1 b M / 256" if linear else f"lr = {', '.join(f'{rate:g}' for rate in sorted(rates))} for all"
    if asked["match"] == "batch":
        b, named = asked["batch_size"], zip(asked["methods"], recipes, strict=True)
        others = [f"{label} (b = {recipe.batch_size})" for label, recipe in named if recipe.batch_size != b]
        but = f" but {', '.join(others)}" if others else ""  # method auto splits b M samples
        return f"match batch: b = {b} for all{but}, each method at its own M; {rate}"
    return f"match effective: {per_update} samples per update for all, b = {per_update} where M = 1; {rate}"


def _notes(
    asked: dict[str, Any], jobs: int, rows: list[ComparisonRow], recipes: list[Recipe], baseline: ComparisonRow | None
) -> Iterator[str]:
    """What must be known to read the figures."""
    yield _rule(asked, recipes)
    yield "per update: samples per update, b M"
    task = recipes[0].task
    of = "error: test error" if task is CLASSIFICATION else f"{task.heading}: of the test text"
    yield f"{of} at the last epoch, median over the seeds (lowest-highest)"
    if baseline and jobs == 1:
        cut = f" cut into the same {baseline.K} stages" if baseline.K > 1 else ""
        yield f"x BP: ratio of the medians of {task.speed_unit}, over {baseline.label}{cut}"
    if any(row.memory for row in rows):
        yield (
            "peak MB: of each stage, counted, at the fullest: parameters and their versions, gradients, optimizer "
            "state, batches in flight; not the temporaries of an operation"
        )
    if any(row.jacobian for row in rows):
        yield (
            "staleness: of each stage in updates; a/0: age a of the input, and 0 of the local Jacobian, by "
            "construction of replay, which repeats the forward on the current weights"
        )
    elif any(row.staleness for row in rows):
        yield "staleness: of each stage in updates, measured, stage 1 first"
    if len({row.batchnorm_batch for row in rows}) > 1 and task is CLASSIFICATION:
        yield "BN batch: samples that BatchNorm normalises together; it differs, and so do the networks' functions"
    most = max(row.K for row in rows)
    alone = [row.label for row in rows if most > row.K]
    if alone:
        yield f"{', '.join(alone)}: K=1, the whole network in one stage"
    if {recipe.engine for recipe in recipes} == {"simulate"} and most > 1:
        yield (
            f"engine simulate: the stages take turns in one process, so {task.speed_unit} measures their work, not a "
            "speed-up"
        )
    if jobs > 1:
        yield f"{jobs} runs at the same time shared the machine: {task.speed_unit} is only roughly comparable"
    for row in rows:
        for seed, reason in row.failed.items():
            yield f"{row.label}, seed {seed}: no result ({reason})"


def cells(row: ComparisonRow, task: LearningTask = CLASSIFICATION) -> dict[str, str]:
    """The figures of a row as text, by column."""
    total = len(row.errors) + len(row.failed)
    if row.error is None or row.error_range is None:
        error = "failed"
    else:
        lowest, highest = row.error_range
        error = task.cell(row.error)
        error += f" ({task.cell(lowest)}-{task.cell(highest)})" if len(row.errors) > 1 else ""
        error += f" {len(row.failed)} of {total} failed" if row.failed else ""
    ages = [f"{age:.2f}" for age in row.staleness or ()]
    if row.jacobian:
        ages = [f"{age}/{jacobian:g}" for age, jacobian in zip(ages, row.jacobian, strict=True)]
    return {
        "method": row.label,
        "M": str(row.M),
        "per update": str(row.samples_per_update),
        "BN batch": f"{row.batchnorm_batch:g}" if task is CLASSIFICATION else "-",
        task.heading: error,
        task.speed_unit: "-" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}",
        "x BP": "-" if row.speed_up is None else f"{row.speed_up:.2f}",
        "peak MB per stage": _short(
            [f"{peak / 1e6:,.0f}" if peak >= 1e7 else f"{peak / 1e6:.1f}" for peak in row.memory or ()]
        ),
        "staleness per stage": _short(ages),
    }


def _short(stages: list[str]) -> str:
    if not stages:
        return "-"
    return " ".join(stages) if len(stages) <= STAGES_IN_FULL else f"{stages[0]} .. {stages[-1]}"


def filled(comparison: Comparison) -> list[dict[str, str]]:
    """The rows without the columns that no row has a figure for; a note explains BN batches that differ."""
    rows = [cells(row, comparison.learning_task) for row in comparison.rows]
    found = {name: {row[name] for row in rows} for name in rows[0]}
    left_out = {name for name, cells_of in found.items() if cells_of == {"-"}}
    left_out |= {"BN batch"} if len(found["BN batch"]) == 1 else set()
    return [{name: cell for name, cell in row.items() if name not in left_out} for row in rows]


def table(comparison: Comparison) -> Table:
    """For a terminal of 80 columns and more: long names and the figures of stages go over several lines."""
    rows = filled(comparison)
    made = Table(title=comparison.title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    names = [row["method"].replace(":", "\n").replace(",", "\n") for row in rows]  # a setting in each line
    short = max(len(line) for name in names for line in name.split("\n")) <= LONGEST_SETTING
    for name in rows[0]:
        made.add_column(
            SHORT_HEADINGS.get(name, name),
            justify="left" if name == "method" else "right",
            no_wrap=short if name == "method" else not name.endswith("per stage"),
            overflow="fold",
        )
    for name, row in zip(names, rows, strict=True):
        made.add_row(*{**row, "method": name}.values())
    return made


def markdown(comparison: Comparison) -> str:
    """The same for documents."""
    rows = [cells(row, comparison.learning_task) for row in comparison.rows]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row.values())} |" for row in rows]
    head = [f"| {' | '.join(rows[0])} |", f"|---|{'---:|' * (len(rows[0]) - 1)}"]
    return document(comparison.title, [*head, *lines], comparison.notes, comparison.provenance)
