"""Progress on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import progress as bars
from rich.console import Console

from offbeat.pipeline.callback import TrainingStep


def training_bar(console: Console, *, show: bool = True) -> bars.Progress:
    """A bar on a terminal whose tasks have the fields `epoch` and `figures`."""
    return bars.Progress(
        bars.TextColumn("epoch {task.fields[epoch]}"),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.fields[figures]}"),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not show or not console.is_terminal,
    )


class ProgressBar:
    """A bar with epoch, loss and speed, and a line per evaluation; in the first process alone. Where stderr is no
    terminal, only the lines.

    batches     optional: batches per epoch. Otherwise they are known after the first epoch

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
    >>> from rich.console import Console
    >>> pipe.fit(batches, epochs=2, callbacks=[ProgressBar(batches=4, console=Console(quiet=True))])
    """

    def __init__(self, *, batches: int | None = None, console: Console | None = None) -> None:
        self.batches, self.console = batches, console or Console(stderr=True, highlight=False)
        self.bar: bars.Progress | None = None
        self.first = 0  # batch of this call of fit

    def on_step(self, step: TrainingStep) -> None:
        if not step.pipe.leads:
            return
        if self.bar is None:
            self.first = step.batch
            self.bar = self._start(step)
        figures = [] if step.loss is None else [f"loss {step.loss:.4f}"]
        if step.samples_per_second:
            figures.append(f"{step.samples_per_second:,.0f} samples/s")
        epoch = f"{step.epoch + 1}/{step.epochs}"
        self.bar.update(self.bar.task_ids[0], advance=1, epoch=epoch, figures="  ".join(figures))

    def _start(self, step: TrainingStep) -> bars.Progress:
        bar = training_bar(self.console)
        total = None if self.batches is None else self.batches * (step.epochs - step.epoch)
        bar.add_task("train", total=total, epoch="", figures="")
        bar.start()
        return bar

    def on_epoch_end(self, step: TrainingStep) -> None:
        if self.bar is not None and self.batches is None:
            self.batches = step.batch + 1 - self.first
            self.bar.update(self.bar.task_ids[0], total=self.batches * (step.epochs - step.epoch))

    def on_evaluate(self, step: TrainingStep, result: Mapping[str, Any]) -> None:
        if step.pipe.leads:
            numbers = {name: value for name, value in result.items() if isinstance(value, float)}
            figures = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            train = "" if step.loss is None else f"train loss {step.loss:.4f}  "
            self.console.print(
                f"epoch {step.epoch + 1}/{step.epochs}  {train}{figures}", soft_wrap=True, highlight=False
            )

    def on_end(self, step: TrainingStep) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
