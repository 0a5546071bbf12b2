"""A row that is trained on data, as one of its workers. All rows have the same initial weights and order of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import models
from offbeat.data import DataSet
from offbeat.runs import build
from offbeat.runs.optimizers import optimizer_of
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.studies.bench.contenders import Batch, Contender, Task, make
from offbeat.studies.bench.rows import BenchRow, BenchSetting, of_row

TEST_BATCH = 100  # samples


@dataclass
class RowTraining:
    """A worker of a row, with the data on which it is trained.

    Each update reads one batch of all its samples, which rows with micro-batches split: so data are read, shuffled and
    augmented in the same way in all rows.
    """

    recipe: Recipe
    data: DataSet
    contender: Contender
    weights: str  # hash of the initial ones
    samples_per_update: int
    validation_samples: int
    targets: Any = field(default_factory=hashlib.sha256)  # of all targets read here
    batches: Iterator[Batch] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self._training_batches()

    @classmethod
    def of(cls, row: BenchRow, setting: BenchSetting, rank: int, given: dict[str, Any]) -> RowTraining:
        """From the request of `until.py`: a recipe (data, model, optimizer and learning rate), the folder of the data,
        the number of micro-batches and of validation samples."""
        recipe = make_recipe(**given["recipe"])
        data = build.open_data(recipe, folder=given["folder"])
        known = build.facts(recipe, data)
        model = build.build_model(recipe, known)
        own = of_row(row, setting, given["m"])
        x = models.random_batch(own.batch_size, own.shape, own.classes).zero_()
        y = torch.zeros(own.batch_size, *(own.shape if models.takes_tokens(own.shape) else ()), dtype=torch.int64)
        factor = recipe.learning_rate(recipe.count(known.samples))
        task = Task(
            own,
            rank,
            model,
            x,
            y,
            optimizer=optimizer_of(recipe),  # type: ignore[arg-type]
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, factor),
        )
        weights = hash_of(model)
        contender = make(row, task, given["m"])
        return cls(recipe, data, contender, weights, recipe.batch_size, given["validation_samples"])

    def _training_batches(self) -> Iterator[Batch]:
        for epoch in count():
            yield from self.data.train(
                batch_size=self.samples_per_update, seed=self.recipe.seed, epoch=epoch, drop_last=True
            )

    @property
    def order(self) -> str | None:
        """A hash of all targets read so far; None in workers that read none."""
        return self.targets.hexdigest() if self.contender.reads else None

    def update(self) -> None:
        batch = next(self.batches) if self.contender.reads else None
        if batch is not None:
            self.targets.update(batch[1].numpy().tobytes())
        self.contender.update(batch)

    def evaluate(self) -> dict[str, Any] | None:
        return self.contender.evaluate(lambda: validation_batches(self.data, self.validation_samples))


def validation_batches(data: DataSet, samples: int) -> Iterator[Batch]:
    """At least that many test samples, in whole batches spread evenly over all of them."""
    batches = -(-data.test_samples // TEST_BATCH)
    wanted = min(batches, -(-samples // TEST_BATCH))
    for number, batch in enumerate(data.test(batch_size=TEST_BATCH)):
        if (number + 1) * wanted // batches > number * wanted // batches:
            yield batch


def hash_of(model: nn.Module) -> str:
    """A hash of all parameters and buffers, with their names."""
    made = hashlib.sha256()
    for name, value in model.state_dict().items():
        made.update(name.encode())
        if isinstance(value, Tensor):
            made.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
