"""The learning curves (Fig. 3(a) of the ADL paper): ResNet-56 on CIFAR-10, test error by epoch and by wall time.

The paper does not print which K its figure has; these are the methods that it compares at K = 4, and ADL at K = 8.
Fig. 3(b), ResNet-18 on ImageNet, is among the curves of `imagenet-table`.
"""

from __future__ import annotations

from offbeat.runs.tables.cifar10 import CIFAR10_TABLE
from offbeat.runs.tables.row import Table

DRAWN = CIFAR10_TABLE.in_tier(
    1,
    "resnet56-bp-m4",
    "resnet56-adl-k8-m4",
    "resnet56-adl-k4-m4",
    "resnet56-ddg-k4-b128",
    "resnet56-fr-k4-b128",
    "resnet56-dgl-k4-b128",
    "resnet56-adl-k8-m4-sc",
)

CURVES = Table(name="curves", title="CIFAR-10, learning curves of ResNet-56 (Fig. 3(a))", rows=tuple(DRAWN))
