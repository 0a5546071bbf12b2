"""A batch between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from offbeat.core.weights import Version


class OutputEdge(NamedTuple):
    """Where the graph of an output ends; device: of the output."""

    edge: GradientEdge
    device: torch.device


def edge_of(leaf: Any) -> OutputEdge | None:
    """What a backward needs of a leaf of an output: not its values, whose memory is free once they are sent."""
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return OutputEdge(get_gradient_edge(leaf), leaf.device)
    return None


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
    roots       the loss, or where the leaves of the output tree are in the graph
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
