"""Build what a recipe names: data, model, cuts, engine and pipeline; and check it before training."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import data, models
from offbeat import partitioning as cutting
from offbeat.core.compression import check_messages
from offbeat.core.precision import PrecisionPolicy
from offbeat.engines import Engine
from offbeat.errors import UserError
from offbeat.observe import diagnosis
from offbeat.pipeline import Pipeline, checks, schedules
from offbeat.runs import saving
from offbeat.runs.epochs import Epochs
from offbeat.runs.launch import cores
from offbeat.runs.optimizers import optimizer_of
from offbeat.runs.recipe import Recipe
from offbeat.runs.task import LANGUAGE, task_of
from offbeat.seeds import derive

TEST_BATCH = 2000 * 3 * 32 * 32  # values in a test batch on a GPU
MOST_WORKERS = 8  # that decode images, by default
DATA_DIR, TEXT = "OFFBEAT_DATA_DIR", "OFFBEAT_TEXT"  # environment variables: see data_variable


@dataclass(frozen=True)
class Facts:
    """What a model and a schedule need to know about the data. Only the process of the first stage opens the data."""

    shape: tuple[int, ...]
    classes: int
    samples: int  # per training epoch


def data_variable(data: str) -> str:
    """The environment variable that names the folder of this data, or the file of a text, for recipes without a
    `data_dir`."""
    return TEXT if task_of(data) is LANGUAGE else DATA_DIR


def default_data_dir(data: str) -> str | None:
    return os.environ.get(data_variable(data))


def open_data(recipe: Recipe, *, folder: str | None = None) -> data.DataSet:
    """The recipe's data.

    folder   where the data is, if the recipe has no `data_dir`: records do not contain it. By default that of the
             environment variable OFFBEAT_DATA_DIR, of text OFFBEAT_TEXT
    """
    kind = data.KINDS.get(recipe.data)
    outside = folder or default_data_dir(recipe.data) if kind and "folder" in kind.takes else None
    if kind and kind.layout and not (recipe.data_dir or outside):
        raise UserError(f"{recipe.data} needs data_dir=: give the folder that holds {kind.layout}, or set {DATA_DIR}")
    workers = min(cores(), MOST_WORKERS) if recipe.data_workers is None else recipe.data_workers
    return data.open(
        recipe.data,
        folder=recipe.data_dir or outside,
        shape=recipe.shape or _context(recipe),
        classes=recipe.classes,
        samples=recipe.samples,
        tokenizer=recipe.tokenizer,
        workers=workers,
    )


def size_of_samples(recipe: Recipe) -> tuple[tuple[int, ...], int]:
    """Shape and number of classes of the recipe's data, which is only opened where they depend on its files."""
    _check_fit(recipe)
    kind = data.KINDS.get(recipe.data)
    if kind and kind.fixed:
        if recipe.shape is not None:
            raise UserError(f"{recipe.data} takes no shape: leave it out, its samples have {kind.fixed[0]}")
        return kind.fixed
    opened = open_data(recipe)
    return opened.shape, opened.classes


def _context(recipe: Recipe) -> tuple[int, ...] | None:
    """The shape of a sample of text: that of the model, where it has one of its own."""
    shape = models.find(recipe.model).shape if recipe.task is LANGUAGE else None
    return shape if shape is not None and models.takes_tokens(shape) else None


def move_data(recipe: Recipe, data_set: data.DataSet | None) -> tuple[data.DataSet | None, list[str]]:
    """The data on the device of the first stage, if that is a GPU with enough memory; else a note that it is not."""
    if data_set is None or recipe.device == "cpu":
        return data_set, []
    moved, note = data.on_device(data_set, recipe.device)
    return moved, [note] if note else []


def facts(recipe: Recipe, data_set: data.DataSet) -> Facts:
    return Facts(data_set.shape, data_set.classes, data_set.train_samples)


def build_model(recipe: Recipe, known: Facts) -> nn.Module:
    """The model with the initial weights of the recipe's seed. Does not change the global generator of torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "model"))
        return models.build(recipe.model, shape=known.shape, classes=known.classes)


def check(recipe: Recipe, data_set: data.DataSet | None = None) -> tuple[Recipe, Facts]:
    """Raise UserError for anything wrong with data, model, K or cuts. Returns the recipe with its cuts."""
    _check_fit(recipe)
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but torch finds no CUDA device: use device='cpu'")
    PrecisionPolicy.of(recipe.precision, torch.device(recipe.device))
    check_messages(recipe.messages, recipe.K, streams=recipe.engine == "streams")
    recipe.make_method().check(recipe.K)
    checks.check_replicas(recipe.make_method(), recipe.replicas)
    if recipe.diagnose and recipe.replicas > 1:
        raise UserError(
            f"diagnose={recipe.diagnose} with replicas={recipe.replicas}: it compares an update with the batches of "
            "one replica, use replicas=1 with the same M"
        )
    if recipe.diagnose:
        diagnosis.check(recipe.diagnose, recipe.make_method())
    known = facts(recipe, data_set or open_data(recipe))
    saving.check(recipe)
    batches = recipe.epochs * recipe.count(known.samples).per_epoch
    schedules.warn_of_warmup(recipe.make_method(), batches, whole=True)
    if recipe.diagnose:
        schedules.warn_of_diagnosis(recipe.diagnose, schedules.count_updates(recipe.make_method(), recipe.K, batches))
    return replace(recipe, **choose_cuts(recipe, known)), known


def _check_fit(recipe: Recipe) -> None:
    """Raise UserError where there is no such model, or model, data and method do not fit each other."""
    shape, text = models.find(recipe.model).shape, recipe.task is LANGUAGE
    if shape is not None and models.takes_tokens(shape) != text:
        takes, has, other = ("images", "text", "model='gpt'") if text else ("tokens", "images", "data='text'")
        raise UserError(f"{recipe.model} takes {takes}, but data={recipe.data!r} has {has}: use {other}")
    if text and recipe.make_method().head is not None:
        raise UserError(
            f"method={recipe.method!r} with data={recipe.data!r}: its auxiliary networks are for images, use a method "
            "with feedback from the next stage, such as method='adl'"
        )


def choose_cuts(recipe: Recipe, known: Facts) -> dict[str, Any]:
    """Cuts and units: balanced by FLOPs (on the meta device), or by time measured here."""
    measured = recipe.partition == "measured" and recipe.cuts is None
    if measured:
        torch.set_num_threads(recipe.threads_per_stage)
    model = build_model(recipe, known) if measured else models.skeleton(recipe.model, known.shape, known.classes)
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    sample = models.random_batch(_sample_size(recipe), known.shape, known.classes, device=device)
    kind = recipe.units or ("layers" if recipe.partition == "measured" else None)
    made = cutting.partition(
        model, recipe.K, sample, cuts=recipe.cuts, units=kind, by=recipe.partition, speeds=recipe.speeds
    )
    return {"cuts": tuple(made.cuts), "units": made.units}


def _sample_size(recipe: Recipe) -> int:
    """The size of the batch on which cuts are decided: the same for all M where samples per update are given."""
    fixed = recipe.batch_per_update if recipe.partition == "flops" else None
    return fixed or recipe.batch_size


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of scores (b, classes) of images, or (b, T, vocabulary) of the tokens of a text."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def make_pipeline(recipe: Recipe, known: Facts, epochs: Epochs, engine: Engine) -> Pipeline:
    factor = recipe.learning_rate(epochs)
    samples = 1 if recipe.model in models.MODELS else _sample_size(recipe)  # a trace on the sample is that of the cuts
    pipe = Pipeline(
        build_model(recipe, known),
        recipe.K,
        method=recipe.make_method(),
        replicas=recipe.replicas,
        loss=cross_entropy,
        optimizer=optimizer_of(recipe),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, factor),
        cuts=recipe.cuts,
        units=recipe.units,
        clip_norm=recipe.clip_norm,
        clip_over=recipe.clip_over,
        engine=engine,
        seed=recipe.seed,
        device=recipe.device,
        sample=models.random_batch(samples, known.shape, known.classes).zero_(),
        left_out=recipe.left_out or (),
        on_nan="skip" if recipe.on_nan == "skip" else "stop",
        precision=recipe.precision,
        messages=recipe.messages,
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
