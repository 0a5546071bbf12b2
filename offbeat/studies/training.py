"""The training runs of a study: one after the other, in turns in this process, or as processes at the same time.

Every run has a folder of its own, like any other run. The bits of a run do not depend on how it is executed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from offbeat.errors import Interrupted, UserError
from offbeat.report.reproduction import read_seed_run, run_name, setting
from offbeat.runs import launch, lock, record
from offbeat.runs.recipe import Recipe, load, make_recipe
from offbeat.studies.runner import Failure, StudyRunner

if TYPE_CHECKING:
    from offbeat.data import DataSet
    from offbeat.runs.round_robin import Ending
    from offbeat.runs.training_run import TrainingRun

STOP_SECONDS = 10  # that a job has to end after Ctrl-C
SPENT = "the budget is spent"
KEPT_ON_RESUME = ("cuts", "units", "threads_per_stage", "data_dir", "data_workers")  # decided where a run began


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study: a method or a row of a table, with one seed."""

    label: str
    seed: int
    recipe: Recipe
    title: str = ""

    @property
    def described(self) -> str:
        """For a line of progress."""
        return f"{self.name}: {self.title or setting(self.recipe)}"

    @property
    def name(self) -> str:
        """Of its folder.

        >>> StudyRun("adl:M=2,corrector=sc", 0, make_recipe()).name
        'adl-M=2-corrector=sc-seed0'
        """
        return run_name(folder_name(self.label), self.seed)


def folder_name(label: str) -> str:
    return label.replace(":", "-").replace(",", "-")


def stored_recipe(path: Path, run: StudyRun) -> Recipe:
    """The recipe with which a run in the folder began; UserError unless it is that of the study."""
    there = make_recipe(**load(path / "config.json"))
    here = replace(run.recipe, **{name: getattr(there, name) for name in KEPT_ON_RESUME})
    if there != here:
        was, now = _flat(there), _flat(here)
        changed = next(name for name in {**now, **was} if was.get(name) != now.get(name))
        raise UserError(
            f"{path} was run with another recipe ({changed}: {was.get(changed)} there, {now.get(changed)} "
            "here): move it away to run it again"
        )
    return there


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe, each setting of its method by itself."""
    values = recipe.as_dict()
    return {**{f"{recipe.method}:{name}": value for name, value in values.pop("settings").items()}, **values}


def is_done(path: Path, run: StudyRun) -> bool:
    """Whether the run in the folder has its result, or diverged; its recipe is checked."""
    if (path / "config.json").exists():
        stored_recipe(path, run)
    unsaved = (path / "checkpoints").exists() and not (path / "model.safetensors").exists()  # killed after its training
    return read_seed_run(path, run.seed, task=run.recipe.task).over and not unsaved


def shared_data(recipe: Recipe, *, folder: str | None = None) -> DataSet:
    """The data of all runs: read from the folder, checked, and on the device once."""
    from offbeat.runs import build

    data_set = build.open_data(recipe, folder=folder)
    build.check(recipe, data_set)
    return build.move_data(recipe, data_set)[0] or data_set


@dataclass
class TrainingRuns:
    """Executes the runs of a study in `folder`, and records what becomes of each.

    together      runs that take turns in this process
    data_folder   where the data are, if not where the recipe states it; in no record
    as_executed   the recipe as it is run, which gives the same numbers as the one that is recorded
    """

    runner: StudyRunner
    folder: Path
    together: int = 1
    data_set: DataSet | None = None
    data_folder: str | None = None
    command: list[str] | None = None  # for the records
    reports: int | None = None  # training lines per epoch in the records; None: as in any run
    as_executed: Callable[[Recipe], Recipe] = lambda recipe: recipe
    saved: int = 0  # runs that reached their end or a checkpoint
    out_of_time: int = 0  # runs that the budget ended

    def path(self, run: StudyRun) -> Path:
        return self.folder / run.name

    def execute(self, runs: Iterable[StudyRun]) -> None:
        """In order: runs of one process take turns, those of K processes have the machine to themselves."""
        from offbeat.runs.round_robin import RoundRobin

        for in_processes, group in groupby(runs, key=lambda run: run.recipe.engine == "processes"):
            if in_processes:
                self.runner.run(group, self._launch, failed=self._failed, resumable=True)
            else:
                turns = RoundRobin(self._start, self._ended, together=self.together, until=self.runner.deadline)
                turns.all(group)
                self.saved += len(turns.intervals)

    # ---- in this process

    def _prepare(self, run: StudyRun) -> Recipe:
        """Make the run's folder, or continue it with the recipe with which it began."""
        from offbeat.runs import build

        path = self.path(run)
        again = (path / "config.json").exists()
        recipe = stored_recipe(path, run) if again else build.check(run.recipe, self.data_set)[0]
        with lock.held(path):
            record.RunFolder.create(path, recipe, again=again, command=self.command)
        return recipe

    def _start(self, run: StudyRun) -> TrainingRun:
        from offbeat.runs import begin
        from offbeat.runs.training_run import REPORTS_PER_EPOCH

        recipe = self.as_executed(self._prepare(run))
        made = begin.begin(
            recipe,
            self.path(run),
            show=self.runner.show,
            folder_ready=True,
            data_set=self.data_set,
            name=run.name if self.together > 1 else "",
            reports=self.reports or REPORTS_PER_EPOCH,
        )
        cut = f", in {recipe.K} stages" if recipe.K > run.recipe.K else ""
        since = f", from epoch {made.first_epoch + 1}" if made.first_epoch else ""
        self.runner.report(f"{run.described}{cut}{since}")
        if self.together > 1:
            record.RunFolder(self.path(run)).line("together", runs=self.together)
        if cut:
            record.RunFolder(self.path(run)).line("cut", stages=recipe.K)
        return made

    def _ended(self, run: StudyRun, ending: Ending) -> None:
        if ending.error is not None:
            self._failed(run, Failure.of(ending.error))
        elif ending.by_budget:
            self._stopped(run)
        else:
            self._done(run)

    # ---- in K processes

    def _launch(self, run: StudyRun) -> None:
        """The budget ends it as Ctrl-C would, with the batches in flight in its checkpoint."""
        from offbeat.runs.build import data_variable

        path = self.path(run)
        self.runner.report(run.described)
        spent = threading.Event()
        try:
            recipe = self._prepare(run)
            arguments = ["train", "--config", str(path / "config.json"), "--out", str(path)]
            with lock.held(path), interrupting(self.runner.deadline, spent):
                environment = {data_variable(recipe.data): self.data_folder} if self.data_folder else {}
                arguments += [] if self.runner.show else ["--json"]
                launch.launch(recipe.K, arguments, replicas=recipe.replicas, environment=environment)
        except (Interrupted, KeyboardInterrupt):
            if not spent.is_set():
                raise
            self.saved += 1
            self._stopped(run)
        else:
            self._done(run)

    # ---- as processes at the same time

    def execute_jobs(self, runs: Iterable[StudyRun], jobs: int) -> None:
        """So many at the same time, each a process `offbeat train`, in a folder that is held for it."""
        waiting = deque(runs)
        running: list[Job] = []
        with tempfile.TemporaryDirectory(prefix="offbeat-") as place:
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        run = waiting.popleft()
                        running.append(Job(run, self.path(run), Path(place)))
                    for job in [job for job in running if job.process.poll() is not None]:
                        running.remove(job)
                        self._job_ended(job)
                    time.sleep(0.05)
            finally:
                stop([job.process for job in running])
                for job in running:
                    job.close()

    def _job_ended(self, job: Job) -> None:
        with closing(job):
            failure = job.failure()
            if failure is None:
                self._done(job.run)
            else:
                written = any(line["kind"] == "failed" for line in record.lines(job.path))
                self._failed(job.run, failure, written=written)

    # ---- what became of a run

    def _done(self, run: StudyRun) -> None:
        self.saved += 1
        shutil.rmtree(self.path(run) / "checkpoints", ignore_errors=True)  # model.safetensors has the weights
        self._report(run)

    def _stopped(self, run: StudyRun) -> None:
        self.out_of_time += 1
        record.RunFolder(self.path(run)).line("stopped", reason=SPENT)

    def _failed(self, run: StudyRun, failure: Failure, *, written: bool = False) -> None:
        """Record why there is no result. Divergence is a result; other failures are tried again another time."""
        self.saved += 1
        path = self.path(run)
        if not (path / "config.json").exists():
            record.RunFolder.create(path, run.recipe, command=self.command)
        if not written:
            reason = failure.reason
            if self.data_folder:  # records hold no path of this machine
                reason = reason.replace(self.data_folder, "DATA")
            record.RunFolder(path).line("failed", reason=reason, diverged=failure.diverged)
        if failure.diverged:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        if failure.traceback:
            (path / "traceback.txt").write_text(failure.traceback)
        self._report(run)

    def _report(self, run: StudyRun) -> None:
        task = run.recipe.task
        found = read_seed_run(self.path(run), run.seed, task=task)
        if found.state == "done" and found.error is not None:
            metric = f"{task.metric.removeprefix('test ')} {task.shown(found.error)}"
            outcome = f"done, {metric}, {found.samples_per_second:,.0f} {task.speed_unit}"
        else:
            outcome = f"{found.state} in epoch {found.epochs + 1}: {found.reason}"
        self.runner.report(f"{run.name}: {outcome}")


class Job:
    """A run in a process of its own, whose folder this process holds."""

    def __init__(self, run: StudyRun, path: Path, place: Path) -> None:
        self.run, self.path = run, path
        config = place / f"{run.name}.json"
        config.write_text(json.dumps({"recipe": run.recipe.as_dict()}))
        with ExitStack() as held:
            held.enter_context(lock.held(path))
            self.errors: TextIO = held.enter_context((place / f"{run.name}.txt").open("w+"))
            command = [sys.executable, "-m", "offbeat", "train", "--config", str(config), "--out", str(path), "--json"]
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, launch.LAUNCHER: str(os.getpid())},  # it ends with its launcher
                start_new_session=True,  # Ctrl-C reaches it from here, once
            )
            self._held = held.pop_all()

    def failure(self) -> Failure | None:
        """Why the process ended without a result."""
        self.errors.seek(0)
        printed, code = self.errors.read(), self.process.returncode
        if code < 0:
            return Failure(f"ended by {signal.Signals(-code).name}", printed)
        if code == 0:
            return None
        last = (printed.strip().splitlines() or [f"exit code {code}"])[-1]
        return Failure(last.removeprefix("offbeat: "), printed if "Traceback" in printed else None)

    def close(self) -> None:
        self._held.close()


def stop(processes: list[subprocess.Popen[str]]) -> None:
    """End them as Ctrl-C does; kill those that do not end."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def interrupting(deadline: float | None, spent: threading.Event) -> Iterator[None]:
    """Interrupt the work within, as Ctrl-C does, at a time of time.monotonic()."""
    if deadline is None:
        yield
        return

    def end() -> None:
        spent.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_table(table: Table, notes: Iterable[str], folder: Path) -> None:
    """A study's table on the terminal, with its notes and where its records are."""
    console = Console(highlight=False)
    console.print(table)
    for line in (*(f"- {note}" for note in notes), f"runs, table and curves: {folder}"):
        console.print(line, soft_wrap=True, markup=False)
