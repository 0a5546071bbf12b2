"""`offbeat reproduce`: the rows of a published table, run by worth in pieces of any length, and the table so far.

    DIR/reproduction.json        what was asked for, and every invocation
    DIR/runs/ROW-seedN/          a run like any other, with one drained checkpoint while it is under way
    DIR/results.json, table.md   the paper's values beside ours
    DIR/curves.png, .svg         test error against the epoch;  curves-time.*: against the time of training

Nothing in DIR names a place, so it can be copied to another machine and go on there, bit for bit; where the data lie is
said each time. Checkpoints stand at fixed epochs of the recipe, so a run is the same however often it is stopped.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offbeat.errors import FolderTaken, Interrupted, NotFinite, UserError, first_line, unknown
from offbeat.methods import parsed
from offbeat.report import draw_curves
from offbeat.report import reproduction as report
from offbeat.report.draw import by_the_way
from offbeat.report.reproduction import Reproduction
from offbeat.runs import launch, lock, record
from offbeat.runs import tables as recipes
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import Recipe, load, make_recipe
from offbeat.runs.tables import Images, Row, Table

if TYPE_CHECKING:
    from offbeat.data import DataSet
    from offbeat.runs.round_robin import Ending
    from offbeat.runs.training_run import TrainingRun

ASKED = "reproduction.json"
MOST_RUNS = 1000  # of a row, or at a time
STAGES = 8  # of a network without lag on one GPU
REPORTS_AN_EPOCH = 2  # lines of training in the records: a folder that is carried around stays small
PLACES = ("cuts", "units", "threads_per_stage", "data_dir", "data_workers")  # decided where a run began, and kept


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for; running holds settings of the recipe that say by what it runs, not what."""

    table: str
    only: str | None
    method: str | None = None  # with settings, as text
    epochs: int | None
    seeds: int
    minutes: float | None
    together: int
    data: Path | None
    out: Path | None
    running: dict[str, Any]

    @property
    def command(self) -> list[str]:
        """The command without the names of places."""
        words = ["offbeat", "reproduce", self.table]
        given = {
            "only": self.only,
            "method": self.method,
            "epochs": self.epochs,
            "seeds": self.seeds,
            "budget-minutes": self.minutes,
            "side-by-side": self.together if self.together > 1 else None,
            **{name.replace("_", "-"): value for name, value in self.running.items()},
        }
        for name, value in given.items():
            if value is not None and value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", f"{value}"]
        return [*words, *(["--data", "DATA"] if self.data else []), "--out", "DIR"]


@dataclass(frozen=True)
class Run:
    """One row with one seed, and the recipe that it has in this reproduction."""

    row: Row
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return report.run_name(self.row.name, self.seed)


# ---- what is asked for


def rows_of(request: Request) -> tuple[Table, list[Row]]:
    """The table, and those of its rows that --only names and that --method trains."""
    if request.table not in recipes.TABLES:
        raise unknown("table", request.table, recipes.TABLES)
    table, rows = _named_rows(recipes.TABLES[request.table], request)
    if request.method is None:
        return table, rows
    wanted, trained = parsed(request.method)[0], {row.name: row.recipe().method for row in rows}
    if wanted not in trained.values():
        there = ", ".join(dict.fromkeys(trained.values()))
        raise UserError(f"--method {request.method}: no row that is asked for trains by {wanted}: use one of {there}")
    return table, [row for row in rows if trained[row.name] == wanted]


def _named_rows(table: Table, request: Request) -> tuple[Table, list[Row]]:
    if request.only is None:
        return table, list(table.rows)
    wanted = [text.strip() for text in request.only.split(",") if text.strip()]
    for text in wanted or [request.only]:
        if not any(_matches(row.name, text, table) for row in table.rows):
            raise _no_row(text, table)
    return table, [row for row in table.rows if any(_matches(row.name, text, table) for text in wanted)]


def _matches(name: str, text: str, table: Table) -> bool:
    """By its whole name, if there is one row of it; else by how it begins, or by a pattern."""
    if any(row.name == text for row in table.rows):
        return name == text
    return name.startswith(f"{text}-") or fnmatchcase(name, text)


def _no_row(text: str, table: Table) -> UserError:
    parts = [row.name.split("-") for row in table.rows]
    names = dict.fromkeys("-".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
    nearest = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UserError(
        f"--only {text}: no row of {table.name} is called so: {hint}(see 'offbeat reproduce {table.name} --list')"
    )


def check(request: Request) -> None:
    """What can be wrong without looking at the data."""
    for name, number in (("seeds", request.seeds), ("side-by-side", request.together)):
        if not 1 <= number <= MOST_RUNS:
            raise UserError(f"--{name} {number}: use a whole number from 1 to {MOST_RUNS}")
    if request.minutes is not None and not 0 < request.minutes < float("inf"):
        raise UserError(f"--budget-minutes {request.minutes:g}: use a number above 0, or leave it out for no end")
    if launch.joined_group():
        raise UserError("reproduce under torchrun: it starts its own processes, run it without")


def settings_of(request: Request, table: Table, there: dict[str, Any] | None) -> dict[str, Any]:
    """What all runs of the folder share. What is not given now stays as it was; what is given must not differ."""
    given = {"epochs": request.epochs, **_asked_method(request), **request.running}
    if there is None:
        first = recipe_of(table.rows[0], 0, given)
        if request.together > 1 and "engine" not in given and default_engine(table, given) == "processes":
            given["engine"] = "simulate"  # turns are taken in one process
        return {**given, "epochs": first.epochs}
    for name, value in given.items():
        if value is not None and there.get(name) != json.loads(json.dumps(value)):
            was = "default" if there.get(name) is None else there[name]
            raise UserError(
                f"{_folder(request)} holds a reproduction with {name} = {was}, not {value}: leave it "
                "out to go on with that, or choose another --out"
            )
    return there


def _asked_method(request: Request) -> dict[str, Any]:
    """The method whose settings take the place of the rows' own, if there are any."""
    return {"method": request.method} if request.method and ":" in request.method else {}


def default_engine(table: Table, given: dict[str, Any]) -> str:
    """The engine that runs of several stages have by default."""
    return next((made.engine for row in table.rows if (made := recipe_of(row, 0, given)).K > 1), "")


def recipe_of(row: Row, seed: int, settings: dict[str, Any]) -> Recipe:
    """The recipe of a run. One stage needs no processes; on a GPU it is recorded as the stages of other rows are, and
    rows of methods that cannot be recorded are simulated."""
    others = {name: value for name, value in settings.items() if name != "engine"}
    made, engine = row.recipe(seed=seed, **others), settings.get("engine")
    if made.device == "cuda" and engine in (None, "streams"):
        engine = None if made.make_method().why_not_capturable() else "streams"
    elif made.K == 1 and engine == "processes":
        engine = None
    return row.recipe(seed=seed, **others, **({"engine": engine} if engine else {}))


def _folder(request: Request) -> Path:
    return request.out or Path("runs") / request.table


# ---- the folder


def stored(folder: Path) -> dict[str, Any] | None:
    """What the folder's reproduction.json says: table, settings, images, invocations; None where there is none."""
    path = folder / ASKED
    try:
        content = json.loads(path.read_text()) if path.exists() else None
        if content is None:
            return None
        images = content.get("images")  # in folders of earlier versions nobody says
        return {
            "table": content["table"],
            "settings": dict(content["settings"]),
            "images": images and Images(**images),
            "invocations": list(content["invocations"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): choose another folder") from None


def opened(request: Request, table: Table, folder: Path) -> dict[str, Any]:
    """The content of reproduction.json, new or as it is, with the settings of all runs; nothing is written yet."""
    there = stored(folder)
    if there is None:
        record.check_free(folder)
        return {"table": table.name, "settings": settings_of(request, table, None), "images": None, "invocations": []}
    if there["table"] != table.name:
        raise UserError(f"{folder} holds a reproduction of {there['table']}, not of {table.name}: choose another --out")
    return {**there, "settings": settings_of(request, table, there["settings"])}


def content_text(content: dict[str, Any]) -> str:
    """Of reproduction.json."""
    return json.dumps({**content, "images": content["images"] and asdict(content["images"])}, indent=2) + "\n"


def same_images(table: Table, data_set: DataSet, there: Images | None, folder: Path) -> Images | None:
    """What the folder's runs train on, where any images can be taken; must be that of the runs before."""
    if table.images is None:
        return None
    here = Images(data_set.classes, data_set.train_samples, data_set.test_samples)
    if there is not None and there != here:
        raise UserError(f"--data holds {here}, but the runs in {folder} have {there}: give theirs, or another --out")
    return here


def _write(path: Path, text: str) -> None:
    try:
        record.write(path, text)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent} ({first_line(error)}): choose another --out") from error


def open_data(request: Request, recipe: Recipe) -> DataSet:
    """The data of all runs, in the folder of the request or of OFFBEAT_DATA_DIR."""
    from offbeat import data
    from offbeat.runs import build

    layout = data.KINDS[recipe.data].layout
    if layout and request.data is None and build.default_data_dir() is None:
        raise UserError(f"{request.table} needs --data DIR: the folder that holds {layout}")
    if request.data is not None and not layout:
        raise UserError(f"--data {request.data}: {recipe.data} takes no folder, leave it out")
    data_set = build.open_data(recipe, folder=data_folder(request))
    build.check(recipe, data_set)
    return build.move_data(recipe, data_set)[0] or data_set  # one for all runs, also on a GPU


def data_folder(request: Request) -> str | None:
    return None if request.data is None else str(request.data.absolute())


def kept_recipe(path: Path, run: Run) -> Recipe:
    """The recipe with which a run in the folder began, which must be that of the row."""
    there = make_recipe(**load(path / "config.json"))
    here = replace(run.recipe, **{name: getattr(there, name) for name in PLACES})
    if there != here:
        was, now = _flat(there), _flat(here)
        changed = next(name for name in {**now, **was} if was.get(name) != now.get(name))
        raise UserError(
            f"{path} was run with another recipe ({changed}: {was.get(changed)} there, {now.get(changed)} "
            "here): move it away to run it anew"
        )
    return there


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe, each setting of its method by itself."""
    values = recipe.as_dict()
    return {**{f"{recipe.method}:{name}": value for name, value in values.pop("settings").items()}, **values}


def in_stages(recipe: Recipe) -> Recipe:
    """The recipe as it is run: on streams of a GPU a network without lag is cut, too, so that the batches of a window
    run at once (see graphs/windows.py), which leaves the numbers as they are."""
    alone = recipe.K == 1 and recipe.M > 1 and recipe.engine == "streams"
    if not alone or recipe.clip_norm or recipe.make_method().lag(1, 1):  # gradients are clipped stage by stage
        return recipe
    import torch

    from offbeat import models

    with torch.device("meta"):
        long_enough = len(models.build(recipe.model)) >= STAGES
    return replace(recipe, K=STAGES, cuts=None, units=None) if long_enough else recipe


# ---- running


def reproduce(request: Request, *, show: bool) -> tuple[Reproduction, Path]:
    """Run what is not done, as far as the budget goes; then write the table of all that there is."""
    check(request)
    rows_of(request)
    with lock.held(_folder(request)):
        return _reproduce(request, show=show)


def _reproduce(request: Request, *, show: bool) -> tuple[Reproduction, Path]:
    until = None if request.minutes is None else time.monotonic() + 60 * request.minutes
    table, rows = rows_of(request)
    folder = _folder(request)
    content = opened(request, table, folder)
    settings = content["settings"]
    made = {row.name: recipe_of(row, 0, settings) for row in rows}
    runs = [
        Run(row, seed, recipe_of(row, seed, settings)) for row, seed in table.order(request.seeds) if row.name in made
    ]
    crowd = [run.recipe for run in runs if run.recipe.engine == "processes"]
    if crowd and request.together > 1:
        raise UserError(
            f"--side-by-side {request.together} with --engine processes: runs by turns take an engine that "
            "keeps all stages in one process, such as --engine simulate"
        )
    todo = []
    for run in runs:
        path = folder / "runs" / run.name
        if (path / "config.json").exists():
            kept_recipe(path, run)
        told = report.read_run(path, run.seed)
        stopped = (path / "checkpoints").exists() and not (path / "model.safetensors").exists()  # behind its last epoch
        todo += [] if told.over and not stopped else [run]
    unknown_images = table.images is not None and content["images"] is None and request.data is not None
    data_set = open_data(request, runs[0].recipe) if todo or unknown_images else None
    if data_set is not None:
        content["images"] = same_images(table, data_set, content["images"], folder)
    origin = provenance(request.command, device=settings.get("device"))
    content["invocations"].append(origin)
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({first_line(error)}): choose another --out") from error
    _write(folder / ASKED, content_text(content))
    work = Work(folder, request, data_set, until, Console(stderr=True, highlight=False, quiet=not show), show)
    work.say(f"{len(runs) - len(todo)} of {len(runs)} runs are done")

    def result() -> Reproduction:
        seeds = dict.fromkeys(made, request.seeds)
        return written(folder, report.read(folder, table, made, seeds, settings, origin, content["images"]))

    try:
        work.all(todo)
    except (Interrupted, KeyboardInterrupt) as error:
        result()
        raise Interrupted(f"{str(error) or 'stopped by Ctrl-C'}; the same command goes on with {folder}") from None
    return result(), folder


@dataclass
class Work:
    """The runs of one invocation."""

    folder: Path
    request: Request
    data_set: DataSet | None
    until: float | None
    teller: Console
    show: bool
    safe: int = 0  # runs that came to an end or to a checkpoint
    broken_off: int = 0  # runs that the budget ended

    def say(self, text: str) -> None:
        self.teller.print(text, soft_wrap=True, markup=False)

    def path(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def all(self, runs: list[Run]) -> None:
        """By worth: those of one process take turns, those of several have the machine to themselves."""
        from offbeat.runs.round_robin import RoundRobin

        for several, group in groupby(runs, key=lambda run: run.recipe.engine == "processes"):
            if several:
                for run in group:
                    if self.until is None or time.monotonic() < self.until:
                        self.alone(run)
            else:
                turns = RoundRobin(self.start, self.ended, together=self.request.together, until=self.until)
                turns.all(group)
                self.safe += len(turns.intervals)
        if runs and not self.safe and not self.broken_off:
            self.say(
                f"the budget of {self.request.minutes:g} minutes was spent before a run began: give more "
                "--budget-minutes"
            )
        if self.broken_off and self.safe:
            which = f"{self.broken_off} runs go" if self.broken_off > 1 else "1 run goes"
            self.say(f"stopped by the budget: {which} on with the same command")
        if self.broken_off and not self.safe:
            self.say(
                f"no run came to a checkpoint within {self.request.minutes:g} minutes, and none would the next "
                "time: give more --budget-minutes, or fewer --side-by-side"
            )

    def ready(self, run: Run) -> Recipe:
        """Make the run's folder, or have it go on with the recipe that it began with."""
        from offbeat.runs import build

        path = self.path(run)
        again = (path / "config.json").exists()
        recipe = kept_recipe(path, run) if again else build.check(run.recipe, self.data_set)[0]
        with lock.held(path):
            record.RunFolder.create(path, recipe, again=again, command=self.request.command)
        return recipe

    def start(self, run: Run) -> TrainingRun:
        from offbeat.runs.begin import begin

        together, recipe = self.request.together, in_stages(self.ready(run))
        made = begin(
            recipe,
            self.path(run),
            show=self.show,
            folder_ready=True,
            data_set=self.data_set,
            name=run.name,
            reports=REPORTS_AN_EPOCH,
        )
        cut = f", in {recipe.K} stages" if recipe.K > run.recipe.K else ""
        since = f", from epoch {made.first_epoch + 1}" if made.first_epoch else ""
        self.say(f"{run.name}: {run.row.title}{cut}{since}")
        if together > 1:
            record.RunFolder(self.path(run)).line("together", runs=together)
        if cut:
            record.RunFolder(self.path(run)).line("cut", stages=recipe.K)
        return made

    def ended(self, run: Run, ending: Ending) -> None:
        if ending.error is not None:
            self.failed(run, ending.error, ending.account)
        elif ending.by_budget:
            self.broken_off += 1
            record.RunFolder(self.path(run)).line("stopped", reason="the budget is spent")
        else:
            self.done(run)

    def done(self, run: Run) -> None:
        self.safe += 1
        shutil.rmtree(self.path(run) / "checkpoints", ignore_errors=True)  # model.safetensors has the weights
        self.tell(run)

    def failed(self, run: Run, error: Exception, account: str | None) -> None:
        """The row says why. A run that diverged has its result; others are tried again by the next invocation."""
        self.safe += 1
        path = self.path(run)
        if not (path / "config.json").exists():
            record.RunFolder.create(path, run.recipe, command=self.request.command)
        reason = str(error) if account is None else f"{type(error).__name__}: {first_line(error)}"
        if self.request.data is not None:  # nothing here names a place
            reason = reason.replace(str(self.request.data.absolute()), "DATA")
        record.RunFolder(path).line("failed", reason=reason, diverged=isinstance(error, NotFinite))
        if isinstance(error, NotFinite):
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        if account:
            (path / "traceback.txt").write_text(account)
        self.tell(run)

    def tell(self, run: Run) -> None:
        told = report.read_run(self.path(run), run.seed)
        if told.state == "done":
            self.say(f"{run.name}: done, error {told.error:.2f}%, {told.samples_per_second:,.0f} samples/s")
        else:
            self.say(f"{run.name}: {told.state} in epoch {told.epochs + 1}: {told.reason}")

    def alone(self, run: Run) -> None:
        """A run in K processes; the budget ends it as Ctrl-C would, with the batches in flight in its checkpoint."""
        path = self.path(run)
        self.say(f"{run.name}: {run.row.title}")
        spent = threading.Event()
        try:
            from offbeat.runs.build import DATA_DIR

            recipe = self.ready(run)
            arguments = ["train", "--config", str(path / "config.json"), "--out", str(path)]
            with lock.held(path), interrupting(self.until, spent):
                found = data_folder(self.request)
                launch.launch(
                    recipe.K,
                    arguments + ([] if self.show else ["--json"]),
                    environment={DATA_DIR: found} if found else {},
                )
        except (Interrupted, KeyboardInterrupt):
            if not spent.is_set():
                raise
            self.broken_off += 1
            self.safe += 1
            record.RunFolder(path).line("stopped", reason="the budget is spent")
        except FolderTaken:  # not this one's to write to
            raise
        except UserError as error:
            self.failed(run, error, None)
        except Exception as error:  # a defect of one row must not take the results of the others
            self.failed(run, error, traceback.format_exc())
        else:
            self.done(run)


@contextmanager
def interrupting(until: float | None, spent: threading.Event) -> Iterator[None]:
    """Around work that Ctrl-C ends: at that time it comes from here."""
    if until is None:
        yield
        return

    def end() -> None:
        spent.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(max(0.0, until - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---- the table


def written(folder: Path, reproduction: Reproduction) -> Reproduction:
    """The table and the curves in files."""
    _write(folder / "results.json", json.dumps(reproduction.as_dict(), indent=2) + "\n")
    _write(folder / "table.md", report.markdown(reproduction))
    curves = {row.name: row.curves for row in reproduction.rows if row.curves}
    times = {row.name: row.times for row in reproduction.rows if row.curves}
    by_the_way(
        lambda path: draw_curves(curves, path, title=reproduction.title), folder / "curves.png", folder / "curves.svg"
    )
    by_the_way(
        lambda path: draw_curves(curves, path, title=reproduction.title, times=times),
        folder / "curves-time.png",
        folder / "curves-time.svg",
    )
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
    console.print(report.grid(reproduction))
    for note in reproduction.notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)
    console.print(f"runs, table and curves: {folder}", soft_wrap=True, markup=False)


def show_rows(request: Request, *, as_json: bool) -> None:
    """The rows in the order in which their first runs come, with their recipes; nothing is read or run."""
    check(request)
    table, rows = rows_of(request)
    given = {"epochs": request.epochs, **_asked_method(request), **request.running}
    first = {row.name: recipe_of(row, 0, given) for row, _ in table.order(1) if row in rows}
    named = {row.name: row for row in rows}
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": name,
                        "title": named[name].title,
                        "recipe": recipe.as_dict(),
                        "paper": None if named[name].paper is None else vars(named[name].paper),
                    }
                    for name, recipe in first.items()
                ]
            )
        )
        return
    from rich import box
    from rich.table import Table as Grid

    epochs = ", ".join(f"{number} epochs" for number in sorted({recipe.epochs for recipe in first.values()}))
    title = f"{table.title}, {epochs}, {len(first)} rows by worth"
    grid = Grid(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for name in ("row", "paper", "setting", "in the paper"):
        grid.add_column(name, no_wrap=name in ("row", "paper"), overflow="fold")
    for name, recipe in first.items():
        paper = named[name].paper
        value = "-" if paper is None else "div." if paper.error is None else f"{paper.error:.2f}"
        value += f" / {paper.top5:.2f}" if paper and paper.top5 else ""
        grid.add_row(name, value, report.setting(recipe), paper.place if paper else "(ours)")
    Console(highlight=False).print(grid)


def show_ready(request: Request, *, as_json: bool) -> None:
    """Check all that can be checked before training, with the data."""
    from offbeat.runs import build

    check(request)
    table, rows = rows_of(request)
    content = opened(request, table, _folder(request))
    settings = content["settings"]
    made = {row.name: recipe_of(row, 0, settings) for row in rows}
    data_set = open_data(request, next(iter(made.values())))
    same_images(table, data_set, content["images"], _folder(request))
    ready = {name: build.check(recipe, data_set)[0] for name, recipe in made.items()}
    if as_json:
        print(json.dumps({name: recipe.as_dict() for name, recipe in ready.items()}))
        return
    for name, recipe in ready.items():
        print(f"{name}: {recipe.method} {report.setting(recipe)}, {recipe.engine}, cuts {list(recipe.cuts or ())}")
    print(
        f"ready: {len(ready)} rows, {len(ready) * request.seeds} runs of {settings['epochs']} epochs with "
        f"{request.seeds} seeds, in {_folder(request)}; nothing was trained"
    )
