"""The learning curves (Fig. 3(a) of the ADL paper): ResNet-56 on CIFAR-10, test error by epoch and by wall time.

The paper does not print which K its figure has; these are the methods that it compares at K = 4, and ADL at K = 8.
Fig. 3(b), ResNet-18 on ImageNet, is among the curves of `imagenet-table`.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.runs.tables import cifar10 as rows
from offbeat.runs.tables.row import Table

DRAWN = (
    rows.resnet56_bp_m4,
    rows.resnet56_adl_k8_m4,
    rows.resnet56_adl_k4_m4,
    rows.resnet56_ddg_k4_b128,
    rows.resnet56_fr_k4_b128,
    rows.resnet56_dgl_k4_b128,
    rows.resnet56_adl_k8_m4_sc,
)

CURVES = Table(
    name="curves",
    title="CIFAR-10, learning curves of ResNet-56 (Fig. 3(a))",
    rows=tuple(replace(row, tier=1) for row in DRAWN),
)
