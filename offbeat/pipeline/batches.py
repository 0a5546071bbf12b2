"""Batches as users have them, as inputs and targets of the stages; and the loss that a model computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.descriptions import shapes
from offbeat.core.metrics import batch_size
from offbeat.errors import UserError
from offbeat.partitioning import as_dict
from offbeat.pipeline.checks import kind_of

NO_TENSORS = (int, float, str, bytes, np.ndarray)


def pair(batch: Any, t: int) -> tuple[Any, Any]:
    """Batch t of a loader as (x, y); a dict is x, without a y."""
    if isinstance(batch, Mapping):
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        length = f" with {len(batch)} entries" if isinstance(batch, tuple | list) else ""
        raise UserError(
            f"batch {t} of the loader is {kind_of(batch)}{length}: give pairs (x, y), "
            "each of which may be a tuple or a dict of tensors, or dicts of keyword arguments"
        )
    return batch[0], batch[1]


def check_pair(model: nn.Module, x: Any, y: Any) -> None:
    """Refuse what a loader gives as a whole: without y, a list of two is no input but a batch, unless the model needs
    two inputs."""
    if y is not None or not isinstance(x, tuple | list) or len(x) != 2:
        return
    named = inspect.signature(model.forward).parameters.values()
    if sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in named) < 2:
        raise UserError(
            f"x is {kind_of(x)} with two entries, and there is no y: give both, as in step(x, y) or step(*batch)"
        )


def check_tensors(x: Any, t: int) -> None:
    """Refuse an input of numbers or arrays."""
    if x is not None and all(isinstance(leaf, NO_TENSORS) for leaf in pytree.tree_leaves(x)):
        raise UserError(f"batch {t} is {kind_of(x)} without a tensor: give a tensor, or a tuple or a dict of tensors")


def of_replicas(x: Any, y: Any, replicas: int, *, first: bool) -> list[tuple[Any, Any]]:
    """What `step` was given, as a batch (x, y) for each replica of this process."""
    if replicas == 1 or not first:
        return [(x, y)]
    for name, given in (("x", x), ("y", y)):
        if given is None and name == "y":
            continue
        if not isinstance(given, tuple | list) or len(given) != replicas:
            found = f"a list of {len(given)}" if isinstance(given, tuple | list) else kind_of(given)
            raise UserError(
                f"step() with replicas={replicas} in one process, but {name} is {found}: give a list of {replicas}, "
                "the batch of each replica"
            )
    return list(zip(x, [None] * replicas if y is None else y, strict=True))


def input_and_target(x: Any, y: Any, *, target_is_read: bool = True) -> tuple[Any, Any]:
    """What goes through the stages: without y, a dict is its own target.

    Where nothing reads the target, it has the number of samples alone: later stages cannot know it from activations.
    """
    x, y = as_dict(x), as_dict(y)
    if x is None or y is not None:
        return x, y
    if not target_is_read:
        return x, torch.empty(batch_size(x), 0)
    return x, x if isinstance(x, dict) else None


def own_loss(output: Any, target: Any) -> Tensor:
    """The loss that the model computes: the attribute or entry `loss` of its output, or the first of a tuple.

    >>> own_loss({"loss": torch.tensor(2.0), "logits": torch.ones(3)}, None), own_loss((torch.tensor(1.0), 5), None)
    (tensor(2.), tensor(1.))
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    if found is None:
        raise UserError(
            "the output of the model has no loss (loss=None): give batches with labels, so that it computes one, or "
            "a function loss=... of (output, batch)"
        )
    if not isinstance(found, Tensor) or found.dim():
        raise UserError(
            f"the output of the model, {shapes(found)}, is not a loss (loss=None): give batches with labels, so that "
            "it computes one, or a function loss=... of (output, target)"
        )
    return found
