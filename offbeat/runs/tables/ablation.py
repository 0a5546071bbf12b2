"""The ablation (Table II of the ADL paper): ADL with and without accumulation, BP at the same b and M beside it.

What the paper leaves together is separated by our own rows: hybrid against stash, the rate fixed against the rate that
follows M, and what spike compensation does instead of accumulation.
"""

from __future__ import annotations

from offbeat.runs.tables.cifar10 import CIFAR10_TABLE
from offbeat.runs.tables.row import Table

# The paper's own rows come first here, whatever their worth is among those of Table I(a).
PUBLISHED = CIFAR10_TABLE.in_tier(
    1,
    "resnet56-adl-k8-m2",
    "resnet56-adl-k8-m1",
    "resnet56-bp-m2",
    "resnet56-bp-m1",
    "resnet56-adl-k8-m4",
    "resnet56-bp-m4",
    "resnet18-adl-k8-m4",
    "resnet18-adl-k8-m1",
    "resnet18-bp-m4",
    "resnet18-bp-m1",
)
OURS = CIFAR10_TABLE.in_tier(
    3,
    "resnet56-adl-k8-m1-hybrid",
    "resnet56-adl-k8-m4-hybrid",
    "resnet56-adl-k8-m4-fixed",
    "resnet56-bp-m4-fixed",
    "resnet56-adl-k8-m1-sc",
    "resnet56-adl-k8-m4-sc",
)

ABLATION = Table(name="ablation", title="CIFAR-10, the ablation (Table II)", rows=(*PUBLISHED, *OURS))
