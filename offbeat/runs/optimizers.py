"""The optimizers of recipes, by name, with their defaults. Imports torch only where one is made.

A further optimizer is an entry of OPTIMIZERS, and its name in the type of `Recipe.optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.correctors.optimizer_rules import RULES, Need, OptimizerRule, SelfCompensatingRule

if TYPE_CHECKING:
    from offbeat.core.optimization import MakeOptimizer
    from offbeat.runs.recipe import Recipe


def linear_rate(batch_size: int, M: int) -> float:
    """The paper's learning rate: proportional to the samples per update."""
    return 0.1 * batch_size * M / 256


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of a recipe.

    title      its class
    lr         default learning rate, for batch size and M
    defaults   its settings other than the learning rate: fields of a recipe and arguments of the class
    on_gpu     arguments on a GPU, where the optimizer reads its learning rate on the device
    module     where the class is
    fixed      arguments that no recipe changes
    """

    title: str
    lr: Callable[[int, int], float]
    defaults: Mapping[str, Any]
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    module: str = "torch.optim"
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> type[OptimizerRule]:
        """What correctors can do with it."""
        return RULES.get(self.title, SelfCompensatingRule)

    @property
    def provides(self) -> set[Need]:
        """What correctors get of it (see correctors/optimizer_rules.py)."""
        without_nesterov = self.title not in RULES and "momentum" not in self.defaults
        return {*self.rule.provides} - ({"nesterov"} if without_nesterov else set())


OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind("SGD", linear_rate, {"momentum": 0.9, "weight_decay": 5e-4}, {"fused": True}),
    "adamw": OptimizerKind(
        "AdamW",
        lambda batch_size, M: 1e-3,
        {"betas": (0.9, 0.95), "weight_decay": 0.1},
        {"fused": True, "capturable": True},
    ),
    "muon": OptimizerKind(
        "Muon",
        lambda batch_size, M: 3e-3,
        {"momentum": 0.95, "betas": (0.9, 0.95), "weight_decay": 0.1},
        {"capturable": True},
        "offbeat.optim",
    ),
    "rotated-adam": OptimizerKind(
        "RotatedAdam",
        lambda batch_size, M: 1e-3,
        {"betas": (0.95, 0.95), "weight_decay": 0.1},
        {"capturable": True},
        "offbeat.optim",
    ),
    "nadam": OptimizerKind(
        "NAdam",
        lambda batch_size, M: 1e-3,
        {"betas": (0.9, 0.95), "weight_decay": 0.1},
        {"foreach": True, "capturable": True},
        fixed={"decoupled_weight_decay": True},
    ),
}
SETTINGS = tuple(dict.fromkeys(name for kind in OPTIMIZERS.values() for name in kind.defaults))


def options(recipe: Recipe) -> dict[str, Any]:
    """The settings of the recipe's optimizer, without the learning rate."""
    return {name: getattr(recipe, name) for name in OPTIMIZERS[recipe.optimizer].defaults}


def optimizer_of(recipe: Recipe) -> MakeOptimizer:
    """What makes the optimizer of a stage."""
    kind = OPTIMIZERS[recipe.optimizer]
    on_device = kind.on_gpu if recipe.device == "cuda" else {}
    return partial(
        getattr(import_module(kind.module), kind.title), lr=recipe.lr, **options(recipe), **kind.fixed, **on_device
    )


def described(recipe: Recipe) -> str:
    """The optimizer and its settings in words.

    >>> from offbeat.runs.recipe import make_recipe
    >>> described(make_recipe(lr=0.05))
    'SGD, lr 0.05, momentum 0.9, weight decay 0.0005'
    """
    shown = {"lr": recipe.lr, **options(recipe)}
    parts = {name: value if isinstance(value, tuple) else (value,) for name, value in shown.items()}
    texts = (f"{name.replace('_', ' ')} {' '.join(f'{part:g}' for part in value)}" for name, value in parts.items())
    return ", ".join((OPTIMIZERS[recipe.optimizer].title, *texts))
