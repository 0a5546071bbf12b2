"""The ablation (Table II of the ADL paper): ADL with and without accumulation, BP at the same b and M beside it.

What the paper leaves together is separated by our own rows: hybrid against stash, the rate fixed against the rate that
follows M, and what spike compensation does instead of accumulation.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.runs.tables import cifar10 as rows
from offbeat.runs.tables.row import Table

# The paper's own rows come first here, whatever their worth is among those of Table I(a).
PUBLISHED = (
    rows.resnet56_adl_k8_m2,
    rows.resnet56_adl_k8_m1,
    rows.resnet56_bp_m2,
    rows.resnet56_bp_m1,
    rows.resnet56_adl_k8_m4,
    rows.resnet56_bp_m4,
    rows.resnet18_adl_k8_m4,
    rows.resnet18_adl_k8_m1,
    rows.resnet18_bp_m4,
    rows.resnet18_bp_m1,
)
OURS = (
    rows.resnet56_adl_k8_m1_hybrid,
    rows.resnet56_adl_k8_m4_hybrid,
    rows.resnet56_adl_k8_m4_fixed,
    rows.resnet56_bp_m4_fixed,
    rows.resnet56_adl_k8_m1_sc,
    rows.resnet56_adl_k8_m4_sc,
)

ABLATION = Table(
    name="ablation",
    title="CIFAR-10, the ablation (Table II)",
    rows=(*(replace(row, tier=1) for row in PUBLISHED), *(replace(row, tier=3) for row in OURS)),
)
