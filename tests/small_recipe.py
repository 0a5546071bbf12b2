"""The recipe of runs that take a fraction of a second, for rows of a table of experiments."""

from __future__ import annotations

from offbeat.runs.recipe import Recipe, make_recipe

SMALL = {
    "model": "resnet8",
    "data": "synthetic",
    "samples": 24,
    "classes": 3,
    "shape": (3, 8, 8),
    "batch_size": 4,
    "threads_per_stage": 1,
    "engine": "simulate",
}


def small(method: str, **given: object) -> Recipe:
    """A network of five units; what is None stays as it is here."""
    known = {name: value for name, value in given.items() if value is not None}
    return make_recipe(method=method, **{**SMALL, "epochs": 4, **known})
