"""A multilayer perceptron, one unit per hidden layer."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

HIDDEN = (256, 256, 256, 256)


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Four hidden layers of 256 with ReLU, then a linear head; the first unit flattens the image.

    Hidden layers have He's normal initialisation by fan in (which keeps the variance of the activation) and
    zero biases; the head has PyTorch's, uniform within 1/sqrt(inputs).
    """
    units: OrderedDict[str, nn.Module] = OrderedDict()
    given = prod(shape)
    for layer, features in enumerate(HIDDEN, start=1):
        linear = nn.Linear(given, features)
        nn.init.kaiming_normal_(linear.weight, mode="fan_in", nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        parts: OrderedDict[str, nn.Module] = OrderedDict(linear=linear, relu=nn.ReLU())
        if layer == 1:
            parts = OrderedDict(flatten=nn.Flatten(), **parts)  # (N, C, H, W) -> (N, C * H * W)
        units[f"hidden{layer}"] = nn.Sequential(parts)
        given = features
    units["head"] = nn.Sequential(OrderedDict(linear=nn.Linear(given, classes)))
    return nn.Sequential(units)
