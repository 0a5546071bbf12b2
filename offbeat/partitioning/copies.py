"""Copies of models, which may be run without a change to the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from offbeat.errors import UserError, first_line


def copy_model(model: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy of the model; `known` are the copies of some of its tensors, by the identity of the original.

    A model that has been run may keep tensors with a graph, which deepcopy refuses: the copy has their values.
    """
    memo = dict(known or {})
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UserError(f"{type(model).__name__} cannot be copied: {first_line(error)}") from error
