"""The partition of a run: which units each stage has, and its share of parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from offbeat.errors import UserError
from offbeat.runs.recipe import Recipe
from offbeat.runs.task import LANGUAGE

BYTES = 256  # vocabulary of a text without a tokenizer


@dataclass(frozen=True)
class CutStage:
    """A stage; flops are those of the forward of one sample."""

    units: int
    first: str
    last: str
    parameters: int
    flops: int


def parts(recipe: Recipe) -> list[CutStage]:
    """The stages of a recipe whose cuts are known, counted without weights; UserError where they cannot be."""
    if recipe.cuts is None and recipe.K > 1:
        raise UserError("the cuts are not in the recipe")
    shape, classes = _facts(recipe)
    return list(_parts(recipe.model, shape, classes, tuple(recipe.cuts or ()), recipe.units or "blocks"))


def _facts(recipe: Recipe) -> tuple[tuple[int, ...] | None, int | None]:
    """Shape of a sample and classes, where they can be known without the data's files."""
    from offbeat import data

    kind = data.KINDS.get(recipe.data)
    if kind and kind.fixed:
        return kind.fixed
    if recipe.task is LANGUAGE:
        return recipe.shape, None if recipe.tokenizer else BYTES
    if kind and not kind.layout:
        opened = data.open_data(recipe.data, shape=recipe.shape, classes=recipe.classes)
        return opened.shape, opened.classes
    return recipe.shape, recipe.classes


@lru_cache(maxsize=32)
def _parts(
    model: str, shape: tuple[int, ...] | None, classes: int | None, cuts: tuple[int, ...], units: str
) -> tuple[CutStage, ...]:
    from offbeat import models
    from offbeat import partitioning as cutting

    if not models.find(model).ours:
        raise UserError(f"the stages of {model} are not counted, since a report runs no code of others")
    size, known = models.default_size(model, shape=shape)
    network = models.skeleton(model, size, classes or known)
    if units == "blocks":
        names = [name for name, _ in network.named_children()]
        parameters = [sum(weight.numel() for weight in unit.parameters()) for unit in network.children()]
        flops = cutting.forward_flops(network, models.random_batch(1, size, known, device="meta"))
    else:
        measured = cutting.profile(network, models.random_batch(2, size, known, device="meta"), timed=False).units
        names = [unit.name for unit in measured]
        parameters, flops = [unit.parameters for unit in measured], [unit.flops // 2 for unit in measured]
    edges = [0, *cuts, len(names)]
    if any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"the cuts {list(cuts)} do not fit the {len(names)} units of {model}")
    return tuple(
        CutStage(end - start, names[start], names[end - 1], sum(parameters[start:end]), sum(flops[start:end]))
        for start, end in pairwise(edges)
    )
