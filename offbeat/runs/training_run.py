"""The epochs of a run: training, reports, evaluation, records."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import data
from offbeat.core.stage_report import Report, Staleness
from offbeat.data.text import Text
from offbeat.pipeline import Pipeline
from offbeat.runs.build import Facts, test_batch_size
from offbeat.runs.epochs import Epochs
from offbeat.runs.history import History, SpeedMeter
from offbeat.runs.progress import Progress
from offbeat.runs.recipe import Recipe
from offbeat.runs.record import Diagnoses, RunFolder
from offbeat.runs.saving import Saver
from offbeat.runs.task import CLASSIFICATION, bits_per_byte
from offbeat.runs.telemetry import Telemetry

REPORTS_PER_EPOCH = 20
RECORDED_REPORTS = 4  # likewise, with recorded stages: a report waits for their launch queues


class TrainingRun:
    """One run in one process, ready to train: epochs, reports, evaluation, records, checkpoints.

    Every process of a run has one. The process of the first stage reads the data, and writes the records.
    """

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
        before: Mapping[str, Any],
        *,
        notes: Iterable[str] = (),
        name: str = "",
        reports: int = REPORTS_PER_EPOCH,
        apart: Collection[int] = (),
        locks: ExitStack | None = None,
    ) -> None:
        """
        folder    where the records go; None in processes without the first stage
        before    run.json of the checkpoint that the run continues from
        notes     lines to print
        name      of a run that is not the only one on the screen
        reports   per epoch
        apart     stages whose processes do not see the run folder
        locks     on the run folder, held until the run is closed
        """
        self.locks = locks or ExitStack()
        self.recipe, self.known, self.pipe, self.folder, self.data_set = recipe, known, pipe, folder, data_set
        self.epochs = epochs
        self.telemetry = Telemetry(pipe)
        reports = min(reports, RECORDED_REPORTS) if pipe.engine.defers else reports
        self.report_every = max(1, epochs.per_epoch // reports)
        visible = show and folder is not None
        done = int(epochs.progress(pipe.batches))
        self.task, self.per_sample = recipe.task, recipe.task.per_sample(known.shape)
        self.progress = Progress(recipe.epochs, epochs.per_epoch, show=visible, done=done, name=name, task=self.task)
        self.history, self.speed = History.of(before), SpeedMeter()
        self.saver = Saver(recipe, epochs, pipe, out, self._note, apart=apart)
        self.diagnoses = Diagnoses(out, pipe.batches) if recipe.diagnose and folder else None
        for note in notes:
            self.progress.print(note)
        if recipe.trace:
            pipe.trace(recipe.trace, out / "trace.json", notify=self.progress.print)

    @property
    def first_epoch(self) -> int:
        """The epoch of the next batch."""
        return self.epochs.epoch_of(self.pipe.batches)

    def stop(self, why: str) -> None:
        """Save a checkpoint soon and stop, in all processes; the first process decides."""
        if self.pipe.leads:
            self.saver.stop(why)

    def fit(self) -> dict[str, Any] | None:
        """Train all epochs; returns the result in the process of the first stage."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: dict[str, Any] | None = end.value
                return result

    def steps(self) -> Generator[None, None, dict[str, Any] | None]:
        """`fit` as a generator that yields after every batch and epoch. A run whose generator is closed early can be
        resumed from its newest checkpoint."""
        self.history.began = time.perf_counter()
        with self.progress:
            yield from self.pipe.steps(
                self._batches,
                self.recipe.epochs,
                first_epoch=self.first_epoch,
                before_step=self.saver.before,
                after_step=self._after_step,
                after_epoch=self._after_epoch,
                own_share=self._own_share,
            )
            self.saver.save_end(self.history.as_dict())
            self.saver.close()
            self._report_drain()
        result = self._write_result() if self.folder else None
        self.pipe.close()
        return result

    def _report_drain(self) -> None:
        """Write the diagnosis of the last batches and print its summary, and print that a trace is missing."""
        if self.recipe.diagnose:
            self.telemetry.send()
            self._write(self.telemetry.collect(wait=True))
            summary = self.diagnoses.summary() if self.diagnoses else None
            if summary:
                self.progress.print(summary)
        if self.pipe.tracing is not None or self.pipe.trace_requested:
            self.progress.print("trace: nothing was recorded, since the run ended before the pipeline was full")

    def _write_result(self) -> dict[str, Any]:
        """Write the model and the last line of the records."""
        assert self.folder is not None
        method, K = self.pipe.method, self.pipe.K
        self.folder.model(self.pipe.model.state_dict())
        speed = median(self.history.speeds[1:] or self.history.speeds)
        result = {
            **self._evaluated(),
            "samples_per_second": speed,
            self.task.speed_key: speed * self.per_sample,
            "seconds": self.history.elapsed,
            "staleness": [stage.mean for stage in self.pipe.staleness],
            "staleness_formula": [method.staleness(k, K) for k in range(1, K + 1)],
            "memory": self.history.memory,
        }
        self.folder.line("result", **result)  # without the path of the folder, which may be moved
        return {**result, "out": str(self.folder.path)}

    def _evaluated(self) -> dict[str, Any]:
        """The results of the last evaluation, under their names in the records."""
        return self.task.evaluated(self.history.test, self._bytes_per_token)

    @property
    def _bytes_per_token(self) -> float | None:
        return self.data_set.bytes_per_token if isinstance(self.data_set, Text) else None

    def _training_metric(self, loss: float | None) -> dict[str, float | None]:
        """The metric of text on the training windows of an epoch."""
        per_token = self._bytes_per_token
        if per_token is None:
            return {}
        return {f"train_{self.task.key}": None if loss is None else bits_per_byte(loss, per_token)}

    def _batches(self, epoch: int) -> Iterable[tuple[Any, Any]]:
        assert self.data_set is not None
        self.speed.start_epoch()
        return self.data_set.train(
            batch_size=self.recipe.batch_size,
            seed=self.recipe.seed,
            epoch=epoch,
            skip=self.epochs.position(self.pipe.batches)[1],  # samples before the checkpoint, if resumed
            drop_last=self.recipe.drop_last,
            share=(self.pipe.replica, self.pipe.replicas) if self._own_share else (0, 1),
        )

    @property
    def _own_share(self) -> bool:
        """Whether this process reads the batches of its own replica alone."""
        return len(self.pipe.engine.replicas_here) < self.pipe.replicas

    def _after_step(self, t: int) -> None:
        self.progress.step()
        if int(self.epochs.progress(t)) % self.epochs.per_epoch % self.report_every == self.report_every - 1:
            self.telemetry.send()
            self._write(self.telemetry.collect())
        if not self.epochs.ends_epoch(t + 1) and self.saver.due(t + 1):  # at the end of an epoch, after evaluation
            self.saver.save(self.history.as_dict())
        self.saver.collect()

    def _note(self, kind: str, **values: Any) -> None:
        """Record what became of a checkpoint; print it if the checkpoint failed."""
        if self.folder:
            self.folder.line(kind, **values)
        if "reason" in values:
            self.progress.print(f"{kind} (training continues): {values['reason']}")

    def _after_epoch(self, epoch: int) -> Iterator[None]:
        self.telemetry.send()
        self._write(self.telemetry.collect(wait=True))
        seconds = self.speed.epoch_seconds()  # until the last stage has finished, without evaluation
        size = test_batch_size(self.recipe, self.known)
        batches = self.data_set.test(batch_size=size) if self.data_set else None
        self.history.test = yield from self.pipe.evaluating(batches)
        if self.folder:
            self._write_epoch(epoch, seconds)
        self.history.rows.clear()
        if self.saver.due(self.pipe.batches):
            self.saver.save(self.history.as_dict())

    def _write(self, sets: list[list[Report]]) -> None:
        """Write a training line for each set of K reports."""
        for reports in sets:
            last, first = reports[-1], reports[0]
            self.history.memory = [report.memory for report in reports]
            if self.diagnoses:
                lines = (line for report in reports for line in report.diagnosis)
                self.diagnoses.add([{**line, "epoch": self.epochs.epoch_of(line["batch"])} for line in lines])
            error = last.error if self.task is CLASSIFICATION else None
            self.history.rows.append({"loss": last.loss, "error": error, "samples": last.samples})
            if not first.samples or not self.folder:
                continue
            staleness = [Staleness(report.staleness).mean for report in reports]
            speed = self.speed.report(first.samples * self.recipe.replicas)
            self.folder.line(
                "train",
                batch=first.t,
                epoch=self.epochs.epoch_of(first.t),
                loss=last.loss,
                error=error,
                samples_per_second=speed,
                lr=first.lr,
                staleness=staleness,
                in_flight=[report.in_flight for report in reports],
                versions=[report.versions for report in reports],
                memory=[report.memory for report in reports],
                skipped=max(report.skipped for report in reports),
            )
            self.folder.scalars(first.t, train__loss=last.loss, train__error=error, train__lr=first.lr)
            self.progress.update(last.loss, error, speed * self.per_sample, staleness)

    def _write_epoch(self, epoch: int, seconds: float) -> None:
        assert self.folder is not None
        train = self.history.train_means()
        speed = self.speed.samples / seconds
        speeds = {"samples_per_second": speed, self.task.speed_key: speed * self.per_sample}
        self.history.speeds.append(speed)
        values = {
            "train_loss": train["loss"],
            "train_error": train["error"],
            **self._training_metric(train["loss"]),
            **{f"test_{name}": value for name, value in self._evaluated().items()},
        }
        staleness = [stage.mean for stage in self.pipe.staleness]
        self.folder.line(
            "epoch",
            epoch=epoch,
            batches=self.pipe.batches,
            seconds=seconds,
            **speeds,
            staleness=staleness,
            memory=self.history.memory,
            **values,
        )
        self.folder.scalars(
            self.pipe.batches,
            test__loss=values["test_loss"],
            **{f"test__{self.task.key}": values[f"test_{self.task.key}"]},
            **{f"speed__{name}": value for name, value in speeds.items()},
        )
        self.progress.epoch(epoch, values, speed * self.per_sample, staleness)

    def close(self) -> None:
        if self.folder:
            self.folder.close()
        self.locks.close()
