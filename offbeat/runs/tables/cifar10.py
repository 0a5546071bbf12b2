"""CIFAR-10: Table I(a) of the ADL paper row by row, and our own rows beside it, ordered by worth.

The paper's setting, the defaults of `offbeat.make_recipe`: b = 32, lr = 0.1 bM/256 after 3 epochs of
warm-up, momentum 0.9, weight decay 5e-4, 300 epochs, a tenth of the rate at 150, 225 and 275, that is at 1/2, 3/4 and
11/12 of the epochs, however many. "BP with accumulation" at the same b and M stands beside every ADL.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from offbeat.runs.tables.row import PAPER_RATE, Paper, Table, TableRow, row

BP_BATCH = "the paper's BP values are those of an earlier work at b = 128 without accumulation"
OTHER_BATCH = "taken from an earlier work at b = 128, lr = 0.1, as run here"
DSP_BATCH = "taken from the work on DSP; run here at b = 128, lr = 0.1, as the other columns"
TWO_M = "Table I(a) states M = 4, Table II M = 2"

cifar10 = partial(row, "cifar10")


def column(
    model: str, method: str, error: float, place: str, *, remark: str = OTHER_BATCH, **settings: Any
) -> TableRow:
    """A value of another column of Table I(a), at the batch and rate of the earlier work that it is from."""
    paper = Paper(error, f"Table I(a), {place}", remark=remark)
    return cifar10(9, model, method, paper, batch_size=128, lr=0.1, **settings)


ROWS = (
    # ---- ResNet-56, the first by worth
    cifar10(1, "resnet56", "adl", Paper(6.18, "Table I(a), ResNet-56, K=8, ADL", remark=TWO_M), K=8, M=4),
    cifar10(1, "resnet56", "adl", Paper(None, "Table II, ResNet-56, ADL without GA"), K=8, M=1),
    cifar10(1, "resnet56", "adl", K=8, M=1, corrector="sc"),
    cifar10(1, "resnet56", "adl", K=8, M=4, corrector="sc"),
    cifar10(1, "resnet56", "bp", Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH), M=4),
    # ---- ResNet-56, other K and M
    cifar10(2, "resnet56", "adl", Paper(6.07, "Table I(a), ResNet-56, K=2, ADL"), K=2, M=2),
    cifar10(2, "resnet56", "adl", Paper(6.09, "Table I(a), ResNet-56, K=3, ADL"), K=3, M=4),
    cifar10(2, "resnet56", "adl", Paper(6.16, "Table I(a), ResNet-56, K=4, ADL"), K=4, M=4),
    cifar10(2, "resnet56", "adl", Paper(6.18, "Table II, ResNet-56, ADL with GA", remark=TWO_M), K=8, M=2),
    cifar10(2, "resnet56", "bp", Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH), M=2),
    cifar10(2, "resnet56", "bp", Paper(6.19, "Table I(a), ResNet-56, BP", remark=BP_BATCH), M=1),
    # ---- ResNet-56, what the paper does not separate (ours)
    cifar10(3, "resnet56", "adl", K=8, M=4, weights="hybrid"),
    cifar10(3, "resnet56", "adl", K=8, M=1, weights="hybrid"),
    cifar10(3, "resnet56", "adl", K=8, M=4, lr=PAPER_RATE),
    cifar10(3, "resnet56", "bp", M=4, lr=PAPER_RATE),
    cifar10(3, "resnet56", "adl-1f1b", K=8, M=4),
    cifar10(3, "resnet56", "adl-1f1b", K=8, M=1),
    cifar10(3, "resnet56", "adl-1f1b", K=8, M=4, corrector="sc"),
    cifar10(4, "resnet56", "adl-1f1b", K=28, M=1, corrector="sc"),
    cifar10(4, "resnet56", "adl", K=14, M=4),
    cifar10(4, "resnet56", "adl", K=14, M=4, corrector="sc"),
    cifar10(4, "resnet56", "adl", K=28, M=4),
    cifar10(4, "resnet56", "adl", K=28, M=4, corrector="sc"),
    # ---- ResNet-18 and ResNet-110
    cifar10(5, "resnet18-cifar", "adl", Paper(4.92, "Table I(a), ResNet-18, K=8, ADL"), K=8, M=4),
    cifar10(5, "resnet18-cifar", "bp", Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH), M=4),
    cifar10(5, "resnet18-cifar", "adl", K=8, M=4, corrector="sc"),
    cifar10(5, "resnet18-cifar", "adl", Paper(5.50, "Table II, ResNet-18, ADL without GA"), K=8, M=1),
    cifar10(5, "resnet18-cifar", "bp", Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH), M=1),
    cifar10(6, "resnet110", "adl", Paper(5.80, "Table I(a), ResNet-110, K=8, ADL"), K=8, M=4),
    cifar10(6, "resnet110", "bp", Paper(5.79, "Table I(a), ResNet-110, BP", remark=BP_BATCH), M=4),
    cifar10(6, "resnet110", "adl", K=8, M=4, corrector="sc"),
    cifar10(7, "resnet18-cifar", "adl", Paper(4.82, "Table I(a), ResNet-18, K=2, ADL"), K=2, M=2),
    cifar10(7, "resnet18-cifar", "bp", Paper(4.87, "Table I(a), ResNet-18, BP", remark=BP_BATCH), M=2),
    cifar10(7, "resnet110", "adl", Paper(5.70, "Table I(a), ResNet-110, K=2, ADL"), K=2, M=2),
    cifar10(7, "resnet110", "bp", Paper(5.79, "Table I(a), ResNet-110, BP", remark=BP_BATCH), M=2),
    # ---- ResNet-98 and ResNet-164
    cifar10(8, "resnet98", "adl", Paper(5.90, "Table I(a), ResNet-98, K=4, ADL"), K=4, M=3),
    cifar10(8, "resnet98", "bp", Paper(6.01, "Table I(a), ResNet-98, BP", remark=BP_BATCH), M=3),
    cifar10(8, "resnet164", "adl", Paper(5.45, "Table I(a), ResNet-164, K=4, ADL"), K=4, M=2),
    cifar10(8, "resnet164", "adl", Paper(5.52, "Table I(a), ResNet-164, K=10, ADL"), K=10, M=2),
    cifar10(8, "resnet164", "bp", Paper(5.36, "Table I(a), ResNet-164, BP", remark=BP_BATCH), M=2),
    # ---- The other columns, at the batch and rate at which their values were taken
    column("resnet56", "bp", 6.19, "ResNet-56, BP"),
    column("resnet18-cifar", "bp", 4.87, "ResNet-18, BP"),
    column("resnet110", "bp", 5.79, "ResNet-110, BP"),
    column("resnet56", "ddg", 6.63, "ResNet-56, K=2, DDG", K=2),
    column("resnet56", "dgl", 6.77, "ResNet-56, K=2, DGL", K=2),
    column("resnet56", "fr", 6.07, "ResNet-56, K=2, FR", K=2),
    column("resnet56", "ddg", 6.50, "ResNet-56, K=3, DDG", K=3),
    column("resnet56", "dgl", 8.88, "ResNet-56, K=3, DGL", K=3),
    column("resnet56", "fr", 6.33, "ResNet-56, K=3, FR", K=3),
    column("resnet56", "ddg", 6.61, "ResNet-56, K=4, DDG", K=4),
    column("resnet56", "dgl", 9.65, "ResNet-56, K=4, DGL", K=4),
    column("resnet56", "fr", 6.48, "ResNet-56, K=4, FR", K=4),
    column("resnet18-cifar", "ddg", 5.00, "ResNet-18, K=2, DDG", K=2),
    column("resnet18-cifar", "dgl", 5.21, "ResNet-18, K=2, DGL", K=2),
    column("resnet18-cifar", "fr", 4.80, "ResNet-18, K=2, FR", K=2),
    column("resnet110", "ddg", 6.26, "ResNet-110, K=2, DDG", K=2),
    column("resnet110", "dgl", 6.26, "ResNet-110, K=2, DGL", K=2),
    column("resnet110", "fr", 5.76, "ResNet-110, K=2, FR", K=2),
    column("resnet98", "dsp", 6.59, "ResNet-98, K=4, DSP", remark=DSP_BATCH, K=4),
    column("resnet164", "dsp", 5.58, "ResNet-164, K=4, DSP", remark=DSP_BATCH, K=4),
)
CIFAR10_TABLE = Table(name="cifar10-table", title="CIFAR-10, Table I(a)", rows=ROWS)
