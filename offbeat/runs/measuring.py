"""Times of batches of a recipe's model, by which method "auto" chooses M."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from offbeat import models
from offbeat.core.precision import PrecisionPolicy
from offbeat.partitioning.batch_times import batch_seconds, smallest_batch
from offbeat.recommended import NORMALIZED, measured_times
from offbeat.runs import build
from offbeat.runs.recipe import Recipe


def measure_batches(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Samples per update and per epoch, smallest micro-batch, and (size, seconds) of each size that is compared, on the
    recipe's device and with its threads."""
    batch = recipe.samples_per_update
    _, known = build.check(replace(recipe, batch_size=1))  # which of its parts will be a batch is not known yet
    model = build.build_model(recipe, known)
    smallest = smallest_batch(model, NORMALIZED)
    sample, device = models.random_batch(1, known.shape, known.classes), torch.device(recipe.device)
    seconds = batch_seconds(model, sample, device=device, precision=PrecisionPolicy.of(recipe.precision, device))
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads_per_stage)
    try:
        times = measured_times(recipe.K, batch=batch, settings=settings, seconds=seconds, smallest=smallest)
    finally:
        torch.set_num_threads(threads)
    return {"batch": batch, "samples": known.samples, "smallest": smallest, "times": times}


def count_samples(recipe: Recipe) -> dict[str, Any]:
    """Samples per epoch of a recipe whose batches are not measured."""
    return {"samples": build.open_data(recipe).train_samples}
