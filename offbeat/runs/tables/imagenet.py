"""ImageNet: Table I(b) of the ADL paper row by row, top-1 and top-5, for any folder of images.

The paper's setting: b = 32, lr = 0.1 bM/256 after 3 epochs of warm-up, momentum 0.9, weight decay 1e-4, 90 epochs, a
tenth of the rate at 30, 60 and 80, that is at 1/3, 2/3 and 8/9 of the epochs, however many; 224x224 crops. Another
image folder than ImageNet gives other errors, with which the paper's values cannot be compared.
"""

from __future__ import annotations

from functools import partial

from offbeat.runs.tables.row import GROWING, LONGER_WARMUP, STALENESS_WARMUP, Images, Paper, Table, row

BP_SETTING = "the paper does not state the M of its BP"

imagenet = partial(row, "imagefolder")

ROWS = (
    imagenet(1, "resnet18", "adl", Paper(29.75, "Table I(b), ResNet-18, K=8, ADL", top5=10.55), K=8, M=4),
    imagenet(1, "resnet18", "bp", Paper(29.79, "Table I(b), ResNet-18, BP", top5=10.92, remark=BP_SETTING), M=4),
    imagenet(1, "resnet18", "adl", Paper(29.84, "Table I(b), ResNet-18, K=10, ADL", top5=10.76), K=10, M=4),
    imagenet(2, "resnet18", "adl-1f1b", K=8, M=4, corrector="sc"),
    imagenet(2, "resnet18", "adl-1f1b", K=8, M=4, corrector="sc", staleness_warmup=STALENESS_WARMUP),
    imagenet(3, "resnet18", "adl-1f1b", K=8, M=4, corrector="sc", staleness_warmup=LONGER_WARMUP),
    imagenet(3, "resnet18", "adl", K=8, M=4, corrector="sc", staleness_warmup=STALENESS_WARMUP),
    imagenet(3, "resnet18", "adl", K=8, M=4, corrector="sc", staleness_warmup=GROWING),
    imagenet(2, "seresnet18", "adl", Paper(29.01, "Table I(b), SE-ResNet-18, K=8, ADL", top5=10.14), K=8, M=4),
    imagenet(2, "seresnet18", "bp", Paper(29.09, "Table I(b), SE-ResNet-18, BP", top5=9.89, remark=BP_SETTING), M=4),
    imagenet(2, "seresnet18", "adl", Paper(29.07, "Table I(b), SE-ResNet-18, K=10, ADL", top5=10.31), K=10, M=2),
    imagenet(2, "seresnet18", "bp", Paper(29.09, "Table I(b), SE-ResNet-18, BP", top5=9.89, remark=BP_SETTING), M=2),
    imagenet(3, "resnet18", "adl", Paper(29.51, "Table I(b), ResNet-18, K=3, ADL", top5=10.41), K=3, M=2),
    imagenet(3, "resnet18", "adl", Paper(29.64, "Table I(b), ResNet-18, K=4, ADL", top5=10.56), K=4, M=4),
    imagenet(3, "resnet18", "bp", Paper(29.79, "Table I(b), ResNet-18, BP", top5=10.92, remark=BP_SETTING), M=2),
    imagenet(4, "resnet50", "adl", Paper(23.92, "Table I(b), ResNet-50, K=3, ADL", top5=7.07), K=3, M=2),
    imagenet(4, "resnet50", "bp", Paper(23.65, "Table I(b), ResNet-50, BP", top5=7.13, remark=BP_SETTING), M=2),
    imagenet(4, "resnet50", "adl", Paper(23.37, "Table I(b), ResNet-50, K=4, ADL", top5=7.44), K=4, M=8),
    imagenet(4, "resnet50", "bp", Paper(23.65, "Table I(b), ResNet-50, BP", top5=7.13, remark=BP_SETTING), M=8),
    imagenet(5, "resnet18", "fr", Paper(31.16, "Table I(b), ResNet-18, K=3, FR"), K=3),
    imagenet(5, "resnet18", "dsp", Paper(31.15, "Table I(b), ResNet-18, K=3, DSP"), K=3),
    imagenet(5, "resnet50", "fr", Paper(25.53, "Table I(b), ResNet-50, K=3, FR"), K=3),
    imagenet(5, "resnet50", "dsp", Paper(25.09, "Table I(b), ResNet-50, K=3, DSP"), K=3),
)
IMAGENET_TABLE = Table(
    name="imagenet-table",
    title="ImageNet, Table I(b)",
    top5=True,
    images=Images(1000, 1_281_167, 50_000),
    rows=ROWS,
)
