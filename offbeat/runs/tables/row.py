"""A row of a table of experiments: what makes its complete recipe, the paper's value, and where it is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from offbeat.methods import parsed
from offbeat.runs.recipe import Recipe, changed, make_recipe, without_default_rate
from offbeat.runs.task import LearningTask

CHECKPOINTS = 30  # that a run makes at most, at epochs of its recipe: a 300-epoch run every 10 epochs
STALENESS_WARMUP = 150  # synchronous updates before the late ones, in the rows that have them
LONGER_WARMUP = 2 * STALENESS_WARMUP
GROWING = f"bp@{STALENESS_WARMUP}+adl-1f1b@{3 * STALENESS_WARMUP}"  # a lag that grows to that of the row's method
PAPER_RATE = 0.1 * 32 / 256  # the paper's learning rate for M = 1

NETWORKS = {
    **{f"resnet{depth}": f"ResNet-{depth}" for depth in (18, 50, 56, 98, 110, 164)},
    "seresnet18": "SE-ResNet-18",
}
METHODS = {  # with M = 1, and above; others are in capitals
    "bp": ("BP", "BP with accumulation"),
    "adl-1f1b": ("ADL on the 1F1B lag", "ADL on the 1F1B lag"),
}
LETTERS = {"K": "K", "M": "M", "batch_size": "b"}  # settings in the names and titles of rows
WORDS: dict[tuple[str, Any], tuple[str, str]] = {  # further ones: the end of the name, and words of the title
    ("corrector", "sc"): ("sc", "with spike compensation"),
    ("weights", "hybrid"): ("hybrid", "with hybrid weights"),
    ("lr", PAPER_RATE): ("fixed", "learning rate of M=1"),
    ("staleness_warmup", STALENESS_WARMUP): ("warmup", f"the first {STALENESS_WARMUP} updates synchronous"),
    ("staleness_warmup", LONGER_WARMUP): ("longer-warmup", f"the first {LONGER_WARMUP} updates synchronous"),
    ("staleness_warmup", GROWING): (
        "growing",
        f"the first {STALENESS_WARMUP} updates synchronous, {3 * STALENESS_WARMUP} more on the 1F1B lag",
    ),
}


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


def row(data: str, tier: int, model: str, method: str, paper: Paper | None = None, **settings: Any) -> TableRow:
    """A row by its settings, which also give its name and its title; all others are those of the paper.

    >>> made = row("cifar10", 1, "resnet56", "adl", Paper(6.18, "Table I(a), ResNet-56, K=8, ADL"), K=8, M=4)
    >>> made.name, made.title, made.recipe(epochs=60).checkpoint_every
    ('resnet56-adl-k8-m4', 'ResNet-56, ADL, K=8, M=4', '2e')
    """
    network = model.removesuffix("-cifar")
    letters = {letter: settings[name] for name, letter in LETTERS.items() if name in settings}
    words = [WORDS[setting] for setting in settings.items() if setting in WORDS]
    ends = [*(f"{letter.lower()}{value}" for letter, value in letters.items()), *(end for end, _ in words)]
    values = [*(f"{letter}={value}" for letter, value in letters.items()), *(text for _, text in words)]
    return TableRow(
        name="-".join([network, method, *ends]),
        title=", ".join([NETWORKS[network], method_title(method, letters.get("M", 1)), *values]),
        make=partial(_recipe, {"data": data, "model": model, "method": method, **settings}),
        paper=paper,
        tier=tier,
    )


def _recipe(settings: dict[str, Any], **given: Any) -> Recipe:
    return make_recipe(**settings | {name: value for name, value in given.items() if value is not None})


def method_title(method: str, M: int) -> str:
    """
    >>> method_title("2bw", 4), method_title("bp", 1), method_title("bp", 4)
    ('2BW', 'BP', 'BP with accumulation')
    """
    alone, accumulating = METHODS.get(method, (method.upper(), method.upper()))
    return accumulating if M > 1 else alone


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

    def in_tier(self, tier: int, *names: str) -> list[TableRow]:
        """These rows for another table, all of the same importance."""
        rows = {row.name: row for row in self.rows}
        return [replace(rows[name], tier=tier) for name in names]

    def order(self, seeds: int, first: int = 0) -> list[tuple[TableRow, int]]:
        """All (row, seed) by worth: the first seed of tiers 1 and 2, their other seeds, then the later tiers."""
        runs = [(row, seed) for row in self.rows for seed in range(first, first + seeds)]
        return sorted(runs, key=lambda run: (run[0].tier > 2, run[1], run[0].tier))
