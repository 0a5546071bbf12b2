"""A batch between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.weights import Version


@dataclass(slots=True)
class InFlight:
    """What the backward of a batch needs of its forward.

    inputs      leaves of the input tree; gradients are taken for those that require them
    version     the weights of the forward; update: the index of that version
    steady      whether the forward found the stage full, so that its staleness is the formula's
    random      state of the random stream before the forward
    share       of its batch's samples, for a micro-batch
    kept        a copy of the weights of the forward, where the policy itself does not keep one
    weight      of its gradient in the mean of a window
    buffers     values before the forward of the buffers that it computes with and writes, where it may be repeated
    roots       leaves of the output tree, or the loss
    """

    inputs: list[Any]
    structure: pytree.TreeSpec
    target: Any
    version: Version
    update: int
    steady: bool
    random: list[Tensor]
    share: float = 1.0
    kept: Version | None = None
    weight: float = 1.0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    roots: list[Any] = field(default_factory=list)
