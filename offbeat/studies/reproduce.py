"""`offbeat reproduce`: the rows of a published table, the most important first, in pieces of any length.

    DIR/reproduction.json        the request, and every invocation
    DIR/runs/ROW-seedN/          a run like any other, with one drained checkpoint until it is done
    DIR/results.json, table.md   the paper's values beside ours
    DIR/curves.png, .svg         test error (of text: bits per byte) against the epoch;  curves-time.*: against the time

DIR holds no path of this machine, so it can be copied to another one and continue there, bit for bit; the folder of
the data is given each time. Checkpoints are at fixed epochs of the recipe, so a run is the same however often it is
stopped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offbeat.errors import UserError, first_line, unknown
from offbeat.methods import parsed
from offbeat.report import draw_curves
from offbeat.report.draw import draw_if_possible
from offbeat.report.formatting import aligned, counted
from offbeat.report.reproduction import Reproduction, grid, is_changed, markdown, read, setting
from offbeat.runs import launch, lock, record
from offbeat.runs import tables as recipes
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import Recipe
from offbeat.runs.tables import Images, Paper, Table, TableRow
from offbeat.studies.runner import StudyRunner
from offbeat.studies.training import StudyRun, TrainingRuns, is_done, print_table, shared_data

if TYPE_CHECKING:
    from offbeat.data import DataSet

ASKED = "reproduction.json"
MOST_RUNS = 1000  # of a row, or at the same time
STAGES = 8  # into which a network without lag is cut on one GPU
REPORTS_PER_EPOCH = 2  # training lines in the records: a folder that is copied between machines stays small


@dataclass(frozen=True, kw_only=True)
class ReproductionRequest:
    """The options of `offbeat reproduce`; `running` are settings of the recipe that change how it runs, not what."""

    table: str
    only: str | None = None
    method: str | None = None  # with settings, as text
    epochs: int | None = None
    batch_per_update: int | None = None
    seeds: int = 3
    first_seed: int = 0
    minutes: float | None = None
    together: int = 1
    data: Path | None = None
    out: Path | None = None
    running: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Of all runs."""
        return self.out or Path("runs") / self.table

    @property
    def data_folder(self) -> str | None:
        return None if self.data is None else str(self.data.absolute())

    @property
    def seeds_trained(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def command(self) -> list[str]:
        """The command without paths of this machine."""
        words = ["offbeat", "reproduce", self.table]
        given = {
            "only": self.only,
            "method": self.method,
            "epochs": self.epochs,
            "batch-per-update": self.batch_per_update,
            "seeds": self.seeds,
            "first-seed": self.first_seed or None,
            "budget-minutes": self.minutes,
            "side-by-side": self.together if self.together > 1 else None,
            **{name.replace("_", "-"): value for name, value in self.running.items()},
        }
        for name, value in given.items():
            if value is not None and value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", f"{value}"]
        return [*words, *(["--data", "DATA"] if self.data else []), "--out", "DIR"]


# ---- rows and settings


def rows_of(request: ReproductionRequest) -> tuple[Table, list[TableRow]]:
    """The table, and those of its rows that `only` names and that `method` trains."""
    if request.table not in recipes.TABLES:
        raise unknown("table", request.table, recipes.TABLES)
    table, rows = _named_rows(recipes.TABLES[request.table], request)
    if request.method is None:
        return table, rows
    wanted, trained = parsed(request.method)[0], {row.name: row.recipe().method for row in rows}
    if wanted not in trained.values():
        there = ", ".join(dict.fromkeys(trained.values()))
        raise UserError(f"method={request.method!r}: no selected row trains by {wanted}: use one of {there}")
    return table, [row for row in rows if trained[row.name] == wanted]


def _named_rows(table: Table, request: ReproductionRequest) -> tuple[Table, list[TableRow]]:
    if request.only is None:
        return table, list(table.rows)
    wanted = [text.strip() for text in request.only.split(",") if text.strip()]
    for text in wanted or [request.only]:
        if not any(_matches(row.name, text, table) for row in table.rows):
            raise _no_row(text, table)
    return table, [row for row in table.rows if any(_matches(row.name, text, table) for text in wanted)]


def _matches(name: str, text: str, table: Table) -> bool:
    """By its whole name, if there is such a row; else by how it begins, or by a pattern."""
    if any(row.name == text for row in table.rows):
        return name == text
    return name.startswith(f"{text}-") or fnmatchcase(name, text)


def _no_row(text: str, table: Table) -> UserError:
    parts = [row.name.split("-") for row in table.rows]
    names = dict.fromkeys("-".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
    nearest = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    listed = f"'offbeat reproduce {table.name} --list'"
    hint = f"did you mean {nearest[0]!r}? (see {listed})" if nearest else f"see {listed}"
    return UserError(f"only={text!r}: no row of {table.name} has this name: {hint}")


def check(request: ReproductionRequest) -> None:
    """Check what can be checked without the data."""
    for name, number in (("seeds", request.seeds), ("together", request.together)):
        if not 1 <= number <= MOST_RUNS:
            raise UserError(f"{name}={number}: use a whole number from 1 to {MOST_RUNS}")
    if not 0 <= request.first_seed <= MOST_RUNS:
        raise UserError(f"first_seed={request.first_seed}: use a whole number from 0 to {MOST_RUNS}")
    if request.minutes is not None and not 0 < request.minutes < float("inf"):
        raise UserError(f"minutes={request.minutes:g}: use a finite number above 0, or leave it out for no limit")
    if launch.joined_group():
        raise UserError("reproduce under torchrun: it starts its own processes, run it without")


def settings_of(request: ReproductionRequest, table: Table, there: dict[str, Any] | None) -> dict[str, Any]:
    """What all runs of the folder share. Settings that are not given are kept; those given must not differ."""
    given = asked(request)
    if there is None:
        of_any_row = {**given, "batch_per_update": None}  # which a row that is not run may be unable to split
        first = recipe_of(table.rows[0], 0, of_any_row)
        if request.together > 1 and "engine" not in given and default_engine(table, of_any_row) == "processes":
            given["engine"] = "simulate"  # runs take turns in one process
        return {**given, "epochs": first.epochs}
    for name, value in given.items():
        if value is not None and there.get(name) != json.loads(json.dumps(value)):
            was = "default" if there.get(name) is None else there[name]
            raise UserError(
                f"{request.folder} holds a reproduction with {name} = {was}, not {value}: leave it "
                "out to continue with that, or give another folder as out="
            )
    return there


def asked(request: ReproductionRequest) -> dict[str, Any]:
    """The settings of all runs that the request gives; a method replaces those of the rows if it has settings."""
    method = {"method": request.method} if request.method and ":" in request.method else {}
    per_update = {"batch_per_update": request.batch_per_update} if request.batch_per_update is not None else {}
    return {"epochs": request.epochs, **per_update, **method, **request.running}


def default_engine(table: Table, given: dict[str, Any]) -> str:
    """The engine that runs of several stages have by default."""
    return next((made.engine for row in table.rows if (made := recipe_of(row, 0, given)).K > 1), "")


def recipe_of(row: TableRow, seed: int, settings: dict[str, Any]) -> Recipe:
    """The recipe of a run. One stage needs no processes; on a GPU it is recorded as CUDA graphs like other rows, and
    rows whose methods cannot be recorded are simulated."""
    others = {name: value for name, value in settings.items() if name != "engine"}
    try:
        made, engine = row.recipe(seed=seed, **others), settings.get("engine")
    except UserError as error:
        raise UserError(f"row {row.name}: {error}") from None
    if made.device == "cuda" and engine in (None, "streams"):
        engine = None if made.make_method().why_not_capturable() else "streams"
    elif made.K == 1 and engine == "processes":
        engine = None
    return row.recipe(seed=seed, **others, **({"engine": engine} if engine else {}))


# ---- the folder


def stored(folder: Path) -> dict[str, Any] | None:
    """The folder's reproduction.json: table, settings, images, invocations; None where there is none."""
    path = folder / ASKED
    try:
        content = json.loads(path.read_text()) if path.exists() else None
        if content is None:
            return None
        images = content.get("images")  # absent in folders of earlier versions, as is the text
        return {
            "table": content["table"],
            "settings": dict(content["settings"]),
            "images": images and Images(**images),
            "text": content.get("text"),
            "invocations": list(content["invocations"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): choose another folder") from None


def opened(request: ReproductionRequest, table: Table, folder: Path) -> dict[str, Any]:
    """The content of reproduction.json, new or as stored, with the settings of all runs; nothing is written yet."""
    there = stored(folder)
    if there is None:
        record.check_free(folder)
        settings = settings_of(request, table, None)
        return {"table": table.name, "settings": settings, "images": None, "text": None, "invocations": []}
    if there["table"] != table.name:
        raise UserError(
            f"{folder} holds a reproduction of {there['table']}, not of {table.name}: give another folder as out="
        )
    return {**there, "settings": settings_of(request, table, there["settings"])}


def content_text(content: dict[str, Any]) -> str:
    """The text of reproduction.json."""
    return json.dumps({**content, "images": content["images"] and asdict(content["images"])}, indent=2) + "\n"


def same_images(table: Table, data_set: DataSet, there: Images | None, folder: Path) -> Images | None:
    """The images of the folder's runs, for a table that takes any; UserError unless they are those of earlier runs."""
    if table.images is None:
        return None
    here = Images(data_set.classes, data_set.train_samples, data_set.test_samples)
    if there is not None and there != here:
        raise UserError(f"data= holds {here}, but the runs in {folder} have {there}: give theirs, or another out=")
    return here


def same_text(data_set: DataSet, there: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """What identifies the text of the folder's runs; UserError unless it is that of earlier runs; None for images."""
    from offbeat.data.text import Text

    if not isinstance(data_set, Text):
        return None
    here = data_set.as_record()
    if there is not None and there != here:
        raise UserError(
            f"data= has another text than the runs in {folder} ({here['tokens']:,} tokens instead of "
            f"{there['tokens']:,}, or others): give theirs, or another folder as out="
        )
    return here


def open_data(request: ReproductionRequest, recipe: Recipe) -> DataSet:
    """The data of all runs, in the folder of the request or of the environment variable for this data."""
    from offbeat import data
    from offbeat.runs import build

    layout = data.KINDS[recipe.data].layout
    if layout and request.data is None and build.default_data_dir(recipe.data) is None:
        raise UserError(f"{request.table} needs data=, the folder that holds {layout}")
    if request.data is not None and "folder" not in data.KINDS[recipe.data].takes:
        raise UserError(f"data={str(request.data)!r}: {recipe.data} takes no folder, leave it out")
    return shared_data(recipe, folder=request.data_folder)


def in_stages(recipe: Recipe) -> Recipe:
    """The recipe as it is run: on streams of a GPU a network without lag is cut as well, so that the batches of a
    window run at the same time (see graphs/windows.py), with the same results."""
    alone = recipe.K == 1 and recipe.M > 1 and recipe.engine == "streams"
    if not alone or recipe.clip_norm or recipe.make_method().lag(1, 1):  # gradients are clipped stage by stage
        return recipe
    import torch

    from offbeat import models

    with torch.device("meta"):
        long_enough = models.describe(recipe.model).units >= STAGES
    return replace(recipe, K=STAGES, cuts=None, units=None) if long_enough else recipe


# ---- running


def reproduce(request: ReproductionRequest, *, show: bool) -> tuple[Reproduction, Path]:
    """Run what is not done, as far as the budget goes; then write the table of all that there is."""
    check(request)
    table, rows = rows_of(request)
    runner = StudyRunner(request.folder, request.minutes, show)
    with lock.held(runner.folder):
        study = Reproducing.of(request, table, rows, runner)
        with runner.opened(study.write_table):
            study.train()
        return study.write_table(), runner.folder


@dataclass(frozen=True)
class Reproducing:
    """The runs of one invocation, and the table of all that the folder holds."""

    request: ReproductionRequest
    runner: StudyRunner
    table: Table
    recipes: dict[str, Recipe]  # of the rows asked for
    runs: list[StudyRun]
    todo: list[StudyRun]
    content: dict[str, Any]  # of reproduction.json
    data_set: DataSet | None

    @classmethod
    def of(cls, request: ReproductionRequest, table: Table, rows: list[TableRow], runner: StudyRunner) -> Reproducing:
        """Everything is checked before the first file is written."""
        folder = runner.folder
        content = opened(request, table, folder)
        settings = content["settings"]
        recipes = {row.name: recipe_of(row, 0, settings) for row in rows}
        runs = [
            StudyRun(row.name, seed, recipe_of(row, seed, settings), row.title)
            for row, seed in table.order(request.seeds, request.first_seed)
            if row.name in recipes
        ]
        if request.together > 1 and any(run.recipe.engine == "processes" for run in runs):
            raise UserError(
                f"together={request.together} with engine='processes': runs at the same time need an engine that "
                "keeps all stages in one process, such as engine='simulate'"
            )
        todo = [run for run in runs if not is_done(folder / "runs" / run.name, run)]
        unknown_images = table.images is not None and content["images"] is None and request.data is not None
        data_set = open_data(request, runs[0].recipe) if todo or unknown_images else None
        launch.check_workers(run.recipe for run in todo)
        if data_set is not None:
            content["images"] = same_images(table, data_set, content["images"], folder)
            content["text"] = same_text(data_set, content["text"], folder)
            for run in todo:
                run.recipe.count(data_set.train_samples)
        content["invocations"].append(provenance(request.command, device=settings.get("device")))
        runner.write(ASKED, content_text(content))
        (folder / "runs").mkdir(exist_ok=True)
        return cls(request, runner, table, recipes, runs, todo, content, data_set)

    def train(self) -> None:
        report = self.runner.report
        report(f"{len(self.runs) - len(self.todo)} of {len(self.runs)} runs are done")
        training = TrainingRuns(
            self.runner,
            self.runner.folder / "runs",
            self.request.together,
            self.data_set,
            self.request.data_folder,
            command=self.request.command,
            reports=REPORTS_PER_EPOCH,
            as_executed=lambda recipe: in_stages(recipe),
        )
        training.execute(self.todo)
        stopped = training.out_of_time
        if self.todo and not training.saved and not stopped:
            report(f"the budget of {self.request.minutes:g} minutes ended before a run began: give a larger budget")
        elif stopped and training.saved:
            report(f"stopped by the budget: repeat the command to continue {stopped} run{'s' * (stopped > 1)}")
        elif stopped:
            report(
                f"no run reached a checkpoint within {self.request.minutes:g} minutes, nor would one the next time: "
                "give a larger budget, or run fewer at the same time"
            )

    def write_table(self) -> Reproduction:
        """The table and the curves of the rows so far, also in files."""
        folder, settings = self.runner.folder, self.content["settings"]
        seeds = dict.fromkeys(self.recipes, self.request.seeds_trained)
        provenance = self.content["invocations"][-1]
        found = read(folder, self.table, self.recipes, seeds, settings, provenance, self.content["images"])
        return written(self.runner, found)


# ---- the table


def written(runner: StudyRunner, reproduction: Reproduction) -> Reproduction:
    """The table and the curves in files."""
    folder = runner.folder
    runner.write("results.json", reproduction.as_dict())
    runner.write("table.md", markdown(reproduction))
    curves = {row.name: row.curves for row in reproduction.rows if row.curves}
    times = {row.name: row.times for row in reproduction.rows if row.curves}
    task = reproduction.learning_task
    for name, against in (("curves", None), ("curves-time", times)):
        draw = partial(draw_curves, curves, title=reproduction.title, times=against, task=task)
        draw_if_possible(draw, folder / f"{name}.png", folder / f"{name}.svg")
    return reproduction


def show(reproduction: Reproduction, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(reproduction.as_dict()))
        return
    console = Console(highlight=False)
    counts = {state: reproduction.count(state) for state in ("done", "diverged", "failed", "under way", "missing")}
    console.print(
        ", ".join(f"{count} {state}" for state, count in counts.items() if count),
        "of",
        sum(counts.values()),
        "runs",
        soft_wrap=True,
    )
    print_table(grid(reproduction), reproduction.notes, folder)


def show_rows(request: ReproductionRequest, *, as_json: bool) -> None:
    """Print the rows in the order of their first runs, with their recipes; nothing is read or run."""
    check(request)
    table, rows = rows_of(request)
    given = asked(request)
    first = [(row, recipe_of(row, 0, given)) for row, _ in table.order(1) if row in rows]
    listed = [(row, recipe, None if is_changed(recipe, given) else row.paper) for row, recipe in first]
    if not as_json:
        print(rows_text(table, listed))
        return
    described = [
        {"name": row.name, "title": row.title, "recipe": recipe.as_dict(), "paper": paper and vars(paper)}
        for row, recipe, paper in listed
    ]
    print(json.dumps(described))


def rows_text(table: Table, listed: Sequence[tuple[TableRow, Recipe, Paper | None]]) -> str:
    """A line for each row: with the paper's value, or of a table of our own with its corrector."""
    epochs = ", ".join(f"{number} epochs" for number in sorted({recipe.epochs for _, recipe, _ in listed}))
    samples = {recipe.batch_per_update for _, recipe, _ in listed}
    same = f", {samples.pop()} samples per update" if len(samples) == 1 and None not in samples else ""
    published = any(row.paper for row in table.rows)
    lines = [["row", "K", "M", "b", "lr", *(("paper", "where") if published else ("corrector",))]]
    for row, recipe, paper in listed:
        value = "-" if paper is None else "diverges" if paper.error is None else f"{paper.error:.2f}"
        value += f" / {paper.top5:.2f}" if paper and paper.top5 else ""
        place = paper.place.partition(",")[0] if paper else "(ours)"
        last = (value, place) if published else (recipe.corrector or "-",)
        lines.append([row.name, str(recipe.K), str(recipe.M), str(recipe.batch_size), f"{recipe.lr:g}", *last])
    title = f"{table.title}, {epochs}{same}, {counted(len(listed), 'row')}, most important first"
    return f"{title}\n\n{aligned(lines, right=(1, 2, 3))}"


def show_ready(request: ReproductionRequest, *, as_json: bool) -> None:
    """Check all that can be checked before training, with the data."""
    from offbeat.runs import build

    check(request)
    table, rows = rows_of(request)
    content = opened(request, table, request.folder)
    settings = content["settings"]
    made = {row.name: recipe_of(row, 0, settings) for row in rows}
    data_set = open_data(request, next(iter(made.values())))
    same_images(table, data_set, content["images"], request.folder)
    same_text(data_set, content["text"], request.folder)
    ready = {name: build.check(recipe, data_set)[0] for name, recipe in made.items()}
    if as_json:
        print(json.dumps({name: recipe.as_dict() for name, recipe in ready.items()}))
        return
    for name, recipe in ready.items():
        print(f"{name}: {recipe.method} {setting(recipe)}, {recipe.engine}, cuts {list(recipe.cuts or ())}")
    runs = f"{counted(len(ready), 'row')}, {counted(len(ready) * request.seeds, 'run')}"
    each = f"{counted(settings['epochs'], 'epoch')} with {counted(request.seeds, 'seed')}"
    print(f"ready: {runs} of {each}, in {request.folder}; nothing was trained")
