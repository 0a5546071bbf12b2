"""One training run, from a resolved recipe to a run folder; the same code in one process and in each of K."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from offbeat import data, models
from offbeat import partitioning as cutting
from offbeat.checkpoint.folder import FOLDER
from offbeat.core.precision import PrecisionPolicy
from offbeat.core.stage_report import Report, Staleness
from offbeat.engines import Engine
from offbeat.engines.choose import choose_engine
from offbeat.errors import FolderTaken, UserError
from offbeat.observe import diagnosis
from offbeat.pipeline import Pipeline
from offbeat.runs import lock, saving, transfer
from offbeat.runs.epochs import Epochs
from offbeat.runs.progress import Progress
from offbeat.runs.recipe import Recipe, cores
from offbeat.runs.record import Diagnoses, RunFolder
from offbeat.runs.saving import Saver
from offbeat.runs.telemetry import Telemetry
from offbeat.seeds import derive

REPORTS_AN_EPOCH = 20
TESTED = 2000 * 3 * 32 * 32  # numbers in what a GPU evaluates at once
MOST_WORKERS = 8  # that decode images, unless a recipe says it
DATA_DIR = "OFFBEAT_DATA_DIR"  # where the data of recipes lie that do not say it


@dataclass(frozen=True)
class Facts:
    """What must be known of the data to build a model and a schedule; the other processes never open the data."""

    shape: tuple[int, int, int]
    classes: int
    samples: int  # of a training epoch


def open_data(recipe: Recipe) -> data.DataSet:
    """The recipe's data; a recipe that names no folder takes that of OFFBEAT_DATA_DIR, which no record repeats."""
    kind = data.KINDS.get(recipe.data)
    outside = os.environ.get(DATA_DIR) if kind and kind.layout else None
    workers = min(cores(), MOST_WORKERS) if recipe.data_workers is None else recipe.data_workers
    return data.open(
        recipe.data,
        folder=recipe.data_dir or outside,
        shape=shape_of(recipe.shape),
        classes=recipe.classes,
        samples=recipe.samples,
        workers=workers,
    )


def move_data(recipe: Recipe, data_set: data.DataSet | None) -> tuple[data.DataSet | None, list[str]]:
    """The data where the first stage takes it from: on its device, if that is no CPU and has room. Else a note."""
    if data_set is None or recipe.device == "cpu":
        return data_set, []
    moved, note = data.on_device(data_set, recipe.device)
    return moved, [note] if note else []


def shape_of(sizes: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    if sizes is None:
        return None
    if len(sizes) != 3:
        raise UserError(f"shape {list(sizes)}: give channels, height and width, such as 3,32,32")
    return sizes[0], sizes[1], sizes[2]


def facts(recipe: Recipe, data_set: data.DataSet) -> Facts:
    return Facts(data_set.shape, data_set.classes, data_set.train_samples)


def build_model(recipe: Recipe, known: Facts) -> nn.Sequential:
    """The model with the initial weights of the recipe's seed; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "model"))
        return models.build(recipe.model, shape=known.shape, classes=known.classes)


def check(recipe: Recipe, data_set: data.DataSet | None = None) -> tuple[Recipe, Facts]:
    """Everything that can be wrong before training: data, model, K, cuts. Returns the recipe with its cuts."""
    if recipe.model not in models.names():
        models.build(recipe.model)  # tells what is allowed before any data is read
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here: use --device cpu")
    PrecisionPolicy.of(recipe.precision, torch.device(recipe.device))
    recipe.make_method().check(recipe.K)
    if recipe.diagnose:
        diagnosis.check(recipe.diagnose, recipe.make_method())
    known = facts(recipe, data_set or open_data(recipe))
    saving.check(recipe)
    recipe.count(known.samples)
    return replace(recipe, **choose_cuts(recipe, known)), known


def choose_cuts(recipe: Recipe, known: Facts) -> dict[str, Any]:
    """Where to cut: by FLOPs on the meta device, or by what the units take here."""
    sample = torch.empty(recipe.batch_size, *known.shape, device="meta")
    if recipe.partition == "measured" and recipe.cuts is None:
        torch.set_num_threads(recipe.threads_per_stage)
        model, sample = build_model(recipe, known), torch.randn(recipe.batch_size, *known.shape)
    else:
        with torch.device("meta"):
            model = models.build(recipe.model, shape=known.shape, classes=known.classes)
    kind = recipe.units or ("layers" if recipe.partition == "measured" else None)
    made = cutting.partition(
        model, recipe.K, sample, cuts=recipe.cuts, units=kind, by=recipe.partition, speeds=recipe.speeds
    )
    return {"cuts": tuple(made.cuts), "units": made.units}


def train(recipe: Recipe, out: Path, *, show: bool = True, folder_ready: bool = False) -> dict[str, Any] | None:
    """Run the recipe in this process, or in this process's share of a group; the result where the first stage is.

    folder_ready: the run folder is there already, made by whoever started this process. Where it holds a checkpoint,
    the run goes on from there.
    """
    run = begin(recipe, out, show=show, folder_ready=folder_ready)
    try:
        with stopping(run.stop):
            return run.fit()
    finally:
        run.close()


def begin(
    recipe: Recipe,
    out: Path,
    *,
    show: bool = True,
    folder_ready: bool = False,
    data_set: data.DataSet | None = None,
    name: str = "",
    reports: int = REPORTS_AN_EPOCH,
) -> Run:
    """A run that is ready to train, see `train`; it trains by `fit`, or a little at a time by `steps`.

    data_set   the recipe's, where it is open already; runs of one process can share it
    name       what the run is called on the screen, where it is not alone there
    """
    torch.set_num_threads(recipe.threads_per_stage)
    torch.backends.cudnn.benchmark = recipe.tune
    device = torch.device(recipe.device)
    engine = choose_engine(recipe.engine, recipe.K, method=recipe.make_method(), device=device)
    with engine.guard(), ExitStack() as locks:
        known = None
        if 1 in engine.here:
            data_set = data_set or open_data(recipe)
            known = facts(recipe, data_set)
            if recipe.cuts is None:
                recipe = replace(recipe, **choose_cuts(recipe, known))
        shared = engine.share(known and [known.shape, known.classes, known.samples, recipe.cuts, recipe.units], 1)
        known = Facts(*shared[:3])
        recipe = replace(recipe, cuts=tuple(shared[3]), units=shared[4])
        folder, apart = enter(recipe, out, engine, locks, ready=folder_ready)
        found = find_checkpoint(recipe, engine, out) if folder_ready else NOTHING_SAVED
        epochs = saving.continued(recipe, known.samples, found.run)
        pipe = make_pipeline(recipe, known, epochs, engine)
        notes = resume(recipe, pipe, found, folder, apart) if folder_ready else []
        data_set, others = move_data(recipe, data_set)
        if apart:
            others.append(f"stages that do not see {out} send their parts of checkpoints to stage 1: {apart}")
        before = {**found.run, "notes": [*notes, *others]}
        return Run(
            recipe,
            known,
            epochs,
            pipe,
            folder,
            data_set,
            show,
            out,
            before,
            name=name,
            reports=reports,
            apart=apart,
            locks=locks.pop_all(),
        )


def enter(
    recipe: Recipe, out: Path, engine: Engine, locks: ExitStack, *, ready: bool
) -> tuple[RunFolder | None, list[int]]:
    """The run folder where the first stage is, held by all processes; and the stages whose processes do not see it.

    Where it cannot be had, all processes are told why, and raise.
    """
    folder, told = None, {}
    if 1 in engine.here:
        try:
            told["token"] = locks.enter_context(lock.held(out))
            folder = RunFolder(out) if ready else RunFolder.create(out, recipe)
        except UserError as error:
            told = {"refused": str(error)}
    told = engine.share(told, 1)
    if "refused" in told:
        raise FolderTaken(told["refused"])
    sees = folder is not None or locks.enter_context(lock.joined(out, told["token"]))
    return folder, [k for k, there in enumerate(engine.exchange(sees), start=1) if not there]


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint of a run, as every process knows it; `run` is its run.json, empty where there is none."""

    path: Path | None
    run: dict[str, Any]
    same: bool  # whether the batches in flight can go on
    notes: list[str]


NOTHING_SAVED = Saved(None, {}, True, [])


def find_checkpoint(recipe: Recipe, engine: Engine, out: Path) -> Saved:
    """Look for it in the first process, and share what was found; the folder may have another path elsewhere."""
    shared = None
    if 1 in engine.here:
        found, notes = saving.find(out)
        run = found.run() if found else {}
        shared = [found and found.path.name, run, saving.exact(recipe, run["recipe"]) if run else True, notes]
    name, run, same, notes = engine.share(shared, 1)
    return Saved(None if name is None else out / FOLDER / name, run, same, notes)


def resume(
    recipe: Recipe, pipe: Pipeline, found: Saved, folder: RunFolder | None, apart: Collection[int] = ()
) -> list[str]:
    """Put the pipeline into the state of a checkpoint, if there is one; notes on what was lost.

    apart: stages whose processes do not see the run folder.
    """
    notes = list(found.notes)
    if found.path is not None:
        with transfer.at_hand(pipe.engine, found.path, apart, whole=not found.same) as path:
            notes += saving.restore(pipe, recipe, str(path), found.run["recipe"], same=found.same)
    if folder:
        folder.go_on(pipe.batches, notes, exact=found.same)
    return notes


@contextmanager
def stopping(stop: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C or SIGTERM once asks for a checkpoint and the end; a second one, a second later or more, ends at once.

    (A terminal's Ctrl-C reaches a worker twice: from the terminal, and from its launcher.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def handle(number: int, frame: object) -> None:
        now = time.monotonic()
        if first and now - first[0] >= 1.0:
            raise KeyboardInterrupt
        if not first:
            first.append(now)
            stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_pipeline(recipe: Recipe, known: Facts, epochs: Epochs, engine: Engine) -> Pipeline:
    factor = recipe.learning_rate(epochs)

    def optimizer(parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=recipe.device == "cuda" or None,  # which can read its rate on the device
        )

    pipe = Pipeline(
        build_model(recipe, known),
        recipe.K,
        method=recipe.make_method(),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, factor),
        cuts=recipe.cuts,
        units=recipe.units,
        clip_norm=recipe.clip_norm,
        engine=engine,
        seed=recipe.seed,
        device=recipe.device,
        sample=torch.zeros(1, *known.shape),
        left_out=recipe.left_out or (),
        on_nan="skip" if recipe.on_nan == "skip" else "stop",
        precision=recipe.precision,
        compile=recipe.compile,
        fuse=recipe.fuse,
        weighting=recipe.weighting,
    )
    if recipe.diagnose:
        pipe.diagnose(recipe.diagnose)
    return pipe


def test_batch_size(recipe: Recipe, known: Facts) -> int:
    """Samples that are evaluated at once: on a GPU many, since an evaluation there waits for launches."""
    many = TESTED // math.prod(known.shape) if recipe.device == "cuda" else 0
    return max(100, recipe.batch_size, many)


class Run:
    """The epochs of a run: training, reports, evaluation, records. Each process has one; the first writes."""

    def __init__(
        self,
        recipe: Recipe,
        known: Facts,
        epochs: Epochs,
        pipe: Pipeline,
        folder: RunFolder | None,
        data_set: data.DataSet | None,
        show: bool,
        out: Path,
        before: dict[str, Any],
        *,
        name: str = "",
        reports: int = REPORTS_AN_EPOCH,
        apart: Collection[int] = (),
        locks: ExitStack | None = None,
    ) -> None:
        self.locks = locks or ExitStack()  # on the run folder, until it is closed
        self.recipe, self.known, self.pipe, self.folder, self.data_set = recipe, known, pipe, folder, data_set
        self.epochs = epochs
        self.telemetry = Telemetry(pipe)
        reports = min(reports, 4) if pipe.engine.defers else reports  # each interrupts queued work
        self.every = max(1, epochs.per_epoch // reports)
        visible = show and folder is not None
        done = int(epochs.progress(pipe.batches))
        self.progress = Progress(recipe.epochs, epochs.per_epoch, show=visible, done=done, name=name)
        self.epoch_began = time.perf_counter()
        self.told = self.began = time.perf_counter()
        self.entered = 0
        # What an earlier process has done of this run: training lines of the epoch, speeds of epochs, all its time.
        self.rows: list[dict[str, Any]] = list(before.get("rows", []))
        self.speeds: list[float] = list(before.get("speeds", []))
        self.seconds: float = before.get("seconds", 0.0)
        self.test: dict[str, Any] = before.get("test", {})
        self.memory: list[int] = list(before.get("memory", []))  # bytes of every stage, at its fullest
        self.saver = Saver(recipe, epochs, pipe, out, self._note, apart=apart)
        self.diagnoses = Diagnoses(out, pipe.batches) if recipe.diagnose and folder else None
        for note in before.get("notes", []):
            self.progress.say(note)
        if recipe.trace:
            pipe.trace(recipe.trace, out / "trace.json", tell=self.progress.say)

    @property
    def first_epoch(self) -> int:
        """The epoch of the next batch."""
        return self.epochs.epoch_of(self.pipe.batches)

    def stop(self, why: str) -> None:
        """Save as soon as may be, then end, in all processes: the first one decides."""
        if self.pipe.first:
            self.saver.stop(why)

    def fit(self) -> dict[str, Any] | None:
        """Train to the end; the result where the first stage is."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: dict[str, Any] | None = end.value
                return result

    def steps(self) -> Generator[None, None, dict[str, Any] | None]:
        """`fit`, yielding behind every batch and every epoch; closed before its end, the run goes on from its newest
        checkpoint another time."""
        self.began = time.perf_counter()
        with self.progress:
            yield from self.pipe.steps(
                self._batches,
                self.recipe.epochs,
                first_epoch=self.first_epoch,
                before_step=self.saver.before,
                after_step=self._after_step,
                after_epoch=self._after_epoch,
            )
            self.saver.close()
            self._look_back()
        result = None
        if self.folder:
            self.folder.model(self.pipe.model.state_dict())
            result = {
                **{name: self.test[name] for name in ("loss", "error", "top5")},
                "samples_per_second": median(self.speeds[1:] or self.speeds),
                "seconds": self.seconds + time.perf_counter() - self.began,
                "staleness": [stage.mean for stage in self.pipe.staleness],
                "staleness_formula": self._formula(),
                "memory": self.memory,
            }
            self.folder.line("result", **result)  # without the folder's name, which may change
            result["out"] = str(self.folder.path)
        self.pipe.close()
        return result

    def _look_back(self) -> None:
        """What the drain had to tell of late gradients, and of a trace that did not come about."""
        if self.recipe.diagnose:
            self.telemetry.tell()
            self._write(self.telemetry.collect(wait=True))
        if self.pipe.tracing is not None:
            self.progress.say("trace: nothing was recorded, the run was over before all stages were full")

    def _formula(self) -> list[float]:
        method, K = self.pipe.method, self.pipe.K
        return [method.staleness(k, K) for k in range(1, K + 1)]

    def _batches(self, epoch: int) -> Iterable[tuple[Any, Any]]:
        assert self.data_set is not None
        self.epoch_began = self.told = time.perf_counter()
        self.entered = 0  # samples of the epoch, in this process's time
        skip = self.epochs.position(self.pipe.batches)[1]  # above 0 where a run goes on
        return self.data_set.train(
            batch_size=self.recipe.batch_size,
            seed=self.recipe.seed,
            epoch=epoch,
            skip=skip,
            drop_last=self.recipe.drop_last,
        )

    def _after_step(self, t: int) -> None:
        self.progress.step()
        if int(self.epochs.progress(t)) % self.epochs.per_epoch % self.every == self.every - 1:
            self.telemetry.tell()
            self._write(self.telemetry.collect())
        if not self.epochs.ends_epoch(t + 1) and self.saver.due(t + 1):  # at its end an epoch is evaluated first
            self._save()
        self.saver.collect()

    def _save(self) -> None:
        self.saver.save(
            {
                "rows": self.rows,
                "speeds": self.speeds,
                "test": self.test,
                "memory": self.memory,
                "seconds": self.seconds + time.perf_counter() - self.began,
            }
        )

    def _note(self, kind: str, **values: Any) -> None:
        """What became of a checkpoint: a line of the records, and of the screen where it failed."""
        if self.folder:
            self.folder.line(kind, **values)
        if "reason" in values:
            self.progress.say(f"{kind} (training goes on): {values['reason']}")

    def _after_epoch(self, epoch: int) -> Iterator[None]:
        self.telemetry.tell()
        self._write(self.telemetry.collect(wait=True))
        seconds = time.perf_counter() - self.epoch_began  # until the last stage had finished, evaluation not counted
        size = test_batch_size(self.recipe, self.known)
        self.test = yield from self.pipe.evaluating(self.data_set.test(batch_size=size) if self.data_set else None)
        if self.folder:
            self._write_epoch(epoch, seconds)
        self.rows.clear()
        if self.saver.due(self.pipe.batches):
            self._save()

    def _write(self, sets: list[list[Report]]) -> None:
        """A training line for each complete set of reports."""
        for reports in sets:
            top, bottom = reports[-1], reports[0]
            self.memory = [report.memory for report in reports]
            if self.diagnoses:
                self.diagnoses.add(
                    [
                        {**line, "epoch": self.epochs.epoch_of(line["batch"])}
                        for report in reports
                        for line in report.diagnosis
                    ]
                )
            self.rows.append({"loss": top.loss, "error": top.error, "samples": top.samples})
            now = time.perf_counter()
            self.entered += bottom.samples
            if not bottom.samples or not self.folder:
                continue
            staleness = [Staleness(report.staleness).mean for report in reports]
            speed = bottom.samples / max(1e-9, now - self.told)
            self.told = now
            self.folder.line(
                "train",
                batch=bottom.t,
                epoch=self.epochs.epoch_of(bottom.t),
                loss=top.loss,
                error=top.error,
                samples_per_second=speed,
                lr=bottom.lr,
                staleness=staleness,
                in_flight=[report.in_flight for report in reports],
                versions=[report.versions for report in reports],
                memory=[report.memory for report in reports],
                skipped=max(report.skipped for report in reports),
            )
            self.folder.scalars(bottom.t, train__loss=top.loss, train__error=top.error, train__lr=bottom.lr)
            self.progress.tell(top.loss, top.error, speed, staleness)

    def _write_epoch(self, epoch: int, seconds: float) -> None:
        assert self.folder is not None
        tops = [row for row in self.rows if row["samples"] and row["loss"] is not None]
        samples = sum(row["samples"] for row in tops)
        train = {
            name: sum(row[name] * row["samples"] for row in tops) / samples if samples else None
            for name in ("loss", "error")
        }
        speed = self.entered / seconds
        self.speeds.append(speed)
        values = {
            "train_loss": train["loss"],
            "train_error": train["error"],
            "test_loss": self.test["loss"],
            "test_error": self.test["error"],
            "test_top5": self.test["top5"],
        }
        staleness = [stage.mean for stage in self.pipe.staleness]
        self.folder.line(
            "epoch",
            epoch=epoch,
            batches=self.pipe.batches,
            seconds=seconds,
            samples_per_second=speed,
            staleness=staleness,
            memory=self.memory,
            **values,
        )
        self.folder.scalars(
            self.pipe.batches,
            test__loss=values["test_loss"],
            test__error=values["test_error"],
            speed__samples_per_second=speed,
        )
        self.progress.epoch(epoch, values, speed, staleness)

    def close(self) -> None:
        if self.folder:
            self.folder.close()
        self.locks.close()
