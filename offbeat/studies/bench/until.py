"""`offbeat bench --until-loss`: every row is trained until a validation loss (or error), with three learning rates.

    DIR/until.json   the record: of every row and learning rate what it reached, and its validation curve
    DIR/until.md     the table

All rows have the same initial weights, order of samples and samples per update; the learning rate increases over the
first twentieth of the samples and then stays, so that a result does not depend on when a run would have ended. The
record is written after each run; the same command trains what it does not have. A run that the time limit ends is
recorded as "no time", and trained again by a command that continues the record.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from offbeat.data import DataSet
from offbeat.errors import UserError, unknown
from offbeat.methods import AUTO, settings_of
from offbeat.recommended import EFFICIENT, largest_efficient
from offbeat.report import until_table
from offbeat.runs import build
from offbeat.runs.launch import check_cores, workers_here
from offbeat.runs.optimizers import OPTIMIZERS
from offbeat.runs.recipe import make_recipe
from offbeat.runs.task import LANGUAGE, default_names
from offbeat.runs.train import file_name
from offbeat.studies.bench import machines
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.records import folder_for, origin, stored
from offbeat.studies.bench.request import BenchRequest, check_numbers
from offbeat.studies.bench.rounds import identity, shared_cores
from offbeat.studies.bench.rows import (
    BEST,
    OURS,
    ROWS,
    BenchRow,
    BenchSetting,
    chosen,
    cores_here,
    described,
    left_out,
    micro_batches,
    settings_by_method,
    to_try,
)
from offbeat.studies.bench.target import Measurement, Outcome, Target, best, reached
from offbeat.studies.bench.worker_group import RowFailedError, WorkerGroup
from offbeat.studies.runner import StudyRunner

RATES = (1.0, 2.0, 0.5)  # times the optimizer's default, in the order in which they are run
WARMUP = 0.05  # of the samples
RECOMMENDED_OPTIMIZER = "muon"  # for late gradients on text, see docs/staleness.md
CORRECTED = ("adl", "adl-1f1b")  # rows with the recommended corrector, where no other is given
COMPARED = "ddp,torch-1f1b,adl-1f1b"  # rows besides bp and adl
VALIDATIONS = 50  # per run, by default
PATIENCE = 3600.0  # seconds until a worker must answer
RECORD = "until.json"
NO_TIME: Outcome = "no time"
LARGEST = f"the largest number of those tried that takes at most {EFFICIENT:g} times the shortest time"


@dataclass(frozen=True)
class UntilRequest(BenchRequest):
    """The options of `offbeat bench --until-loss`."""

    against: str = COMPARED
    until_loss: float | None = None
    until_error: float | None = None
    samples: int = 100_000  # of a run, at most
    every: int | None = None  # updates between two validations
    validation_samples: int = 2000
    data: str | None = None
    data_dir: str | None = None
    optimizer: str | None = None  # of all rows
    seed: int = 0

    @property
    def target(self) -> Target:
        """The loss or error, checked."""
        if self.until_loss is not None and self.until_error is not None:
            raise UserError("until_loss= with until_error=: give one of them")
        metric: Literal["loss", "error"] = "loss" if self.until_error is None else "error"
        value = self.until_loss if self.until_error is None else self.until_error
        if value is None:
            raise UserError("no target: give until_loss= or until_error=")
        if not (0 < value < math.inf):
            raise UserError(f"until_{metric}={value:g}: use a finite number above 0")
        if metric == "error" and value >= 100:
            raise UserError(f"until_error={value:g}: use a percentage below 100")
        return Target(metric, value)

    def recipe(self, samples_per_update: int, **more: Any) -> dict[str, Any]:
        """The arguments of a recipe: data, model, optimizer and learning rate, which are the same for all rows."""
        model, data = default_names(self.model, self.data)
        return {
            "model": model,
            "data": data,
            "shape": self.shape,
            "seed": self.seed,
            "method": "bp",
            "K": 1,
            "batch_size": samples_per_update,
            "drop_last": True,
            "schedule": "steps",
            "milestones": (),
            **more,
        }

    def open(self) -> DataSet:
        """The data, checked with the model."""
        recipe = make_recipe(**self.recipe(1, optimizer=self.optimizer), data_dir=self.data_dir)
        data = build.open_data(recipe)
        build.check(recipe, data)
        if recipe.task is LANGUAGE and self.target.metric == "error":
            raise UserError(f"until_error={self.until_error:g} with data='text': it has no error, use until_loss=")
        return data

    def size(self) -> tuple[tuple[int, ...], int]:
        data = self.open()
        return data.shape, data.classes

    def setting(self) -> BenchSetting:
        self.check()
        per_update = self.batch_per_update or self.batch_size or 128
        both = self.batch_per_update is not None and self.batch_size is not None
        request = self if both else replace(self, batch_size=None, batch_per_update=per_update)
        setting = super(UntilRequest, request).setting()
        corrected = {name: {"corrector": AUTO, **setting.methods.get(name, {})} for name in CORRECTED}
        return replace(setting, methods={**setting.methods, **corrected})

    def check_split(self, setting: BenchSetting) -> None:
        row, numbers = ROWS[OURS], dict.fromkeys((*to_try(setting.K, self.micro_batches), setting.M))
        if is_given(row, self, setting):
            super().check_split(setting)
        elif not split(row, self, setting).swept and setting.batch_size % setting.M:
            *others, last = map(str, numbers)
            raise UserError(
                f"{setting.batch_size} samples per update cannot be split into {', '.join(others)} or {last} equal "
                f"batches: use a multiple of {min(numbers)}"
            )

    def check(self) -> None:
        """Refuse what is wrong before the data are opened."""
        metric = self.target.metric
        names = ("samples", "every", "validation_samples", "batch_size", "batch_per_update")
        check_numbers(None, {name: getattr(self, name) for name in names})
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: use a whole number from 0 up")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.device != "cpu":
            raise UserError(f"device={self.device!r} with until_{metric}=: rows are trained on the cpu only")


@dataclass(frozen=True)
class TrainedRow:
    """A row with an optimizer."""

    row: BenchRow
    optimizer: str
    name: str

    @classmethod
    def all_of(cls, rows: list[BenchRow], *, default: str, given: str | None) -> list[TrainedRow]:
        """Every row with the default optimizer of the data, and on text also with the one that is recommended for late
        gradients. Or all rows with the one that is given."""
        first = given or default
        also = [RECOMMENDED_OPTIMIZER] if given is None and default == LANGUAGE.defaults["optimizer"] else []
        named = [("", first), *((f"-{optimizer}", optimizer) for optimizer in also)]
        return [cls(row, optimizer, f"{row.name}{end}") for row in rows for end, optimizer in named]


@dataclass
class UntilBench:
    """The runs of all rows and learning rates, one after the other, each with the machine to itself."""

    request: UntilRequest
    setting: BenchSetting
    data: DataSet
    runner: StudyRunner
    rows: list[TrainedRow]
    origin: dict[str, Any]
    found: dict[str, dict[str, Any]]  # rows of the record, by name
    left_out: dict[str, str] = field(default_factory=dict)
    fork_server: ForkServer = field(default_factory=machines.fork_server)
    folder: Path = Path()

    # ---- what there is to do

    @property
    def updates(self) -> int:
        return self.request.samples // self.setting.batch_size

    @property
    def every(self) -> int:
        return self.request.every or max(1, self.updates // VALIDATIONS)

    def go(self, folder: Path) -> None:
        """All runs that the record does not have; first the default learning rate of every row."""
        self.folder = folder
        for trained in self.rows:
            if reason := left_out(trained.row, self.setting, self.request.micro_batches):
                self.left_out[trained.name] = reason
                self.runner.report(f"{trained.name} is left out: {reason}")
        todo = [
            (trained, rate)
            for rate in RATES
            for trained in self.rows
            if trained.name not in self.left_out and not self._has(trained, rate)
        ]
        late: list[Any] = []
        self.runner.run(todo, lambda task: self._run(*task), late=late.append)
        if late:
            self.runner.report(f"no time for {len(late)} more runs in {self.request.minutes:g} minutes")

    def _has(self, trained: TrainedRow, rate: float) -> bool:
        runs = self.found.get(trained.name, {}).get("runs", [])
        return any(run["rate"] == rate and run["outcome"] not in ("failed", NO_TIME) for run in runs)

    # ---- one run

    def _run(self, trained: TrainedRow, rate: float) -> None:
        described = self.found.get(trained.name) or self._described(trained)
        self.found[trained.name] = described
        if "micro_batches" in described:
            run = self._trained(trained, rate, described["micro_batches"])
            described["runs"] = [had for had in described["runs"] if had["rate"] != rate] + [run]
            self.runner.report(
                f"{trained.name}, lr {run['lr']:g}: {until_table.outcome(run, self.request.target.metric)}"
            )
        else:
            self.found.pop(trained.name)
        self.write()

    def _described(self, trained: TrainedRow) -> dict[str, Any]:
        """A row of the record, without runs; without micro_batches where none could be timed."""
        row = trained.row
        sweep: dict[int, float] = {}
        if row.swept:
            try:
                sweep = self._sweep(row)
            except RowFailedError as error:
                self.left_out[trained.name] = str(error)
                self.runner.report(f"{trained.name} is left out: {error}")
                return {}
        m = chosen_number(row, sweep)
        found = described(row, self.setting, m, sweep, LARGEST if row.micro else BEST)
        return {**found, "name": trained.name, "optimizer": OPTIMIZERS[trained.optimizer].title, "runs": []}

    def _sweep(self, row: BenchRow) -> dict[int, float]:
        """Seconds per batch by the number of micro-batches, on random samples; the same for all optimizers."""
        for trained in self.rows:
            if trained.row == row and (had := self.found.get(trained.name, {}).get("sweep")):
                return {int(m): seconds for m, seconds in had.items()}
        numbers = micro_batches(row, self.setting, self.request.micro_batches)
        if len(numbers) == 1:
            return {numbers[0]: 0.0}
        with closing(self._started(row)) as workers:
            return workers.sweep(numbers, worse=EFFICIENT, report=self.runner.report)

    def _started(self, row: BenchRow) -> WorkerGroup:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        workers = WorkerGroup(row, self.setting, folder, self.fork_server, patience=PATIENCE)
        workers.start()
        try:
            workers.ready()
        except BaseException:
            workers.close()
            raise
        return workers

    def _trained(self, trained: TrainedRow, rate: float, m: int | None) -> dict[str, Any]:
        """The result of a run, for the record."""
        lr = rate * OPTIMIZERS[trained.optimizer].lr(self.setting.batch_size, 1)
        run: dict[str, Any] = {"rate": rate, "lr": lr, "outcome": "not reached", "reason": None}
        curve: list[Measurement] = []
        try:
            with closing(self._started(trained.row)) as workers:
                run["weights"] = self._begin(workers, trained, lr, m)
                run["outcome"], run["order"] = self._until(workers, curve, f"{trained.name}, lr {lr:g}")
        except RowFailedError as error:
            run |= {"outcome": "diverged" if error.diverged else "failed", "reason": str(error)}
        there = reached(self.request.target, curve)
        return {
            **run,
            "samples": there[0] if there else None,
            "seconds": there[1] if there else None,
            "best": best(self.request.target, curve),
            "curve": [asdict(point) for point in curve],
        }

    def _begin(self, workers: WorkerGroup, trained: TrainedRow, lr: float, m: int | None) -> str:
        """Build the row in all workers; the hash of its initial weights, which must be that of all others."""
        per_epoch = self.data.train_samples // self.setting.batch_size
        recipe = self.request.recipe(
            self.setting.batch_size, optimizer=trained.optimizer, lr=lr, warmup=WARMUP * self.updates / per_epoch
        )
        given = {
            "recipe": recipe,
            "folder": self.request.data_dir,
            "m": m,
            "validation_samples": self.request.validation_samples,
        }
        hashes = {answer["weights"] for answer in workers.ask("begin", given)}
        hashes |= {run["weights"] for row in self.found.values() for run in row["runs"] if "weights" in run}
        if len(hashes) > 1:
            raise UserError(f"{trained.name} does not have the initial weights of the other rows: use another out=")
        return hashes.pop()

    def _until(self, workers: WorkerGroup, curve: list[Measurement], name: str) -> tuple[str, str]:
        """Train until the target or the last sample; adds to the curve. The outcome, and a hash of the targets read."""
        target, updates, seconds = self.request.target, 0, 0.0
        while True:
            answers = workers.ask("evaluate")
            found = next(answer["found"] for answer in answers if answer["found"] is not None)
            order = next(answer["order"] for answer in answers if answer["order"] is not None)
            point = Measurement(updates * self.setting.batch_size, seconds, found["loss"], found["error"])
            if not math.isfinite(point.loss):
                return "diverged", order
            curve.append(point)
            value = target.of(point)
            self.runner.report(f"{name}: {target.metric} {value:.4g}, {point.samples:,} samples, {seconds:.1f} s")
            if value <= target.value:
                if updates == 0:
                    raise UserError(
                        f"until_{target.metric}={target.value:g}: the initial weights have {value:.4g}, use a lower one"
                    )
                return "reached", order
            if updates == self.updates:
                return "not reached", order
            if not self.runner.has_time():
                return NO_TIME, order
            count = min(self.every, self.updates - updates)
            seconds += max(answer["seconds"] for answer in workers.ask("train", count))
            updates += count

    # ---- the record

    def as_dict(self) -> dict[str, Any]:
        order = {trained.name: place for place, trained in enumerate(self.rows)}
        rows = sorted(self.found.values(), key=lambda row: order.get(row["name"], len(order)))
        return {
            "settings": {
                **self.setting.as_dict(),
                **settings_of_request(self.request, self.data),
                "partition": self.request.partition,
                "every": self.every,
                "warmup_samples": int(WARMUP * self.updates) * self.setting.batch_size,
                "cores": len(cores_here()),
                "cores_shared": len(cores_here()) < self.setting.K,
            },
            "rows": [row for row in rows if row],
            "left_out": self.left_out,
            "provenance": self.origin,
        }

    def write(self) -> None:
        self.runner.write(RECORD, self.as_dict(), indent=1)


def split(row: BenchRow, request: UntilRequest, setting: BenchSetting) -> BenchRow:
    """The row. If its method takes M and none is given, it gets the number of micro-batches that `chosen_number` finds,
    or the default M where none of those tried divides an update."""
    takes = settings_of(row.setting) if row.kind == "pipeline" else {}
    chooses = "M" in takes and "m" not in takes and not is_given(row, request, setting)
    if not chooses or not micro_batches(row, setting, request.micro_batches):
        return row
    return replace(row, swept=True, micro=True)


def is_given(row: BenchRow, request: UntilRequest, setting: BenchSetting) -> bool:
    """Whether the user has given M of a row."""
    return request.M is not None or "M" in setting.methods.get(row.setting, {})


def chosen_number(row: BenchRow, sweep: Mapping[int, float]) -> int | None:
    """The number of micro-batches of a row, from the seconds of those tried: the fastest; for late gradients the
    largest that takes about as long, as `method="auto"` chooses M, since they are then less late.

    >>> seconds = {4: 0.105, 8: 0.1, 16: 0.11, 32: 0.2}
    >>> chosen_number(BenchRow("gpipe", "", "pipeline", "gpipe", swept=True), seconds)
    8
    >>> chosen_number(BenchRow("adl", "", "pipeline", "adl", swept=True, micro=True), seconds)
    16
    """
    if not sweep:
        return None
    return largest_efficient(sweep) if row.micro else min(sweep, key=lambda m: sweep[m])


def settings_of_request(request: UntilRequest, data: DataSet) -> dict[str, Any]:
    """What a record must have in common with a command that continues it, besides the setting of its rows."""
    described = getattr(data, "as_record", None)
    return {
        "metric": request.target.metric,
        "target": request.target.value,
        "samples": request.samples,
        "validation_samples": min(request.validation_samples, data.test_samples),
        "data": data.name,
        "text": described() if described else None,
        "optimizer": request.optimizer,
        "seed": request.seed,
        "against": request.against,
        "given_M": request.M,
        "micro_batches": request.micro_batches,
    }


def until(request: UntilRequest, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """All runs. With `out` it continues the record there; Ctrl-C keeps the runs that have ended."""
    machines.check(request.K, request.device)
    check_cores(workers_here(request.K), instead="")
    setting, data = request.setting(), request.open()
    if data.train_samples < setting.batch_size:
        name = "batch_size" if request.batch_per_update is None else "batch_per_update"
        raise UserError(
            f"{name}={setting.batch_size}, but {data.name} has {data.train_samples} training samples: use "
            "fewer samples per update"
        )
    if request.samples < setting.batch_size:
        raise UserError(f"samples={request.samples}: an update has {setting.batch_size}, use at least as many")
    given = tuple(settings_by_method(request.methods, request.M))
    rows = [split(row, request, setting) for row in chosen(request.against, methods=given) if not row.micro]
    task = make_recipe(**request.recipe(1)).task
    trained = TrainedRow.all_of(rows, default=task.defaults["optimizer"], given=request.optimizer)
    out = folder_for(request.out, f"until-{file_name(setting.model)}-b{setting.batch_size}-K{setting.K}", RECORD)
    made = origin()
    runner = StudyRunner(out, request.minutes, show)
    settings = {**identity(request, setting), **settings_of_request(request, data)}
    if request.every:
        settings["every"] = request.every
    earlier = stored(out / RECORD, settings, made) or {}
    setting = request.placed(setting, rows, earlier, runner)
    if shared := shared_cores(setting.K):
        print(f"offbeat: {shared}", file=sys.stderr)
    if earlier:
        request = replace(request, every=earlier["settings"]["every"])
        runner.report(f"continuing the record of {sum(len(row['runs']) for row in earlier['rows'])} runs")
    found = {row["name"]: row for row in earlier.get("rows", [])}
    study = UntilBench(request, setting, data, runner, trained, made, found)
    with runner.opened(partial(finish, study), arguments=f" with out={str(out)!r}"):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder, closing(study.fork_server):
            study.go(Path(folder))
        finish(study)
    return study.as_dict(), out


def finish(study: UntilBench) -> None:
    """Write the record and the table of the runs that have ended."""
    study.write()
    study.runner.write("until.md", until_table.page(study.as_dict()))
