"""`offbeat compare`: several methods under one recipe, each in a run folder of its own, and one table of all.

    DIR/config.json              what was asked for, the partition, and the complete recipe of every run
    DIR/METHOD-seedN/            a run like any other
    DIR/comparison.json, .md     the table
    DIR/curves.png, .svg         test error against the epoch

All runs share data order, initial weights, partition, threads and learning-rate rule. What is finished stays: the same
command goes on where it was stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from offbeat.errors import FolderTaken, Interrupted, UserError, first_line, unknown
from offbeat.method import Method
from offbeat.methods import parsed, settings_of, with_settings
from offbeat.report import draw_curves
from offbeat.report.comparison import Comparison, markdown, read, table
from offbeat.report.draw import by_the_way
from offbeat.runs import launch, lock, record
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import Recipe, cores, from_json, load, make_recipe
from offbeat.runs.train import train
from offbeat.settings import split_list

MATCHES = ("batch", "effective")
STOP_SECONDS = 10  # that a run has to end after Ctrl-C
ASIDE = "unfinished"  # the folder of runs that were stopped


@dataclass(frozen=True)
class Entry:
    """One of --methods: a method, and settings that differ from its defaults, as in adl:M=2,corrector=sc."""

    label: str
    method: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> Entry:
        """
        >>> Entry.of("gpipe:m=8")
        Entry(label='gpipe:m=8', method='gpipe', settings={'m': 8})
        """
        return cls(text, *parsed(text))


@dataclass(frozen=True)
class Run:
    """One method with one seed."""

    label: str
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> str:
        return f"{folder_name(self.label)}-seed{self.seed}"


def folder_name(label: str) -> str:
    """
    >>> folder_name("adl:M=2,corrector=sc")
    'adl-M=2-corrector=sc'
    """
    return label.replace(":", "-").replace(",", "-")


def compare(
    *,
    methods: str,
    match: str,
    seeds: int,
    M: int,
    chosen: dict[str, Any],
    out: Path | None,
    jobs: int,
    show: bool,
    together: int = 1,
) -> tuple[Comparison, Path]:
    """Run what is not finished yet, then read all records and write the table and the curves.

    jobs, together   runs at a time: in processes of their own, or by turns in this one
    """
    entries = [Entry.of(text) for text in split_list(methods)]
    _check(entries, match, seeds, M, jobs, together, chosen)
    K = chosen.get("K", 1)
    if "engine" not in chosen and chosen.get("device") != "cuda":
        chosen["engine"] = "simulate" if K == 1 or jobs > 1 or together > 1 else "processes"
    asked = {
        "methods": [entry.label for entry in entries],
        "match": match,
        "seeds": seeds,
        "M": M,
        "batch_size": 32,
        "lr": None,
        **chosen,
    }
    recipes = {entry.label: recipe_of(entry, asked) for entry in entries}
    first = next(iter(recipes.values()))
    folder = out or Path("runs") / f"compare-{first.data}-{first.model}-K{K}-M{M}"
    with lock.held(folder):
        return _compare(folder, asked, recipes, jobs=jobs, show=show, together=together), folder


def _compare(
    folder: Path,
    asked: dict[str, Any],
    recipes: Mapping[str, Recipe],
    *,
    jobs: int,
    show: bool,
    together: int,
) -> Comparison:
    crowd = max(jobs, together)
    runs = _resumed(folder, asked, crowd) or _begun(folder, asked, crowd, recipes)
    todo = [run for run in runs if not finished(folder / run.folder, run.recipe)]
    teller = Console(stderr=True, highlight=False, quiet=not show)
    if show and len(todo) < len(runs):
        teller.print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already", soft_wrap=True)
    try:
        if jobs > 1:
            at_a_time(jobs, todo, folder, teller)
        elif together > 1:
            side_by_side(together, todo, folder, teller, show=show)
        else:
            in_turn(todo, folder, teller, show=show)
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(f"stopped by Ctrl-C; the same command goes on with what is finished in {folder}") from None
    return written(folder)


def _check(
    entries: list[Entry], match: str, seeds: int, M: int, jobs: int, together: int, chosen: Mapping[str, Any]
) -> None:
    labels = [folder_name(entry.label) for entry in entries]
    twice = [entry.label for entry in entries if labels.count(folder_name(entry.label)) > 1]
    if not entries or twice:
        raise UserError(
            f"--methods {twice[0]!r} is there twice: name each once"
            if twice
            else "--methods names none: give some, such as bp,adl"
        )
    if match not in MATCHES:
        raise unknown("match", match, MATCHES)
    for name, number in (
        ("seeds", seeds),
        ("M", M),
        ("jobs", jobs),
        ("side-by-side", together),
        ("K", chosen.get("K", 1)),
    ):
        if number < 1:
            raise UserError(f"{name} = {number}: use a whole number from 1 up")
    if jobs > 1 and chosen.get("engine") == "processes":
        raise UserError(f"--jobs {jobs} with --engine processes: runs at the same time take --engine simulate")
    if jobs > 1 and together > 1:
        raise UserError(
            f"--jobs {jobs} with --side-by-side {together}: runs at a time are in processes of their "
            "own or in one, choose one of the two"
        )
    if together > 1 and chosen.get("engine") == "processes":
        raise UserError(
            f"--side-by-side {together} with --engine processes: runs by turns take an engine that keeps "
            "all stages in one process, such as --engine simulate"
        )
    if launch.joined_group():
        raise UserError("compare under torchrun: it starts its own processes, run it without")


# ---- one recipe for all


def recipe_of(entry: Entry, asked: Mapping[str, Any]) -> Recipe:
    """The recipe of a method under the comparison's rules, with its seed and cuts still open.

    -M goes to the methods whose gradients are late and that take an M against it; others accumulate where their entry
    says so. To match the effective batch a method takes b*M samples an update, in batches of that divided by its own M.
    """
    settings = dict(entry.settings)
    if "M" not in settings and _takes_M(entry):
        settings["M"] = asked["M"]
    method = with_settings(entry.method, settings)
    b = asked["batch_size"]
    if asked["match"] == "effective":
        b, rest = divmod(b * asked["M"], method.M)
        if rest:
            raise UserError(
                f"{entry.label} with M = {method.M}: {asked['batch_size'] * asked['M']} samples an update "
                "cannot be split into so many batches, choose -M or --batch-size otherwise"
            )
    given = {name: value for name, value in asked.items() if name not in ("methods", "match", "seeds", "M")}
    given |= {"threads_per_stage": asked.get("threads_per_stage") or max(1, cores() // asked.get("K", 1))}
    method.check(1 if one_stage(method) else asked.get("K", 1))
    if one_stage(method):
        given |= {"K": 1, "engine": None, "cuts": None, "speeds": None, "partition": "flops"}
    return make_recipe(**{**given, "method": entry.method, "batch_size": b, "settings": settings})


def _takes_M(entry: Entry) -> bool:  # noqa: N802
    lagging = with_settings(entry.method, entry.settings).lag(1, 2) > 0
    return lagging and "M" in settings_of(entry.method)


def one_stage(method: Method) -> bool:
    """Whether the method trains whole networks only: it takes one stage, and not even two."""
    return method.limit is not None and method.limit(1) is None and method.limit(2) is not None


def partitioned(recipes: Mapping[str, Recipe], b: int) -> dict[str, Recipe]:
    """The recipes with their cuts: one partition, decided here, for all that have several stages."""
    from offbeat.runs.build import check

    decided: dict[int, Recipe] = {}
    found = {}
    for label, recipe in recipes.items():
        if recipe.K not in decided:
            decided[recipe.K], _ = check(replace(recipe, batch_size=b))
        made = decided[recipe.K]
        found[label] = replace(recipe, cuts=made.cuts, units=made.units)
    return found


# ---- the folder


def _begun(folder: Path, asked: dict[str, Any], jobs: int, recipes: Mapping[str, Recipe]) -> list[Run]:
    """A new comparison: its config.json holds everything that the runs will be."""
    record.check_free(folder)
    recipes = partitioned(recipes, asked["batch_size"])
    runs = [
        Run(label, seed, replace(recipe, seed=seed))
        for seed in range(asked["seeds"])
        for label, recipe in recipes.items()
    ]
    widest = max(recipes.values(), key=lambda recipe: recipe.K)
    described = [
        {"label": run.label, "seed": run.seed, "folder": run.folder, "recipe": run.recipe.as_dict()} for run in runs
    ]
    partition = {"K": widest.K, "cuts": widest.cuts, "units": widest.units}
    content = {"comparison": {"asked": asked, "jobs": jobs, "partition": partition, "runs": described}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {**content, "provenance": provenance(device=widest.device)}
        record.write(folder / "config.json", json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({first_line(error)}): choose another --out") from error
    return runs


def _resumed(folder: Path, asked: dict[str, Any], jobs: int) -> list[Run] | None:
    """The runs of the comparison in the folder, if it is the one that was asked for; None where there is none."""
    path = folder / "config.json"
    try:
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        there = content["comparison"]
        runs = [Run(run["label"], run["seed"], make_recipe(**from_json(run["recipe"], path))) for run in there["runs"]]
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(f"{folder} holds something else than a comparison: choose another --out") from None
    here = json.loads(json.dumps(asked))
    for name in [*here, *there["asked"]]:
        if there["asked"].get(name) != here.get(name):
            raise UserError(
                f"{folder} holds another comparison ({name}: {_said(there['asked'].get(name))} there, "
                f"{_said(here.get(name))} here): choose another --out"
            )
    if jobs > there["jobs"]:  # the speeds of all are only as good as those of the most crowded
        there["jobs"] = jobs
        record.write(path, json.dumps(content, indent=2) + "\n")
    return runs


def _said(value: Any) -> str:
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def finished(path: Path, recipe: Recipe) -> bool:
    """Whether the run in the folder has its result; one that has not is moved aside, to be run again."""
    if not path.exists():
        return False
    if any(line["kind"] == "result" for line in record.lines(path)):
        if make_recipe(**load(path / "config.json")) != recipe:
            raise UserError(f"{path} was run with another recipe than this comparison's: move it away")
        return True
    with lock.held(path):  # nobody has taken it up by itself
        pass
    stage_stream = path.parent / ASIDE
    stage_stream.mkdir(exist_ok=True)
    count = 1
    while (stage_stream / f"{path.name}-{count}").exists():
        count += 1
    path.rename(stage_stream / f"{path.name}-{count}")
    return False


def written(folder: Path) -> Comparison:
    """The table and the curves of what the folder holds, also in files."""
    comparison = read(folder)
    record.write(folder / "comparison.json", json.dumps(comparison.as_dict(), indent=2) + "\n")
    record.write(folder / "comparison.md", markdown(comparison))
    curves = {row.label: row.curves for row in comparison.rows}
    by_the_way(
        lambda path: draw_curves(curves, path, title=comparison.title), folder / "curves.png", folder / "curves.svg"
    )
    return comparison


def show_comparison(comparison: Comparison, folder: Path) -> None:
    console = Console(highlight=False)
    console.print(table(comparison))
    for note in comparison.notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)
    console.print(f"runs, table and curves: {folder}", soft_wrap=True, markup=False)


# ---- running


def in_turn(runs: Iterable[Run], folder: Path, teller: Console, *, show: bool) -> None:
    """One run after the other, in this process or in the K that it starts; what fails is a line of its records."""
    for run in runs:
        path = folder / run.folder
        teller.print(f"[bold]{run.folder}[/bold]", soft_wrap=True)
        try:
            train(run.recipe, out=path, show=show)
        except FolderTaken:  # not this one's to write to
            raise
        except UserError as error:
            failed(path, run, str(error))
        except Interrupted:
            raise
        except Exception as error:  # a defect of one method must not take the results of the others
            failed(path, run, f"{type(error).__name__}: {first_line(error)}", account=traceback.format_exc())
        _tell(run, path, teller)


def side_by_side(together: int, runs: Iterable[Run], folder: Path, teller: Console, *, show: bool) -> None:
    """So many runs at once in this process, by turns."""
    from offbeat.runs import build
    from offbeat.runs.begin import begin
    from offbeat.runs.round_robin import Ending, RoundRobin
    from offbeat.runs.training_run import TrainingRun

    todo = list(runs)
    data_set = None
    if todo:  # one for all
        first = todo[0].recipe
        data_set = build.open_data(first)
        build.check(first, data_set)
        data_set, _ = build.move_data(first, data_set)

    def start(run: Run) -> TrainingRun:
        path = folder / run.folder
        with lock.held(path):
            record.RunFolder.create(path, run.recipe)
        return begin(run.recipe, path, show=show, folder_ready=True, data_set=data_set, name=run.folder)

    def ended(run: Run, ending: Ending) -> None:
        if ending.error is not None:
            reason = (
                str(ending.error)
                if ending.account is None
                else (f"{type(ending.error).__name__}: {first_line(ending.error)}")
            )
            failed(folder / run.folder, run, reason, account=ending.account)
        _tell(run, folder / run.folder, teller)

    RoundRobin(start, ended, together=together).all(todo)


def at_a_time(jobs: int, runs: Iterable[Run], folder: Path, teller: Console) -> None:
    """So many runs at once, each a process `offbeat train`."""
    waiting = deque(runs)
    running: dict[Run, tuple[subprocess.Popen[str], TextIO]] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-") as place:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.popleft()
                    running[run] = _start(run, folder / run.folder, Path(place))
                for run, (process, words) in list(running.items()):
                    if process.poll() is not None:
                        del running[run]
                        _end(run, folder / run.folder, process, words)
                        _tell(run, folder / run.folder, teller)
                time.sleep(0.05)
        finally:
            _stop(process for process, _ in running.values())
            for _, words in running.values():
                words.close()


def _start(run: Run, path: Path, place: Path) -> tuple[subprocess.Popen[str], TextIO]:
    config = place / f"{run.folder}.json"
    config.write_text(json.dumps({"recipe": run.recipe.as_dict()}))
    words = (place / f"{run.folder}.txt").open("w+")
    command = [sys.executable, "-m", "offbeat", "train", "--config", str(config), "--out", str(path), "--json"]
    surroundings = {**os.environ, launch.LAUNCHER: str(os.getpid())}
    process = subprocess.Popen(  # with a launcher, without which it ends
        command,
        stdout=subprocess.DEVNULL,
        stderr=words,
        stdin=subprocess.DEVNULL,
        text=True,
        env=surroundings,
        start_new_session=True,  # Ctrl-C reaches it from here, once
    )
    return process, words


def _end(run: Run, path: Path, process: subprocess.Popen[str], words: TextIO) -> None:
    words.seek(0)
    said = words.read()
    words.close()
    if process.returncode < 0:
        failed(path, run, f"ended by {signal.Signals(-process.returncode).name}", account=said)
    elif process.returncode:
        last = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        failed(path, run, last.removeprefix("offbeat: "), account=said if "Traceback" in said else None)


def _stop(processes: Iterable[subprocess.Popen[str]]) -> None:
    """End what still runs, as Ctrl-C does; what does not is killed."""
    left = list(processes)
    for process in left:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + STOP_SECONDS
    for process in left:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def failed(path: Path, run: Run, reason: str, *, account: str | None = None) -> None:
    """Make sure that the run's records say why it has no result."""
    if not (path / "config.json").exists():
        record.RunFolder.create(path, run.recipe)
    if not any(line["kind"] == "failed" for line in record.lines(path)):
        record.RunFolder(path).line("failed", reason=reason)
    if account:
        (path / "traceback.txt").write_text(account)


def _tell(run: Run, path: Path, teller: Console) -> None:
    ends = [line for line in record.lines(path) if line["kind"] in ("result", "failed")]
    for line in ends[-1:]:
        told = (
            f"failed: {line['reason']}"
            if line["kind"] == "failed"
            else (f"error {line['error']:.2f}%  {line['samples_per_second']:,.0f} samples/s")
        )
        teller.print(f"{run.folder}: {told}", soft_wrap=True, markup=False)
