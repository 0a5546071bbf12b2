"""Networks as sequences of cuttable units: the direct children of a plain nn.Sequential.

A network knows nothing of parallelism: whoever trains it may cut it between any two units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from offbeat.errors import UserError, unknown
from offbeat.models import cifar, imagenet
from offbeat.models.mlp import mlp

__all__ = ["Description", "Shape", "build", "describe", "names"]

Shape = tuple[int, int, int]  # channels, height, width of one sample


@dataclass(frozen=True)
class Description:
    """The size of a network at its default shape and classes.

    `parameters` counts what is trained. `flops` counts the forward pass of one sample: two for every multiply-add
    of the convolutions and linear layers, nothing else. `units` is the largest number of stages.
    """

    name: str
    parameters: int
    flops: int
    units: int
    shape: Shape
    classes: int


@dataclass(frozen=True)
class Entry:
    """How a network is made, its defaults, and the smallest height and width it takes."""

    make: Callable[[Shape, int], nn.Sequential]
    shape: Shape
    classes: int
    smallest: int


def _cifar(make: Callable[..., nn.Sequential], **options: Any) -> Entry:
    # from 4 on, the two halvings of the three-stage networks leave something to pool
    return Entry(partial(make, **options), (3, 32, 32), 10, 4)


def _imagenet(branch: imagenet.Branch, *blocks: int, **options: Any) -> Entry:
    # from 32 on, each of the five halvings still halves
    return Entry(partial(imagenet.resnet, branch=branch, blocks=blocks, **options), (3, 224, 224), 1000, 32)


MODELS: dict[str, Entry] = {
    "mlp": Entry(mlp, (1, 8, 8), 10, 1),
    "resnet8": _cifar(cifar.resnet, depth=8),
    "resnet14": _cifar(cifar.resnet, depth=14),
    "resnet20": _cifar(cifar.resnet, depth=20),
    "resnet32": _cifar(cifar.resnet, depth=32),
    "resnet44": _cifar(cifar.resnet, depth=44),
    "resnet56": _cifar(cifar.resnet, depth=56),
    "resnet98": _cifar(cifar.resnet, depth=98),
    "resnet110": _cifar(cifar.resnet, depth=110),
    "resnet164": _cifar(cifar.resnet, depth=164),
    "resnet1202": _cifar(cifar.resnet, depth=1202),
    "resnet18-cifar": _cifar(cifar.resnet18),
    "resnet18": _imagenet(imagenet.basic, 2, 2, 2, 2),
    "resnet34": _imagenet(imagenet.basic, 3, 4, 6, 3),
    "resnet50": _imagenet(imagenet.bottleneck, 3, 4, 6, 3, expansion=4),
    "resnet101": _imagenet(imagenet.bottleneck, 3, 4, 23, 3, expansion=4),
    "resnet152": _imagenet(imagenet.bottleneck, 3, 8, 36, 3, expansion=4),
    "seresnet18": _imagenet(imagenet.basic, 2, 2, 2, 2, squeeze=True),
    "seresnet50": _imagenet(imagenet.bottleneck, 3, 4, 6, 3, expansion=4, squeeze=True),
}


def names() -> list[str]:
    """The names that `build` and `describe` know."""
    return list(MODELS)


def build(name: str, *, shape: Shape | None = None, classes: int | None = None) -> nn.Sequential:
    """A freshly initialised network whose direct children are its units.

    `shape` is (channels, height, width) of one sample; None means the network's default, as for `classes`.
    The weights are drawn from torch's global generator, which the caller seeds.

    >>> [unit for unit, _ in build("resnet8", shape=(1, 8, 8)).named_children()]
    ['stem', 'layer1_0', 'layer2_0', 'layer3_0', 'head']
    """
    entry = _entry(name)
    shape = entry.shape if shape is None else _usable_shape(name, entry, shape)
    classes = entry.classes if classes is None else classes
    if not _whole(classes, 1):
        raise UserError(f"classes={classes!r} is unusable for {name} (a whole number >= 1): use {entry.classes}, say")
    return entry.make(shape, classes)


def describe(name: str) -> Description:
    """The size of a network, counted on the meta device: no weights are made, no random numbers drawn.

    >>> describe("resnet20")
    Description(name='resnet20', parameters=269722, flops=81102080, units=11, shape=(3, 32, 32), classes=10)
    """
    entry = _entry(name)
    with torch.device("meta"):
        network = build(name).eval()
        sample = torch.empty(1, *entry.shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(sample)
    parameters = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return Description(name, parameters, counter.get_total_flops(), len(network), entry.shape, entry.classes)


def _entry(name: str) -> Entry:
    if name not in MODELS:
        raise UserError(f"{unknown('model', name, MODELS)}; a module of your own is trained by offbeat.Pipeline")
    return MODELS[name]


def _usable_shape(name: str, entry: Entry, shape: Any) -> Shape:
    smallest = (1, entry.smallest, entry.smallest)
    if isinstance(shape, tuple | list) and len(shape) == 3 and all(map(_whole, shape, smallest)):
        return (shape[0], shape[1], shape[2])
    raise UserError(
        f"shape {shape!r} is unusable for {name} (channels, height, width; at least {smallest}): "
        f"use {entry.shape}, say, or enlarge the images"
    )


def _whole(value: Any, least: int) -> bool:
    # bool is an int to Python, yet never a size
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
