"""Figures of training in a CSV file, for TensorBoard, or for Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from offbeat.errors import PackageMissing, number, require
from offbeat.pipeline.callback import TrainingStep


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
        self.path = Path(path)
        self.file: TextIO | None = None

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", newline="", buffering=1)
            if not self.file.tell():
                self.file.write("batch,name,value\n")
        csv.writer(self.file, lineterminator="\n").writerows((batch, name, value) for name, value in figures.items())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


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
        self.folder = Path(folder)
        self.module = installed("torch.utils.tensorboard", package="tensorboard", user="TensorBoardLogger")
        self.writer: Any = None

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        if self.module is None:
            return
        if self.writer is None:
            self.writer = self.module.SummaryWriter(str(self.folder))
        for name, value in figures.items():
            self.writer.add_scalar(name, value, batch)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WandbLogger(Logger):
    """Send figures to Weights & Biases: options are those of `wandb.init`, such as project="digits". Without the
    package wandb, warn and send nothing."""

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every=every)
        self.options = options
        self.module = installed("wandb", package="wandb", user="WandbLogger")
        self.session: Any = None

    def write(self, batch: int, figures: Mapping[str, float]) -> None:
        if self.module is None:
            return
        if self.session is None:
            self.session = self.module.init(**self.options)
            self.session.define_metric("batch")
            self.session.define_metric("*", step_metric="batch")  # losses arrive after later batches
        self.session.log({"batch": batch, **{name: value for name, value in figures.items() if math.isfinite(value)}})

    def close(self) -> None:
        if self.session is not None:
            self.session.finish()
            self.session = None


def installed(module: str, *, package: str, user: str) -> Any:
    """The module, or None with a warning where its package is missing."""
    try:
        require([package], f"nothing is logged: {user} needs")
    except PackageMissing as error:
        warnings.warn(str(error), stacklevel=3)
        return None
    return importlib.import_module(module)
