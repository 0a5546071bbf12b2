"""Networks as sequences of cuttable units: the direct children of a plain nn.Sequential.

Networks have no code for parallel training; they can be cut between any two units. May import errors.
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

__all__ = ["ModelDescription", "Shape", "build", "describe", "names"]

Shape = tuple[int, int, int]  # channels, height, width of one sample


@dataclass(frozen=True)
class ModelDescription:
    """The size of a network at its default shape and classes.

    parameters   number of trained parameters
    flops        of the forward pass of one sample: two per multiply-add of convolutions and linear layers only
    units        largest number of stages
    """

    name: str
    parameters: int
    flops: int
    units: int
    shape: Shape
    classes: int


@dataclass(frozen=True)
class NetworkSpec:
    """The function that builds a network, its default shape and classes, and the smallest height and width."""

    make: Callable[[Shape, int], nn.Sequential]
    shape: Shape
    classes: int
    smallest: int


def _cifar(make: Callable[..., nn.Sequential], **options: Any) -> NetworkSpec:
    # the resolution is halved twice: at least one pixel must be left to pool
    return NetworkSpec(partial(make, **options), (3, 32, 32), 10, 4)


def _imagenet(branch: imagenet.Branch, *blocks: int, **options: Any) -> NetworkSpec:
    # the resolution is halved five times
    return NetworkSpec(partial(imagenet.resnet, branch=branch, blocks=blocks, **options), (3, 224, 224), 1000, 32)


MODELS: dict[str, NetworkSpec] = {
    "mlp": NetworkSpec(mlp, (1, 8, 8), 10, 1),
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
    """The names of all networks."""
    return list(MODELS)


def build(name: str, *, shape: Shape | None = None, classes: int | None = None) -> nn.Sequential:
    """A freshly initialised network whose direct children are its units.

    `shape` is (channels, height, width) of one sample. `shape` and `classes` default to those of the network. Weights
    are drawn from torch's global generator, which the caller seeds.

    >>> [unit for unit, _ in build("resnet8", shape=(1, 8, 8)).named_children()]
    ['stem', 'layer1_0', 'layer2_0', 'layer3_0', 'head']
    """
    spec = _spec(name)
    shape = spec.shape if shape is None else _usable_shape(name, spec, shape)
    classes = spec.classes if classes is None else classes
    if not _whole(classes, 1):
        raise UserError(f"classes={classes!r} for {name}: use a whole number from 1 up, such as {spec.classes}")
    return spec.make(shape, classes)


def describe(name: str) -> ModelDescription:
    """The size of a network, counted on the meta device, without memory for weights and without random numbers.

    >>> describe("resnet20")
    ModelDescription(name='resnet20', parameters=269722, flops=81102080, units=11, shape=(3, 32, 32), classes=10)
    """
    spec = _spec(name)
    with torch.device("meta"):
        network = build(name).eval()
        sample = torch.empty(1, *spec.shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(sample)
    parameters = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return ModelDescription(name, parameters, counter.get_total_flops(), len(network), spec.shape, spec.classes)


def _spec(name: str) -> NetworkSpec:
    if name not in MODELS:
        raise UserError(f"{unknown('model', name, MODELS)}; use offbeat.Pipeline for your own module")
    return MODELS[name]


def _usable_shape(name: str, spec: NetworkSpec, shape: Any) -> Shape:
    smallest = (1, spec.smallest, spec.smallest)
    if isinstance(shape, tuple | list) and len(shape) == 3 and all(map(_whole, shape, smallest)):
        return (shape[0], shape[1], shape[2])
    raise UserError(
        f"shape={shape!r} for {name}: use (channels, height, width) of at least {smallest}, such as {spec.shape}, "
        "or enlarge the images"
    )


def _whole(value: Any, least: int) -> bool:
    # bool is a subclass of int
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
