"""The epochs of a run: training, reports, evaluation, records."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import data
from offbeat.core.stage_report import Report, Staleness
from offbeat.pipeline import Pipeline
from offbeat.runs.build import Facts, test_batch_size
from offbeat.runs.epochs import Epochs
from offbeat.runs.progress import Progress
from offbeat.runs.recipe import Recipe
from offbeat.runs.record import Diagnoses, RunFolder
from offbeat.runs.saving import Saver
from offbeat.runs.telemetry import Telemetry

REPORTS_AN_EPOCH = 20


class TrainingRun:
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
        reports = min(reports, 4) if pipe.engine.records else reports  # which make recorded stages catch up
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
