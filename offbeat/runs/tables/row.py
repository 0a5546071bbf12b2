"""A row of a table of experiments: what makes its complete recipe, the paper's value, and where it is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from offbeat.methods import parsed
from offbeat.runs.recipe import Recipe, changed, make_recipe, without_default_rate
from offbeat.runs.task import LearningTask

CHECKPOINTS = 30  # that a run makes at most, at epochs of its recipe: a 300-epoch run every 10 epochs
STALENESS_WARMUP = 150  # synchronous updates before the late ones, in the rows that have them


@dataclass(frozen=True)
class Paper:
    """The paper's result: errors in %, at the last epoch, median of 3 runs; error None where training diverged."""

    error: float | None
    place: str  # table and row
    top5: float | None = None
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row: `make(**settings)` is its complete recipe; `paper` is None where the row is our own.

    tier              importance: 1 before 2 before 3 ...; all seeds of tiers 1 and 2 come before the later tiers
    baseline          the row of the same table that it is compared with, where there is no paper
    checkpoint_mode   that of its checkpoints; drained ones are smaller, and draining changes the results
    """

    name: str  # of its run folders, and for --only
    title: str
    make: Callable[..., Recipe]
    paper: Paper | None = None
    tier: int = 1
    baseline: str | None = None
    checkpoint_mode: Literal["in-flight", "drained"] = "drained"

    def recipe(
        self, *, seed: int = 0, method: str | None = None, batch_per_update: int | None = None, **given: Any
    ) -> Recipe:
        """The recipe of one run of the row, with its checkpoints; what is given and is not None replaces its settings.

        method             one with settings, as text: they replace the row's own, where it is the row's method
        batch_per_update   samples of an update, instead of the row's batch size
        """
        made = self.make(seed=seed, **given)
        name, settings = parsed(method) if method else ("", {})
        changes: dict[str, Any] = {"settings": settings} if settings and name == made.method else {}
        if batch_per_update is not None:
            changes["batch_per_update"] = batch_per_update
        if changes:
            made = make_recipe(**changed(without_default_rate(made.as_dict()), changes))
        every = max(1, -(-made.epochs // CHECKPOINTS))
        return replace(made, checkpoint_every=f"{every}e", checkpoint_mode=self.checkpoint_mode, keep=1)


def row(tier: int, paper: Paper | None = None) -> Callable[[Callable[..., Recipe]], TableRow]:
    """Make the function a row: its name is the row's, with hyphens, and the first line of its docstring the title.

    >>> @row(1, Paper(6.18, "Table I(a), ResNet-56, K=8"))
    ... def resnet56_adl_k8(**given: Any) -> Recipe:
    ...     '''ResNet-56, ADL, K=8.'''
    ...     from offbeat.runs.recipe import make_recipe
    ...     return make_recipe(model="resnet56", K=8, **given)
    >>> resnet56_adl_k8.name, resnet56_adl_k8.title, resnet56_adl_k8.recipe(epochs=60).checkpoint_every
    ('resnet56-adl-k8', 'ResNet-56, ADL, K=8', '2e')
    """

    def made(function: Callable[..., Recipe]) -> TableRow:
        title = (function.__doc__ or "").strip().splitlines()[0].rstrip(".")
        return TableRow(name=function.__name__.replace("_", "-"), title=title, make=function, paper=paper, tier=tier)

    return made


@dataclass(frozen=True)
class Images:
    """How much a data set holds.

    >>> imagenet, ours = Images(1000, 1_281_167, 50_000), Images(1000, 1_281_150, 50_000)
    >>> imagenet.alike(ours), imagenet.alike(Images(100, 126_689, 5_000)), str(ours)
    (True, False, '1,000 classes, 1,281,150 images to train and 50,000 to test with')
    """

    classes: int
    train: int
    test: int

    def alike(self, other: Images) -> bool:
        """Whether it may be the same one; copies lack a file or two."""
        near = abs(self.train - other.train) <= self.train / 1000 and abs(self.test - other.test) <= self.test / 1000
        return self.classes == other.classes and near

    def __str__(self) -> str:
        return f"{self.classes:,} classes, {self.train:,} images to train and {self.test:,} to test with"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that are run and shown together; `images` are the paper's, where any others can be taken."""

    name: str
    title: str
    rows: tuple[TableRow, ...]
    top5: bool = False  # whether top-5 errors are shown
    images: Images | None = None

    @property
    def task(self) -> LearningTask:
        return self.rows[0].recipe().task

    def order(self, seeds: int, first: int = 0) -> list[tuple[TableRow, int]]:
        """All (row, seed) by worth: the first seed of tiers 1 and 2, their other seeds, then the later tiers."""
        runs = [(row, seed) for row in self.rows for seed in range(first, first + seeds)]
        return sorted(runs, key=lambda run: (run[0].tier > 2, run[1], run[0].tier))
