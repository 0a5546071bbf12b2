"""How a network is built, and for which samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Shape = tuple[int, ...]  # of one sample: (channels, height, width) of an image, or (context,) of tokens


@dataclass(frozen=True)
class NetworkSpec:
    """The function that builds a network, and the samples that it takes.

    shape      by default; None: any, and there is no default
    classes    by default; None: any
    smallest   height and width of an image
    fixed      whether the context of tokens was given with the name, so that data must have the same
    longest    context of tokens; None: any
    ours       whether its code is part of the package, which works on the meta device
    """

    make: Callable[[Any, int], nn.Module]  # of shape and classes
    shape: Shape | None
    classes: int | None
    smallest: int = 1
    fixed: bool = False
    longest: int | None = None
    ours: bool = True


def takes_tokens(shape: Shape) -> bool:
    """Whether samples of this shape are tokens rather than images."""
    return len(shape) == 1
