"""A reproduction as a table: the paper's value beside what our runs recorded, and what is still missing.

paper        test error % at the last epoch, median of 3 runs; div. where training diverged
ours         the median over the finished seeds; lowest, highest, and how many there are
difference   ours - paper
samples/s    the median over the seeds of each run's own median epoch

A table of language models has the validation loss instead of errors, in nats per token and as bits per byte, and its
difference to the row of BP with which a row is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table as Grid

from offbeat.errors import UserError
from offbeat.report.formatting import counted, document
from offbeat.runs.recipe import Recipe, load, make_recipe
from offbeat.runs.record import lines
from offbeat.runs.tables import Images, Paper, Table, TableRow
from offbeat.runs.task import CLASSIFICATION, LANGUAGE, LearningTask, task_named

OTHERS = "on other images"  # in a title


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One seed of a row, as far as it is.

    state   "done", "diverged" or "failed" (with a reason), "under way" (it can continue), "missing"
    """

    seed: int
    state: str
    epochs: int = 0  # that are complete
    error: float | None = None
    top5: float | None = None
    loss: float | None = None  # of the test samples
    samples_per_second: float | None = None
    together: int = 1  # most runs that took turns in its process
    reason: str | None = None
    errors: list[float] = field(default_factory=list)  # test error, or another metric, after each epoch
    losses: list[float] = field(default_factory=list)  # of the test samples after each epoch
    times: list[float] = field(default_factory=list)  # seconds of training until then

    @property
    def over(self) -> bool:
        """Whether it need not be run again."""
        return self.state in ("done", "diverged")


def read_seed_run(path: Path, seed: int, *, task: LearningTask = CLASSIFICATION) -> SeedRun:
    """One seed of a row, from the records of its run folder; errors and speed are those of the task."""
    record = lines(path)
    epochs = [line for line in record if line["kind"] == "epoch"]
    ends = [line for line in record if line["kind"] in ("result", "failed", "resumed")]
    found: dict[str, Any] = {
        "epochs": epochs[-1]["epoch"] + 1 if epochs else 0,
        "errors": [line[f"test_{task.key}"] for line in epochs],
        "losses": [line["test_loss"] for line in epochs],
        "times": list(accumulate(line["seconds"] for line in epochs)),
        "together": max((line["runs"] for line in record if line["kind"] == "together"), default=1),
    }
    last: dict[str, Any] = ends[-1] if ends else {"kind": "nothing"}
    if last["kind"] == "result" and not isfinite(last["loss"]):
        return SeedRun(seed=seed, state="diverged", reason=f"the test loss is {last['loss']} at the end", **found)
    if last["kind"] == "result":
        values = {name: last[key] for name, key in (("error", task.key), ("top5", "top5"), ("loss", "loss"))}
        values["samples_per_second"] = task.speed(last)
        return SeedRun(seed=seed, state="done", **values, **found)
    if last["kind"] == "failed":
        state = "diverged" if last.get("diverged") else "failed"
        return SeedRun(seed=seed, state=state, reason=last["reason"], **found)
    ended = epochs and found["epochs"] == _epochs(path) and isfinite(epochs[-1]["test_loss"])
    if ended:  # stopped after the last of them, before the result was written
        speeds = [task.speed(line) for line in epochs]
        values = {
            "error": epochs[-1][f"test_{task.key}"],
            "top5": epochs[-1]["test_top5"],
            "loss": epochs[-1]["test_loss"],
            "samples_per_second": median(speeds[1:] or speeds),
        }
        return SeedRun(seed=seed, state="done", **values, **found)
    return SeedRun(seed=seed, state="under way" if (path / "config.json").exists() else "missing", **found)


def _epochs(path: Path) -> int | None:
    """The epochs for which the run in the folder trains."""
    try:
        number: int = json.loads((path / "config.json").read_text())["recipe"]["epochs"]
        return number
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """A row over its seeds; figures are of the runs that are done, None where none is.

    loss, baseline   of language models: the validation loss in nats per token, and the row that it is compared with
    difference       of the error to the paper's, or of the loss to that of the baseline
    """

    name: str
    title: str
    paper: Paper | None
    place: str  # of the row in the paper, also where its value is left out
    setting: str
    error: float | None
    error_range: tuple[float, float] | None
    top5: float | None
    n: int
    difference: float | None
    samples_per_second: float | None
    runs: list[SeedRun]
    loss: float | None = None
    loss_range: tuple[float, float] | None = None
    baseline: str | None = None

    @property
    def curves(self) -> list[list[float]]:
        return [run.errors for run in self.runs if run.errors]

    @property
    def times(self) -> list[list[float]]:
        return [run.times for run in self.runs if run.errors]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """All rows, and what must be known to read them."""

    table: str
    title: str
    settings: dict[str, Any]
    top5: bool
    rows: list[RowResult]
    notes: list[str]
    provenance: dict[str, Any]
    task: str = CLASSIFICATION.name

    @property
    def learning_task(self) -> LearningTask:
        return task_named(self.task)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count(self, *states: str) -> int:
        return sum(run.state in states for row in self.rows for run in row.runs)


def run_name(row: str, seed: int) -> str:
    return f"{row}-seed{seed}"


def read(
    folder: Path,
    table: Table,
    recipes: dict[str, Recipe],
    seeds: Mapping[str, Iterable[int]],
    settings: dict[str, Any],
    provenance: dict[str, Any],
    images: Images | None = None,
) -> Reproduction:
    """The rows asked for, each with its `seeds`, and others of which the folder has runs.

    The paper's values are beside ours unless these were trained on other images.
    """
    rows, task = [], table.task
    others = images if table.images and images and not table.images.alike(images) else None
    for row in table.rows:
        there = {int(path.name.rpartition("-seed")[2]) for path in (folder / "runs").glob(f"{row.name}-seed[0-9]*")}
        wanted = set(seeds.get(row.name, ()))
        paths = {seed: folder / "runs" / run_name(row.name, seed) for seed in sorted(wanted | there)}
        if runs := [read_seed_run(path, seed, task=task) for seed, path in paths.items()]:
            recipe = recipes.get(row.name) or _recipe(paths[runs[0].seed])
            compared = not others and not is_changed(recipe, settings)
            rows.append(_result(row, recipe, runs, compared=compared))
    rows = _to_baselines(rows) if task is LANGUAGE else rows
    epochs = settings["epochs"]
    title = f"{table.title}, {OTHERS}" if others else table.title
    title = f"{title}, {counted(epochs, 'epoch')}" if epochs else title
    return Reproduction(
        table=table.name,
        title=title,
        settings=settings,
        top5=table.top5,
        rows=rows,
        notes=[
            *_notes(table, rows, settings, others),
            *_changed(table, settings.get("method"), settings.get("batch_per_update")),
        ],
        provenance=provenance,
        task=task.name,
    )


def _to_baselines(rows: list[RowResult]) -> list[RowResult]:
    """The rows with the difference of their loss to that of the rows that they are compared with."""
    losses = {row.name: row.loss for row in rows}

    def difference(row: RowResult) -> float | None:
        other = losses.get(row.baseline or "")
        return None if row.loss is None or other is None else row.loss - other

    return [replace(row, difference=difference(row)) for row in rows]


def _changed(table: Table, method: str | None, per_update: int | None) -> Iterator[str]:
    left_out = ": the paper's values, which are for those, are left out" if any(row.paper for row in table.rows) else ""
    if method:
        yield f"settings {method} instead of those of the rows{left_out}"
    if per_update:
        yield f"{per_update} samples per update instead of those of the rows{left_out}"


def _recipe(path: Path) -> Recipe | None:
    """The recipe with which a run of another invocation began."""
    try:
        return make_recipe(**load(path / "config.json"))
    except UserError:
        return None


def _result(row: TableRow, recipe: Recipe | None, runs: list[SeedRun], *, compared: bool) -> RowResult:
    done = [run for run in runs if run.state == "done"]
    errors = [run.error for run in done if run.error is not None]
    tops = [run.top5 for run in done if run.top5 is not None]
    losses = [run.loss for run in done if run.loss is not None]
    middle = median(errors) if errors else None
    paper = row.paper.error if row.paper and compared else None
    return RowResult(
        name=row.name,
        title=row.title,
        paper=row.paper if compared else None,
        place=row.paper.place if row.paper else "(ours)",
        setting=setting(recipe) if recipe else "",
        error=middle,
        error_range=(min(errors), max(errors)) if errors else None,
        top5=median(tops) if tops else None,
        n=len(errors),
        difference=None if middle is None or paper is None else middle - paper,
        samples_per_second=median(run.samples_per_second or 0.0 for run in done) if done else None,
        runs=runs,
        loss=median(losses) if losses else None,
        loss_range=(min(losses), max(losses)) if losses else None,
        baseline=row.baseline,
    )


def is_changed(recipe: Recipe | None, settings: dict[str, Any]) -> bool:
    """Whether the samples per update or settings of the method that are given take the place of the row's own, so that
    the paper's value is of something else."""
    method = settings.get("method")
    named = method is not None and recipe is not None and recipe.method == method.partition(":")[0]
    return named or bool(settings.get("batch_per_update"))


def setting(recipe: Recipe) -> str:
    """The settings in which the recipes of rows differ."""
    per_update = f", {recipe.batch_per_update} per update" if recipe.batch_per_update else ""
    return f"K={recipe.K}, M={recipe.M}, b={recipe.batch_size}{per_update}, lr={recipe.lr:g}"


def _notes(table: Table, rows: list[RowResult], settings: dict[str, Any], others: Images | None) -> Iterable[str]:
    epochs = settings["epochs"]
    published = any(row.paper for row in table.rows)
    medians = "" if others else "; the paper's are medians of 3 runs"
    if table.task is LANGUAGE:
        yield "loss: validation loss at the last epoch in nats per token, median over the seeds; lower is better"
        yield "bits per byte: the same loss in bits, per byte of the text"
        yield "to BP: loss minus that of BP with the same optimizer and stages, so with the same clipping"
        first = table.rows[0].recipe(batch_per_update=settings.get("batch_per_update"))
        per_update = first.samples_per_update
        if first.samples:
            yield f"an epoch has {first.samples // per_update} updates of {per_update} samples"
    else:
        yield f"error: test error in % at the last epoch, median over the seeds{medians}"
    if others:
        yield f"trained on {others}; the paper's values are for {table.images} and are left out"
    usual = next(iter(table.rows)).recipe().epochs
    if epochs is not None and epochs != usual:
        longer = ": the paper trained longer" if epochs < usual and published and not others else ""
        yield f"{counted(epochs, 'epoch')} instead of {usual}{longer}"
    remarks: dict[str, list[str]] = {}
    for row in rows:
        if row.paper and row.paper.remark:
            remarks.setdefault(row.paper.remark, []).append(row.name)
    for remark, names in remarks.items():
        yield f"{', '.join(names)}: {remark}"
    most = max((run.together for row in rows for run in row.runs), default=1)
    if most > 1:
        yield f"up to {most} runs took turns in one process: samples/s and times are those of one run among them"
    for row in rows:
        for run in row.runs:
            if run.reason:
                yield f"{row.name}, seed {run.seed}: {run.state} in epoch {run.epochs + 1} ({run.reason})"


# ---- text


def lines_of(reproduction: Reproduction, *, short: bool = False) -> list[dict[str, str]]:
    """The figures of all rows as text, by column; short: for a terminal, with the range beside the median."""
    return [_cells(row, reproduction.learning_task, top5=reproduction.top5, short=short) for row in reproduction.rows]


def _cells(row: RowResult, task: LearningTask, *, top5: bool, short: bool) -> dict[str, str]:
    def shown(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else f"{value:{form}}"

    text = task is LANGUAGE
    value, ends, form = (row.loss, row.loss_range, ".3f") if text else (row.error, row.error_range, ".2f")
    diverged = value is None and any(run.state == "diverged" for run in row.runs)
    middle = "div." if diverged else shown(value, form)
    lowest, highest = (shown(end, form) for end in ends or (None, None))
    if short and row.n > 1:
        middle += f" ({lowest}-{highest})"
    spread = {} if short else {"lowest": lowest, "highest": highest}
    speed, state = shown(row.samples_per_second, ",.0f"), _state(row.runs)
    if text:
        return {
            "row": row.name,
            "loss": middle,
            **spread,
            "n": str(row.n),
            "to BP": shown(row.difference, "+.3f"),
            task.heading: shown(row.error, f".{task.digits}f"),
            task.speed_unit: speed,
            "state": state,
        }
    tops = {"paper top-5": shown(row.paper.top5 if row.paper else None), "ours top-5": shown(row.top5)}
    return {
        "row": row.name,
        "paper": "-" if row.paper is None else "div." if row.paper.error is None else f"{row.paper.error:.2f}",
        "ours": middle,
        **spread,
        "n": str(row.n),
        "diff." if short else "difference": shown(row.difference, "+.2f"),
        **(tops if top5 else {}),
        "samples/s": speed,
        "state": state,
    }


def _state(runs: list[SeedRun]) -> str:
    """The states of the seeds in short.

    >>> under_way = SeedRun(seed=1, state="under way", epochs=20)
    >>> _state([SeedRun(seed=0, state="done"), under_way, SeedRun(seed=2, state="missing")])
    '1 done, 1 at epoch 20, 1 missing'
    """
    if all(run.state == "done" for run in runs):
        return "done"
    words = []
    for state in ("done", "diverged", "failed"):
        count = sum(run.state == state for run in runs)
        words += [f"{count} {state}"] if count else []
    words += [f"1 at epoch {run.epochs}" for run in runs if run.state == "under way"]
    missing = sum(run.state == "missing" for run in runs)
    return ", ".join(words + ([f"{missing} missing"] if missing else []))


def grid(reproduction: Reproduction) -> Grid:
    """For a terminal: the range is beside the median."""
    rows = lines_of(reproduction, short=True)
    made = Grid(title=reproduction.title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for name in rows[0]:
        left = name in ("row", "state")
        heading = name.replace(" top-5", "\ntop-5")
        made.add_column(heading, justify="left" if left else "right", no_wrap=name != "state", overflow="fold")
    for row in rows:
        made.add_row(*row.values())
    return made


def markdown(reproduction: Reproduction) -> str:
    """The same for documents, with each row's setting and the place of the paper's value."""
    rows = [
        {
            **line,
            "setting": row.setting,
            **({} if reproduction.learning_task is LANGUAGE else {"in the paper": row.place}),
        }
        for line, row in zip(lines_of(reproduction), reproduction.rows, strict=True)
    ]
    head = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines = [f"| {' | '.join(row.values())} |" for row in rows]
    return document(reproduction.title, [*head, *lines], reproduction.notes, reproduction.provenance)
