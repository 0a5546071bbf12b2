"""CIFAR-10: Table I(a) of the ADL paper row by row, and our own rows beside it, ordered by worth.

The paper's setting, the defaults of `offbeat.make_recipe`: b = 32, lr = 0.1 bM/256 after 3 epochs of
warm-up, momentum 0.9, weight decay 5e-4, 300 epochs, a tenth of the rate at 150, 225 and 275, that is at 1/2, 3/4 and
11/12 of the epochs, however many. "BP with accumulation" at the same b and M stands beside every ADL.
"""

from __future__ import annotations

from typing import Any

from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.tables.row import Paper, Table, row

BP_BATCH = "the paper's BP values are those of an earlier work at b = 128 without accumulation"
OTHER_BATCH = "taken from an earlier work at b = 128, lr = 0.1, as run here"
DSP_BATCH = "taken from the work on DSP; run here at b = 128, lr = 0.1, as the other columns"
TWO_M = "Table I(a) states M = 4, Table II M = 2"


def cifar10(model: str, method: str, **given: Any) -> Recipe:
    """A recipe of the paper's setting; what is None is left to it."""
    return make_recipe(model=model, data="cifar10", method=method, **given)


def fixed(given: dict[str, Any]) -> dict[str, Any]:
    """The learning rate of M = 1 at any M: what accumulation does where the rate does not follow it."""
    return {"lr": 0.1 * 32 / 256, **given}


def earlier(given: dict[str, Any]) -> dict[str, Any]:
    """The batch and rate of the earlier work whose values the paper shows for the methods it compares with."""
    return {"batch_size": 128, "lr": 0.1, **given}


# ---- ResNet-56, the first by worth


@row(1, Paper(6.18, "Table I(a), ResNet-56, K=8, ADL", remark=TWO_M))
def resnet56_adl_k8_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=4."""
    return cifar10("resnet56", "adl", K=8, M=4, **given)


@row(1, Paper(None, "Table II, ResNet-56, ADL without GA"))
def resnet56_adl_k8_m1(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=1."""
    return cifar10("resnet56", "adl", K=8, M=1, **given)


@row(1)
def resnet56_adl_k8_m1_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=1, with spike compensation."""
    return cifar10("resnet56", "adl", K=8, M=1, corrector="sc", **given)


@row(1)
def resnet56_adl_k8_m4_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=4, with spike compensation."""
    return cifar10("resnet56", "adl", K=8, M=4, corrector="sc", **given)


@row(1, Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH))
def resnet56_bp_m4(**given: Any) -> Recipe:
    """ResNet-56, BP with accumulation, M=4."""
    return cifar10("resnet56", "bp", M=4, **given)


# ---- ResNet-56, other K and M


@row(2, Paper(6.07, "Table I(a), ResNet-56, K=2, ADL"))
def resnet56_adl_k2_m2(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=2, M=2."""
    return cifar10("resnet56", "adl", K=2, M=2, **given)


@row(2, Paper(6.09, "Table I(a), ResNet-56, K=3, ADL"))
def resnet56_adl_k3_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=3, M=4."""
    return cifar10("resnet56", "adl", K=3, M=4, **given)


@row(2, Paper(6.16, "Table I(a), ResNet-56, K=4, ADL"))
def resnet56_adl_k4_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=4, M=4."""
    return cifar10("resnet56", "adl", K=4, M=4, **given)


@row(2, Paper(6.18, "Table II, ResNet-56, ADL with GA", remark=TWO_M))
def resnet56_adl_k8_m2(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=2."""
    return cifar10("resnet56", "adl", K=8, M=2, **given)


@row(2, Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH))
def resnet56_bp_m2(**given: Any) -> Recipe:
    """ResNet-56, BP with accumulation, M=2."""
    return cifar10("resnet56", "bp", M=2, **given)


@row(2, Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH))
def resnet56_bp_m1(**given: Any) -> Recipe:
    """ResNet-56, BP, M=1."""
    return cifar10("resnet56", "bp", M=1, **given)


# ---- ResNet-56, what the paper does not separate (ours)


@row(3)
def resnet56_adl_k8_m4_hybrid(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=4, with hybrid weights."""
    return cifar10("resnet56", "adl", K=8, M=4, weights="hybrid", **given)


@row(3)
def resnet56_adl_k8_m1_hybrid(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=1, with hybrid weights."""
    return cifar10("resnet56", "adl", K=8, M=1, weights="hybrid", **given)


@row(3)
def resnet56_adl_k8_m4_fixed(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=8, M=4, learning rate of M=1."""
    return cifar10("resnet56", "adl", K=8, M=4, **fixed(given))


@row(3)
def resnet56_bp_m4_fixed(**given: Any) -> Recipe:
    """ResNet-56, BP with accumulation, M=4, learning rate of M=1."""
    return cifar10("resnet56", "bp", M=4, **fixed(given))


@row(3)
def resnet56_adl_1f1b_k8_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL on the 1F1B lag, K=8, M=4."""
    return cifar10("resnet56", "adl-1f1b", K=8, M=4, **given)


@row(3)
def resnet56_adl_1f1b_k8_m1(**given: Any) -> Recipe:
    """ResNet-56, ADL on the 1F1B lag, K=8, M=1."""
    return cifar10("resnet56", "adl-1f1b", K=8, M=1, **given)


@row(3)
def resnet56_adl_1f1b_k8_m4_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL on the 1F1B lag, K=8, M=4, with spike compensation."""
    return cifar10("resnet56", "adl-1f1b", K=8, M=4, corrector="sc", **given)


@row(4)
def resnet56_adl_1f1b_k28_m1_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL on the 1F1B lag, K=28, M=1, with spike compensation."""
    return cifar10("resnet56", "adl-1f1b", K=28, M=1, corrector="sc", **given)


@row(4)
def resnet56_adl_k14_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=14, M=4."""
    return cifar10("resnet56", "adl", K=14, M=4, **given)


@row(4)
def resnet56_adl_k14_m4_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=14, M=4, with spike compensation."""
    return cifar10("resnet56", "adl", K=14, M=4, corrector="sc", **given)


@row(4)
def resnet56_adl_k28_m4(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=28, M=4."""
    return cifar10("resnet56", "adl", K=28, M=4, **given)


@row(4)
def resnet56_adl_k28_m4_sc(**given: Any) -> Recipe:
    """ResNet-56, ADL, K=28, M=4, with spike compensation."""
    return cifar10("resnet56", "adl", K=28, M=4, corrector="sc", **given)


# ---- ResNet-18 and ResNet-110


@row(5, Paper(4.92, "Table I(a), ResNet-18, K=8, ADL"))
def resnet18_adl_k8_m4(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=8, M=4."""
    return cifar10("resnet18-cifar", "adl", K=8, M=4, **given)


@row(5, Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH))
def resnet18_bp_m4(**given: Any) -> Recipe:
    """ResNet-18, BP with accumulation, M=4."""
    return cifar10("resnet18-cifar", "bp", M=4, **given)


@row(5)
def resnet18_adl_k8_m4_sc(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=8, M=4, with spike compensation."""
    return cifar10("resnet18-cifar", "adl", K=8, M=4, corrector="sc", **given)


@row(5, Paper(5.50, "Table II, ResNet-18, ADL without GA"))
def resnet18_adl_k8_m1(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=8, M=1."""
    return cifar10("resnet18-cifar", "adl", K=8, M=1, **given)


@row(5, Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH))
def resnet18_bp_m1(**given: Any) -> Recipe:
    """ResNet-18, BP, M=1."""
    return cifar10("resnet18-cifar", "bp", M=1, **given)


@row(6, Paper(5.80, "Table I(a), ResNet-110, K=8, ADL"))
def resnet110_adl_k8_m4(**given: Any) -> Recipe:
    """ResNet-110, ADL, K=8, M=4."""
    return cifar10("resnet110", "adl", K=8, M=4, **given)


@row(6, Paper(5.79, "Table I(a), ResNet-110, BP", remark=BP_BATCH))
def resnet110_bp_m4(**given: Any) -> Recipe:
    """ResNet-110, BP with accumulation, M=4."""
    return cifar10("resnet110", "bp", M=4, **given)


@row(6)
def resnet110_adl_k8_m4_sc(**given: Any) -> Recipe:
    """ResNet-110, ADL, K=8, M=4, with spike compensation."""
    return cifar10("resnet110", "adl", K=8, M=4, corrector="sc", **given)


@row(7, Paper(4.82, "Table I(a), ResNet-18, K=2, ADL"))
def resnet18_adl_k2_m2(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=2, M=2."""
    return cifar10("resnet18-cifar", "adl", K=2, M=2, **given)


@row(7, Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH))
def resnet18_bp_m2(**given: Any) -> Recipe:
    """ResNet-18, BP with accumulation, M=2."""
    return cifar10("resnet18-cifar", "bp", M=2, **given)


@row(7, Paper(5.70, "Table I(a), ResNet-110, K=2, ADL"))
def resnet110_adl_k2_m2(**given: Any) -> Recipe:
    """ResNet-110, ADL, K=2, M=2."""
    return cifar10("resnet110", "adl", K=2, M=2, **given)


@row(7, Paper(5.79, "Table I(a), ResNet-110, BP", remark=BP_BATCH))
def resnet110_bp_m2(**given: Any) -> Recipe:
    """ResNet-110, BP with accumulation, M=2."""
    return cifar10("resnet110", "bp", M=2, **given)


# ---- ResNet-98 and ResNet-164


@row(8, Paper(5.90, "Table I(a), ResNet-98, K=4, ADL"))
def resnet98_adl_k4_m3(**given: Any) -> Recipe:
    """ResNet-98, ADL, K=4, M=3."""
    return cifar10("resnet98", "adl", K=4, M=3, **given)


@row(8, Paper(6.01, "Table I(a), ResNet-98, BP", remark=BP_BATCH))
def resnet98_bp_m3(**given: Any) -> Recipe:
    """ResNet-98, BP with accumulation, M=3."""
    return cifar10("resnet98", "bp", M=3, **given)


@row(8, Paper(5.45, "Table I(a), ResNet-164, K=4, ADL"))
def resnet164_adl_k4_m2(**given: Any) -> Recipe:
    """ResNet-164, ADL, K=4, M=2."""
    return cifar10("resnet164", "adl", K=4, M=2, **given)


@row(8, Paper(5.52, "Table I(a), ResNet-164, K=10, ADL"))
def resnet164_adl_k10_m2(**given: Any) -> Recipe:
    """ResNet-164, ADL, K=10, M=2."""
    return cifar10("resnet164", "adl", K=10, M=2, **given)


@row(8, Paper(5.36, "Table I(a), ResNet-164, BP", remark=BP_BATCH))
def resnet164_bp_m2(**given: Any) -> Recipe:
    """ResNet-164, BP with accumulation, M=2."""
    return cifar10("resnet164", "bp", M=2, **given)


# ---- The other columns, at the batch and rate at which their values were taken


@row(9, Paper(6.19, "Table I(a), ResNet-56, BP", remark=OTHER_BATCH))
def resnet56_bp_b128(**given: Any) -> Recipe:
    """ResNet-56, BP, b=128."""
    return cifar10("resnet56", "bp", **earlier(given))


@row(9, Paper(4.87, "Table I(a), ResNet-18, BP", remark=OTHER_BATCH))
def resnet18_bp_b128(**given: Any) -> Recipe:
    """ResNet-18, BP, b=128."""
    return cifar10("resnet18-cifar", "bp", **earlier(given))


@row(9, Paper(5.79, "Table I(a), ResNet-110, BP", remark=OTHER_BATCH))
def resnet110_bp_b128(**given: Any) -> Recipe:
    """ResNet-110, BP, b=128."""
    return cifar10("resnet110", "bp", **earlier(given))


@row(9, Paper(6.63, "Table I(a), ResNet-56, K=2, DDG", remark=OTHER_BATCH))
def resnet56_ddg_k2_b128(**given: Any) -> Recipe:
    """ResNet-56, DDG, K=2, b=128."""
    return cifar10("resnet56", "ddg", K=2, **earlier(given))


@row(9, Paper(6.77, "Table I(a), ResNet-56, K=2, DGL", remark=OTHER_BATCH))
def resnet56_dgl_k2_b128(**given: Any) -> Recipe:
    """ResNet-56, DGL, K=2, b=128."""
    return cifar10("resnet56", "dgl", K=2, **earlier(given))


@row(9, Paper(6.07, "Table I(a), ResNet-56, K=2, FR", remark=OTHER_BATCH))
def resnet56_fr_k2_b128(**given: Any) -> Recipe:
    """ResNet-56, FR, K=2, b=128."""
    return cifar10("resnet56", "fr", K=2, **earlier(given))


@row(9, Paper(6.50, "Table I(a), ResNet-56, K=3, DDG", remark=OTHER_BATCH))
def resnet56_ddg_k3_b128(**given: Any) -> Recipe:
    """ResNet-56, DDG, K=3, b=128."""
    return cifar10("resnet56", "ddg", K=3, **earlier(given))


@row(9, Paper(8.88, "Table I(a), ResNet-56, K=3, DGL", remark=OTHER_BATCH))
def resnet56_dgl_k3_b128(**given: Any) -> Recipe:
    """ResNet-56, DGL, K=3, b=128."""
    return cifar10("resnet56", "dgl", K=3, **earlier(given))


@row(9, Paper(6.33, "Table I(a), ResNet-56, K=3, FR", remark=OTHER_BATCH))
def resnet56_fr_k3_b128(**given: Any) -> Recipe:
    """ResNet-56, FR, K=3, b=128."""
    return cifar10("resnet56", "fr", K=3, **earlier(given))


@row(9, Paper(6.61, "Table I(a), ResNet-56, K=4, DDG", remark=OTHER_BATCH))
def resnet56_ddg_k4_b128(**given: Any) -> Recipe:
    """ResNet-56, DDG, K=4, b=128."""
    return cifar10("resnet56", "ddg", K=4, **earlier(given))


@row(9, Paper(9.65, "Table I(a), ResNet-56, K=4, DGL", remark=OTHER_BATCH))
def resnet56_dgl_k4_b128(**given: Any) -> Recipe:
    """ResNet-56, DGL, K=4, b=128."""
    return cifar10("resnet56", "dgl", K=4, **earlier(given))


@row(9, Paper(6.48, "Table I(a), ResNet-56, K=4, FR", remark=OTHER_BATCH))
def resnet56_fr_k4_b128(**given: Any) -> Recipe:
    """ResNet-56, FR, K=4, b=128."""
    return cifar10("resnet56", "fr", K=4, **earlier(given))


@row(9, Paper(5.00, "Table I(a), ResNet-18, K=2, DDG", remark=OTHER_BATCH))
def resnet18_ddg_k2_b128(**given: Any) -> Recipe:
    """ResNet-18, DDG, K=2, b=128."""
    return cifar10("resnet18-cifar", "ddg", K=2, **earlier(given))


@row(9, Paper(5.21, "Table I(a), ResNet-18, K=2, DGL", remark=OTHER_BATCH))
def resnet18_dgl_k2_b128(**given: Any) -> Recipe:
    """ResNet-18, DGL, K=2, b=128."""
    return cifar10("resnet18-cifar", "dgl", K=2, **earlier(given))


@row(9, Paper(4.80, "Table I(a), ResNet-18, K=2, FR", remark=OTHER_BATCH))
def resnet18_fr_k2_b128(**given: Any) -> Recipe:
    """ResNet-18, FR, K=2, b=128."""
    return cifar10("resnet18-cifar", "fr", K=2, **earlier(given))


@row(9, Paper(6.26, "Table I(a), ResNet-110, K=2, DDG", remark=OTHER_BATCH))
def resnet110_ddg_k2_b128(**given: Any) -> Recipe:
    """ResNet-110, DDG, K=2, b=128."""
    return cifar10("resnet110", "ddg", K=2, **earlier(given))


@row(9, Paper(6.26, "Table I(a), ResNet-110, K=2, DGL", remark=OTHER_BATCH))
def resnet110_dgl_k2_b128(**given: Any) -> Recipe:
    """ResNet-110, DGL, K=2, b=128."""
    return cifar10("resnet110", "dgl", K=2, **earlier(given))


@row(9, Paper(5.76, "Table I(a), ResNet-110, K=2, FR", remark=OTHER_BATCH))
def resnet110_fr_k2_b128(**given: Any) -> Recipe:
    """ResNet-110, FR, K=2, b=128."""
    return cifar10("resnet110", "fr", K=2, **earlier(given))


@row(9, Paper(6.59, "Table I(a), ResNet-98, K=4, DSP", remark=DSP_BATCH))
def resnet98_dsp_k4_b128(**given: Any) -> Recipe:
    """ResNet-98, DSP, K=4, b=128."""
    return cifar10("resnet98", "dsp", K=4, **earlier(given))


@row(9, Paper(5.58, "Table I(a), ResNet-164, K=4, DSP", remark=DSP_BATCH))
def resnet164_dsp_k4_b128(**given: Any) -> Recipe:
    """ResNet-164, DSP, K=4, b=128."""
    return cifar10("resnet164", "dsp", K=4, **earlier(given))


CIFAR10_TABLE = Table(
    name="cifar10-table",
    title="CIFAR-10, Table I(a)",
    rows=(
        resnet56_adl_k8_m4,
        resnet56_adl_k8_m1,
        resnet56_adl_k8_m1_sc,
        resnet56_adl_k8_m4_sc,
        resnet56_bp_m4,
        resnet56_adl_k2_m2,
        resnet56_adl_k3_m4,
        resnet56_adl_k4_m4,
        resnet56_adl_k8_m2,
        resnet56_bp_m2,
        resnet56_bp_m1,
        resnet56_adl_k8_m4_hybrid,
        resnet56_adl_k8_m1_hybrid,
        resnet56_adl_k8_m4_fixed,
        resnet56_bp_m4_fixed,
        resnet56_adl_1f1b_k8_m4,
        resnet56_adl_1f1b_k8_m1,
        resnet56_adl_1f1b_k8_m4_sc,
        resnet56_adl_1f1b_k28_m1_sc,
        resnet56_adl_k14_m4,
        resnet56_adl_k14_m4_sc,
        resnet56_adl_k28_m4,
        resnet56_adl_k28_m4_sc,
        resnet18_adl_k8_m4,
        resnet18_bp_m4,
        resnet18_adl_k8_m4_sc,
        resnet18_adl_k8_m1,
        resnet18_bp_m1,
        resnet110_adl_k8_m4,
        resnet110_bp_m4,
        resnet110_adl_k8_m4_sc,
        resnet18_adl_k2_m2,
        resnet18_bp_m2,
        resnet110_adl_k2_m2,
        resnet110_bp_m2,
        resnet98_adl_k4_m3,
        resnet98_bp_m3,
        resnet164_adl_k4_m2,
        resnet164_adl_k10_m2,
        resnet164_bp_m2,
        resnet56_bp_b128,
        resnet18_bp_b128,
        resnet110_bp_b128,
        resnet56_ddg_k2_b128,
        resnet56_dgl_k2_b128,
        resnet56_fr_k2_b128,
        resnet56_ddg_k3_b128,
        resnet56_dgl_k3_b128,
        resnet56_fr_k3_b128,
        resnet56_ddg_k4_b128,
        resnet56_dgl_k4_b128,
        resnet56_fr_k4_b128,
        resnet18_ddg_k2_b128,
        resnet18_dgl_k2_b128,
        resnet18_fr_k2_b128,
        resnet110_ddg_k2_b128,
        resnet110_dgl_k2_b128,
        resnet110_fr_k2_b128,
        resnet98_dsp_k4_b128,
        resnet164_dsp_k4_b128,
    ),
)
