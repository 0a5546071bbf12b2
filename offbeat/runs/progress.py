"""Live progress of a run on the terminal; a plain line per epoch where stderr is no terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from offbeat.callbacks.progress_bar import training_bar
from offbeat.runs.task import CLASSIFICATION, LearningTask


class Progress:
    """Epoch, loss, metric of the task, speed, remaining time and staleness per stage."""

    def __init__(
        self,
        epochs: int,
        batches: int,
        *,
        show: bool,
        console: Console | None = None,
        done: int = 0,
        name: str = "",
        task: LearningTask = CLASSIFICATION,
    ) -> None:
        """name: of one of several runs on the screen: its lines begin with the name, and it has no progress bar."""
        self.task = task
        self.name = f"{name}: " if name else ""
        self.epochs, self.batches, self.show = epochs, batches, show
        self.console = console or Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, show=show and not name)
        self.running = self.bar.add_task(
            "train", total=epochs * batches, completed=done, epoch=f"1/{epochs}", figures=""
        )

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def step(self) -> None:
        self.bar.advance(self.running)

    def update(self, loss: float | None, error: float | None, speed: float, staleness: list[float]) -> None:
        """Show the newest figures of training."""
        figures = [f"loss {loss:.3f}"] if loss is not None else []
        if error is not None:
            figures.append(f"error {error:.1f}%")
        figures.append(f"{speed:,.0f} {self.task.speed_unit}")
        figures.append("staleness " + _short(staleness))
        self.bar.update(self.running, figures="  ".join(figures))

    def print(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.show:
            self.console.print(self.name + text, markup=False, soft_wrap=True)

    def epoch(self, epoch: int, values: dict[str, Any], speed: float, staleness: list[float]) -> None:
        """Print a line for a completed epoch."""
        self.bar.update(self.running, epoch=f"{min(epoch + 2, self.epochs)}/{self.epochs}")
        if self.show:
            width = len(str(self.epochs))
            value = values[f"test_{self.task.key}"]
            test = "" if value is None else f"  {self.task.metric} {self.task.shown(value):>6}"
            test += f"  {speed:,.0f} {self.task.speed_unit}"
            loss = values["train_loss"]  # None: no batch of the epoch has reached the last stage, or all were left out
            train = "" if loss is None else f"  train loss {loss:.4f}"
            self.console.print(
                f"{self.name}epoch {epoch + 1:>{width}}/{self.epochs}{train}"
                f"  test loss {values['test_loss']:.4f}{test}  staleness {_short(staleness)}",
                soft_wrap=True,
            )


def _short(staleness: list[float]) -> str:
    """Staleness of all stages, or only of the first and last stage if there are more than 8."""
    shown = [f"{level:.2f}" for level in staleness]
    return " ".join(shown) if len(shown) <= 8 else f"{shown[0]} .. {shown[-1]}"
