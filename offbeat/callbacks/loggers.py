"""Figures of training in a CSV file, for TensorBoard, or for Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any, TextIO

from offbeat.errors import PackageMissing, number, require, warn_caller
from offbeat.pipeline.callback import TrainingStep
from offbeat.pipeline.checks import path_of, writing

ROW = 4096  # bytes that the last row of a file is searched in


class Logger(ABC):
    """Writes figures by batch, in the first process alone: training loss, learning rate and samples per second every
    `every` batches, and all numbers of evaluations. A loss is written under its own batch, however late it arrives."""

    def __init__(self, *, every: int = 1) -> None:
        number(every, "every", "use a whole number of batches from 1 up", lambda n: n >= 1, whole=True)
        self.every = every

    @abstractmethod
    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        """Write figures of a batch, by name."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened; the next figure opens it again."""

    def on_step(self, step: TrainingStep) -> None:
        if not step.pipe.leads:
            return
        self._write_losses(step)
        if step.batch % self.every == 0:
            figures = {"lr": step.lr, "samples_per_second": step.samples_per_second}
            self.write(step.batch, {name: value for name, value in figures.items() if value is not None})

    def _write_losses(self, step: TrainingStep) -> None:
        for batch, loss in step.losses.items():
            if batch % self.every == 0:
                self.write(batch, {"train/loss": loss})

    def on_evaluate(self, step: TrainingStep, result: Mapping[str, Any]) -> None:
        if step.pipe.leads:
            numbers = {f"evaluate/{name}": value for name, value in result.items() if isinstance(value, int | float)}
            self.write(step.batch, {**numbers, "epoch": step.epoch})

    def on_end(self, step: TrainingStep) -> None:
        if step.pipe.leads:
            self._write_losses(step)
            self.close()


class CSVLogger(Logger):
    """Append figures to a CSV file with a row per figure: batch, name, value. pandas makes a table of it:
    ``pandas.read_csv(path).pivot_table(index="batch", columns="name", values="value")``.

    When training resumes from a checkpoint, rows that were written after the checkpoint are removed.

    >>> import tempfile, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> path = Path(tempfile.mkdtemp()) / "training.csv"
    >>> pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 4, callbacks=[CSVLogger(path, every=2)])
    >>> [line.split(",")[:2] for line in path.read_text().splitlines() if "loss" in line]
    [['0', 'train/loss'], ['2', 'train/loss']]
    """

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every=every)
        self.path = path_of(path)
        self.file: TextIO | None = None
        self.end: tuple[int, str] | None = None  # bytes, and the last row, at the checkpoint that was loaded

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        with writing(self.path):
            self._write(batch, figures)

    def _write(self, batch: int, figures: Mapping[str, float]) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_later_rows()
            self.file = self.path.open("a", newline="", buffering=1)
            if not self.file.tell():
                self.file.write("batch,name,value\n")
        csv.writer(self.file, lineterminator="\n").writerows((batch, name, value) for name, value in figures.items())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def state_dict(self) -> dict[str, Any]:
        """How far the file is written: its bytes, and its last row."""
        if not self.path.is_file():
            return {"end": None}
        with self.path.open("rb") as file:
            size = file.seek(0, SEEK_END)
            file.seek(max(0, size - ROW))
            rows = file.read().decode().splitlines()
        return {"end": [size, rows[-1] if rows else ""]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file after what `state_dict` saw of it."""
        self.end = state["end"] and tuple(state["end"])

    def _remove_later_rows(self) -> None:
        """Those after the checkpoint that was loaded, if it is the same file."""
        end, self.end = self.end, None
        if end is None or not self.path.is_file():
            return
        size, row = end
        last = f"{row}\n".encode()
        with self.path.open("r+b") as file:
            file.seek(max(0, size - len(last)))
            if file.read(len(last)) == last:
                file.truncate(size)


class TensorBoardLogger(Logger):
    """Write TensorBoard events to a folder; without the package tensorboard, warn and write nothing.

    >>> import tempfile, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
    >>> folder = tempfile.mkdtemp()
    >>> pipe.fit(batches, callbacks=[TensorBoardLogger(folder, every=2)])
    >>> len(list(Path(folder).iterdir()))
    1
    """

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        super().__init__(every=every)
        self.folder = path_of(folder)
        self.module = installed("torch.utils.tensorboard", package="tensorboard", user="TensorBoardLogger")
        self.writer: Any = None
        self.next = 0  # after the newest batch
        self.purge: int | None = None  # TensorBoard leaves out earlier events from this batch on

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        self.next = max(self.next, batch + 1)
        if self.module is None:
            return
        if self.writer is None:
            self.writer = self.module.SummaryWriter(str(self.folder), purge_step=self.purge)
            self.purge = None
        for name, value in figures.items():
            self.writer.add_scalar(name, value, batch)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def state_dict(self) -> dict[str, Any]:
        """The batch after the newest one."""
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Events that were written after `state_dict` are left out by TensorBoard."""
        self.next = self.purge = state["next"]


class WandbLogger(Logger):
    """Send figures to Weights & Biases: options are those of `wandb.init`, such as project="digits". Without the
    package wandb, warn and send nothing."""

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every=every)
        self.options = options
        self.module = installed("wandb", package="wandb", user="WandbLogger")
        self.session: Any = None
        self.id: str | None = None

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        if self.module is None:
            return
        if self.session is None:
            self.session = self.module.init(**self.options)
            self.id = self.session.id
            self.session.define_metric("batch")
            self.session.define_metric("*", step_metric="batch")  # losses arrive after later batches
        self.session.log({"batch": batch, **{name: value for name, value in figures.items() if math.isfinite(value)}})

    def close(self) -> None:
        if self.session is not None:
            self.session.finish()
            self.session = None

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"id": self.id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the same run."""
        if state["id"] is not None:
            self.options = {"id": state["id"], "resume": "allow", **self.options}


def installed(module: str, *, package: str, user: str) -> Any:
    """The module, or None with a warning where its package is missing."""
    try:
        require([package], f"nothing is logged: {user} needs")
    except PackageMissing as error:
        warn_caller(str(error))
        return None
    return importlib.import_module(module)
