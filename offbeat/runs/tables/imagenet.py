"""ImageNet: Table I(b) of the ADL paper row by row, top-1 and top-5, for any folder of images.

The paper's setting: b = 32, lr = 0.1 bM/256 after 3 epochs of warm-up, momentum 0.9, weight decay 1e-4, 90 epochs, a
tenth of the rate at 30, 60 and 80, that is at 1/3, 2/3 and 8/9 of the epochs, however many; 224x224 crops. Another
image folder than ImageNet gives other errors, with which the paper's values cannot be compared.
"""

from __future__ import annotations

from typing import Any

from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.tables.row import STALENESS_WARMUP, Images, Paper, Table, row

BP_SETTING = "the paper does not state the M of its BP"


def imagenet(model: str, method: str, **given: Any) -> Recipe:
    """A recipe of the paper's setting for folders of images; what is None is left to it."""
    return make_recipe(model=model, data="imagefolder", method=method, **given)


@row(1, Paper(29.75, "Table I(b), ResNet-18, K=8, ADL", top5=10.55))
def resnet18_adl_k8_m4(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=8, M=4."""
    return imagenet("resnet18", "adl", K=8, M=4, **given)


@row(1, Paper(29.79, "Table I(b), ResNet-18, BP", top5=10.92, remark=BP_SETTING))
def resnet18_bp_m4(**given: Any) -> Recipe:
    """ResNet-18, BP with accumulation, M=4."""
    return imagenet("resnet18", "bp", M=4, **given)


@row(1, Paper(29.84, "Table I(b), ResNet-18, K=10, ADL", top5=10.76))
def resnet18_adl_k10_m4(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=10, M=4."""
    return imagenet("resnet18", "adl", K=10, M=4, **given)


@row(2)
def resnet18_adl_1f1b_k8_m4_sc(**given: Any) -> Recipe:
    """ResNet-18, ADL on the 1F1B lag, K=8, M=4, with spike compensation."""
    return imagenet("resnet18", "adl-1f1b", K=8, M=4, corrector="sc", **given)


@row(2)
def resnet18_adl_1f1b_k8_m4_sc_warmup(**given: Any) -> Recipe:
    """ResNet-18, ADL on the 1F1B lag, K=8, M=4, with spike compensation, the first 150 updates synchronous."""
    return imagenet("resnet18", "adl-1f1b", K=8, M=4, corrector="sc", staleness_warmup=STALENESS_WARMUP, **given)


@row(2, Paper(29.01, "Table I(b), SE-ResNet-18, K=8, ADL", top5=10.14))
def seresnet18_adl_k8_m4(**given: Any) -> Recipe:
    """SE-ResNet-18, ADL, K=8, M=4."""
    return imagenet("seresnet18", "adl", K=8, M=4, **given)


@row(2, Paper(29.09, "Table I(b), SE-ResNet-18, BP", top5=9.89, remark=BP_SETTING))
def seresnet18_bp_m4(**given: Any) -> Recipe:
    """SE-ResNet-18, BP with accumulation, M=4."""
    return imagenet("seresnet18", "bp", M=4, **given)


@row(2, Paper(29.07, "Table I(b), SE-ResNet-18, K=10, ADL", top5=10.31))
def seresnet18_adl_k10_m2(**given: Any) -> Recipe:
    """SE-ResNet-18, ADL, K=10, M=2."""
    return imagenet("seresnet18", "adl", K=10, M=2, **given)


@row(2, Paper(29.09, "Table I(b), SE-ResNet-18, BP", top5=9.89, remark=BP_SETTING))
def seresnet18_bp_m2(**given: Any) -> Recipe:
    """SE-ResNet-18, BP with accumulation, M=2."""
    return imagenet("seresnet18", "bp", M=2, **given)


@row(3, Paper(29.51, "Table I(b), ResNet-18, K=3, ADL", top5=10.41))
def resnet18_adl_k3_m2(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=3, M=2."""
    return imagenet("resnet18", "adl", K=3, M=2, **given)


@row(3, Paper(29.64, "Table I(b), ResNet-18, K=4, ADL", top5=10.56))
def resnet18_adl_k4_m4(**given: Any) -> Recipe:
    """ResNet-18, ADL, K=4, M=4."""
    return imagenet("resnet18", "adl", K=4, M=4, **given)


@row(3, Paper(29.79, "Table I(b), ResNet-18, BP", top5=10.92, remark=BP_SETTING))
def resnet18_bp_m2(**given: Any) -> Recipe:
    """ResNet-18, BP with accumulation, M=2."""
    return imagenet("resnet18", "bp", M=2, **given)


@row(4, Paper(23.92, "Table I(b), ResNet-50, K=3, ADL", top5=7.07))
def resnet50_adl_k3_m2(**given: Any) -> Recipe:
    """ResNet-50, ADL, K=3, M=2."""
    return imagenet("resnet50", "adl", K=3, M=2, **given)


@row(4, Paper(23.65, "Table I(b), ResNet-50, BP", top5=7.13, remark=BP_SETTING))
def resnet50_bp_m2(**given: Any) -> Recipe:
    """ResNet-50, BP with accumulation, M=2."""
    return imagenet("resnet50", "bp", M=2, **given)


@row(4, Paper(23.37, "Table I(b), ResNet-50, K=4, ADL", top5=7.44))
def resnet50_adl_k4_m8(**given: Any) -> Recipe:
    """ResNet-50, ADL, K=4, M=8."""
    return imagenet("resnet50", "adl", K=4, M=8, **given)


@row(4, Paper(23.65, "Table I(b), ResNet-50, BP", top5=7.13, remark=BP_SETTING))
def resnet50_bp_m8(**given: Any) -> Recipe:
    """ResNet-50, BP with accumulation, M=8."""
    return imagenet("resnet50", "bp", M=8, **given)


@row(5, Paper(31.16, "Table I(b), ResNet-18, K=3, FR"))
def resnet18_fr_k3(**given: Any) -> Recipe:
    """ResNet-18, FR, K=3."""
    return imagenet("resnet18", "fr", K=3, **given)


@row(5, Paper(31.15, "Table I(b), ResNet-18, K=3, DSP"))
def resnet18_dsp_k3(**given: Any) -> Recipe:
    """ResNet-18, DSP, K=3."""
    return imagenet("resnet18", "dsp", K=3, **given)


@row(5, Paper(25.53, "Table I(b), ResNet-50, K=3, FR"))
def resnet50_fr_k3(**given: Any) -> Recipe:
    """ResNet-50, FR, K=3."""
    return imagenet("resnet50", "fr", K=3, **given)


@row(5, Paper(25.09, "Table I(b), ResNet-50, K=3, DSP"))
def resnet50_dsp_k3(**given: Any) -> Recipe:
    """ResNet-50, DSP, K=3."""
    return imagenet("resnet50", "dsp", K=3, **given)


IMAGES = Images(1000, 1_281_167, 50_000)
IMAGENET_TABLE = Table(
    name="imagenet-table",
    title="ImageNet, Table I(b)",
    top5=True,
    images=IMAGES,
    rows=(
        resnet18_adl_k8_m4,
        resnet18_bp_m4,
        resnet18_adl_k10_m4,
        resnet18_adl_1f1b_k8_m4_sc,
        resnet18_adl_1f1b_k8_m4_sc_warmup,
        seresnet18_adl_k8_m4,
        seresnet18_bp_m4,
        seresnet18_adl_k10_m2,
        seresnet18_bp_m2,
        resnet18_adl_k3_m2,
        resnet18_adl_k4_m4,
        resnet18_bp_m2,
        resnet50_adl_k3_m2,
        resnet50_bp_m2,
        resnet50_adl_k4_m8,
        resnet50_bp_m8,
        resnet18_fr_k3,
        resnet18_dsp_k3,
        resnet50_fr_k3,
        resnet50_dsp_k3,
    ),
)
