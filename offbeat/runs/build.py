"""Build what a recipe names: data, model, cuts, engine and pipeline; and check it before training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offbeat import data, models
from offbeat import partitioning as cutting
from offbeat.core.precision import PrecisionPolicy
from offbeat.engines import Engine
from offbeat.errors import UserError
from offbeat.observe import diagnosis
from offbeat.pipeline import Pipeline
from offbeat.runs import saving
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import Recipe, cores
from offbeat.seeds import derive

TEST_BATCH = 2000 * 3 * 32 * 32  # values in a test batch on a GPU
MOST_WORKERS = 8  # that decode images, by default
DATA_DIR = "OFFBEAT_DATA_DIR"  # environment variable: see default_data_dir


@dataclass(frozen=True)
class Facts:
    """What a model and a schedule need to know about the data. Only the process of the first stage opens the data."""

    shape: tuple[int, int, int]
    classes: int
    samples: int  # per training epoch


def default_data_dir() -> str | None:
    """The folder that the environment variable OFFBEAT_DATA_DIR names: of recipes without a `data_dir`."""
    return os.environ.get(DATA_DIR)


def open_data(recipe: Recipe, *, folder: str | None = None) -> data.DataSet:
    """The recipe's data.

    folder   where the data is, if the recipe has no `data_dir`: records do not contain it. By default that of the
             environment variable OFFBEAT_DATA_DIR
    """
    kind = data.KINDS.get(recipe.data)
    outside = folder or default_data_dir() if kind and kind.layout else None
    if kind and kind.layout and not (recipe.data_dir or outside):
        raise UserError(f"{recipe.data} needs data_dir=: give the folder that holds {kind.layout}, or set {DATA_DIR}")
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
    """The data on the device of the first stage, if that is a GPU with enough memory; else a note that it is not."""
    if data_set is None or recipe.device == "cpu":
        return data_set, []
    moved, note = data.on_device(data_set, recipe.device)
    return moved, [note] if note else []


def shape_of(sizes: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    if sizes is None:
        return None
    if len(sizes) != 3:
        raise UserError(f"shape={tuple(sizes)}: use channels, height and width, such as shape=(3, 32, 32)")
    return sizes[0], sizes[1], sizes[2]


def facts(recipe: Recipe, data_set: data.DataSet) -> Facts:
    return Facts(data_set.shape, data_set.classes, data_set.train_samples)


def build_model(recipe: Recipe, known: Facts) -> nn.Sequential:
    """The model with the initial weights of the recipe's seed. Does not change the global generator of torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "model"))
        return models.build(recipe.model, shape=known.shape, classes=known.classes)


def check(recipe: Recipe, data_set: data.DataSet | None = None) -> tuple[Recipe, Facts]:
    """Raise UserError for anything wrong with data, model, K or cuts. Returns the recipe with its cuts."""
    if recipe.model not in models.names():
        models.build(recipe.model)  # raises UserError before data is read
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but torch finds no CUDA device: use device='cpu'")
    PrecisionPolicy.of(recipe.precision, torch.device(recipe.device))
    recipe.make_method().check(recipe.K)
    if recipe.diagnose:
        diagnosis.check(recipe.diagnose, recipe.make_method())
    known = facts(recipe, data_set or open_data(recipe))
    saving.check(recipe)
    recipe.count(known.samples)
    return replace(recipe, **choose_cuts(recipe, known)), known


def choose_cuts(recipe: Recipe, known: Facts) -> dict[str, Any]:
    """Cuts and units: balanced by FLOPs (on the meta device), or by time measured here."""
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


def make_pipeline(recipe: Recipe, known: Facts, epochs: Epochs, engine: Engine) -> Pipeline:
    factor = recipe.learning_rate(epochs)

    def optimizer(parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=recipe.device == "cuda" or None,  # reads the learning rate on the device
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
    """Samples per test batch: more on a GPU, where evaluation is bound by kernel launches."""
    many = TEST_BATCH // math.prod(known.shape) if recipe.device == "cuda" else 0
    return max(100, recipe.batch_size, many)
