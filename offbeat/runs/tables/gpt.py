"""A GPT with late gradients: validation loss by optimizer, method, stages and micro-batches.

12 blocks of width 256 with 4 heads, 128 bytes of context, 64 sequences per update, 300 updates per epoch; a linear
warm-up over the first twentieth, then a cosine to 10 %; bf16 on a GPU. Every row has the same samples per update: a
method with M > 1 splits them into M batches, and the learning rate does not depend on M.

The gradient of each stage is clipped to norm 1, so clipping depends on the cuts. BP is therefore run with the same K,
in the same stages, as the rows that are compared with it: with the same optimizer, what differs is staleness alone.

The same table for a CPU has width 64, 32 bytes of context, 16 sequences per update, 400 updates and three times the
learning rates: two minutes per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from offbeat.runs.optimizers import OPTIMIZERS
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.tables.row import STALENESS_WARMUP, Table, TableRow, method_title

GPT_OPTIMIZERS = ("adamw", "nadam", "muon", "rotated-adam")
RATES = {1.0: "", 0.5: "-half-rate", 2.0: "-double-rate"}  # with the ends of the names of rows
RECOMMENDED = "auto"
CORRECTORS = {"nadam": "lookahead:least=1+t1:power=1:above=3+sc"}  # those of AdamW: "auto" gives NAdam none


@dataclass(frozen=True, kw_only=True)
class GPTSetting:
    """What all rows have in common; stages: the values of K, the most important first."""

    model: str = "gpt:layers=12,width=256,heads=4,context=128"
    batch: int = 64  # sequences per update
    updates: int = 300  # per epoch
    epochs: int = 10
    stages: tuple[int, ...] = (12, 4, 24)
    rate: float = 1.0  # learning rates of all rows, as a multiple of the default of each optimizer
    best_rates: Mapping[str, float] = field(default_factory=dict)  # of BP by optimizer, if not 1, as a multiple of that

    def recipe(self, optimizer: str, method: str, *, rate: float = 1.0, **given: Any) -> Recipe:
        """The recipe of a row; what is given and is not None replaces its settings."""
        fixed = {
            "model": self.model,
            "data": "text",
            "samples": self.batch * self.updates,
            "epochs": self.epochs,
            "batch_per_update": self.batch,
            "optimizer": optimizer,
            "lr": rate * self.rate * OPTIMIZERS[optimizer].lr(self.batch, 1),
            "clip_norm": 1.0,
            "precision": "bf16" if given.get("device") == "cuda" else "fp32",
        }
        return make_recipe(
            method=method, **{**fixed, **{name: value for name, value in given.items() if value is not None}}
        )


def two_versions(K: int) -> int:
    """The smallest power of two that 2BW can have as M: with two versions, it needs at least K-1.

    >>> [two_versions(K) for K in (2, 4, 12, 24)]
    [1, 4, 16, 32]
    """
    return 1 << (K - 2).bit_length()


def late_methods(K: int, batch: int) -> list[tuple[str, int, int]]:
    """The methods with late gradients, their M, and the tier at the most important K; those that can split a batch."""
    late = [("adl-1f1b", 16, 1), ("adl-1f1b", 4, 1), ("adl-1f1b", 1, 1), ("2bw", two_versions(K), 2), ("adl", 4, 2)]
    return [(method, M, tier) for method, M, tier in late if batch >= M]


def rows(setting: GPTSetting) -> Iterator[TableRow]:
    """All rows, by K and optimizer: BP, then each late method without a corrector and with the recommended one, or for
    an optimizer that is recommended without, with the correctors of the others. Late rows have the learning rate that
    is best for BP, and the usual one. Each with the recommended corrector is there with a synchronous start, too."""
    for place, K in enumerate(setting.stages):
        for optimizer in GPT_OPTIMIZERS:
            best = setting.best_rates.get(optimizer, 1.0)
            rates = dict.fromkeys((best, 1.0))
            for rate in RATES if place == 0 else rates:
                tier = _tier(place, 1, usual=place > 0 and rate != best)
                yield _row(setting, optimizer, "bp", K=K, M=1, rate=rate, tier=tier, end=RATES[rate])
            for rate in rates:
                made = partial(_row, setting, optimizer, K=K, rate=rate, baseline=f"{optimizer}-bp-k{K}{RATES[rate]}")
                tiers = partial(_tier, place, usual=rate != best)
                correctors = (None, CORRECTORS.get(optimizer, RECOMMENDED))
                for (method, M, tier), corrector in product(late_methods(K, setting.batch), correctors):
                    end = f"-m{M}{'-corrected' if corrector else ''}{RATES[rate]}"
                    yield made(method, M=M, tier=tiers(tier), end=end, corrector=corrector)
                for method, M, tier in late_methods(K, setting.batch):
                    end = f"-m{M}-corrected-warmup{RATES[rate]}"
                    tier = tiers(max(2, tier))
                    yield made(method, M=M, tier=tier, end=end, corrector=RECOMMENDED, warmup=STALENESS_WARMUP)


def _tier(place: int, tier: int, *, usual: bool) -> int:
    """Of a row at the K of that place; `usual`: at the usual learning rate, where another one is better for BP."""
    if place == 0:
        return 2 if usual else tier
    return 5 if usual else place + 2


def _row(
    setting: GPTSetting,
    optimizer: str,
    method: str,
    *,
    K: int,
    M: int,
    rate: float,
    tier: int,
    end: str,
    corrector: str | None = None,
    warmup: int | None = None,
    baseline: str | None = None,
) -> TableRow:
    parts = [OPTIMIZERS[optimizer].title, method_title(method, M), f"K={K}", f"M={M}"]
    parts += [f"{rate:g} times the learning rate"] if rate != 1.0 else []
    parts += ["with the recommended corrector"] if corrector == RECOMMENDED else []
    parts += ["with the correctors of AdamW"] if corrector and corrector != RECOMMENDED else []
    parts += [f"the first {warmup} updates synchronous"] if warmup else []
    return TableRow(
        name=f"{optimizer}-{method}-k{K}{end}",
        title=", ".join(parts),
        make=partial(
            setting.recipe, optimizer, method, K=K, M=M, rate=rate, corrector=corrector, staleness_warmup=warmup
        ),
        tier=tier,
        baseline=baseline,
        checkpoint_mode="in-flight",
    )


def gpt_table(setting: GPTSetting, *, name: str = "gpt-staleness", title: str = "GPT with late gradients") -> Table:
    return Table(name=name, title=title, rows=tuple(rows(setting)))


GPT_STALENESS = gpt_table(GPTSetting(best_rates={"adamw": 2.0, "nadam": 2.0, "muon": 2.0, "rotated-adam": 2.0}))
SMALL_GPT_STALENESS = gpt_table(
    GPTSetting(
        model="gpt:layers=12,width=64,heads=4,context=32",
        batch=16,
        updates=100,
        epochs=4,
        rate=3.0,
        best_rates={"adamw": 2.0, "muon": 2.0, "rotated-adam": 2.0},
    ),
    name="small-gpt-staleness",
    title="A small GPT with late gradients, for a CPU",
)
