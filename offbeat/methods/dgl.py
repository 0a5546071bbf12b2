"""DGL: decoupled greedy learning.

Belilovsky, Eickenberg, Oyallon, "Decoupled Greedy Learning of CNNs" (ICML 2020), Algorithm 1. Every stage
but the last has an auxiliary classifier and is trained with its loss alone. It sends the output from before its update:

    (theta_k, gamma_k) <- (theta_k, gamma_k) - lr grad CE(a_k(f_k(z_(k-1))), y)

    K=2             tick  0      1      2
    stage 1             | F0B0U  F1B1U  F2B2U
    stage 2             | -      F0B0U  F1B1U

The classifier is the paper's MLP-SR: pooling to a quarter, three 1x1 convolutions, pooling to 2x2, three linear layers.
Locks: forward, which can be pipelined. Staleness 0. Held: one graph, one version. Time per batch: F + B + A, with A the
time of the classifier.
"""

from __future__ import annotations

from typing import Any

from offbeat.method import Method
from offbeat.methods import lags


def head(shape: tuple[int, ...], classes: int) -> Any:
    """The MLP-SR classifier of the paper for images, its linear part for vectors."""
    from torch import nn

    from offbeat.heads import Classifier

    def linear(size: int) -> list[nn.Module]:
        return [nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU()]

    if len(shape) == 1:
        size, layers = shape[0], list[nn.Module]()
    else:
        C, *sides = shape
        layers = [nn.AdaptiveAvgPool2d(tuple(-(-side // 4) for side in sides))]
        for _ in range(3):
            layers += [nn.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        size = 4 * C
    return Classifier(nn.Sequential(*layers, *linear(size), *linear(size), *linear(size), nn.Linear(size, classes)))


def DGL() -> Method:  # noqa: N802
    """Greedy learning: every stage is trained with its own classifier.

    >>> [" ".join(map(str, iteration)) for iteration in DGL().program(1, 2, range(2))]
    ['F0 B0 U', 'F1 B1 U']
    """
    return Method(
        name="dgl",
        title="decoupled greedy learning",
        reference="Belilovsky et al. 2020",
        locks=("forward",),
        lag=lags.none,
        feedback="local",
        head=head,
    )
