"""Where a model is cut, as users give it: checked before anything starts, and applied once there is a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from offbeat import partitioning as cutting
from offbeat.errors import UserError

MOST_STAGES = 10_000


@dataclass(frozen=True)
class ModelCut:
    """A model with how it is cut into K stages.

    cuts    that were given, or those of a checkpoint; None: chosen with the sample
    """

    model: nn.Module
    K: int
    cuts: Sequence[int | str] | None
    units: cutting.Units
    by: cutting.By
    trace: cutting.Trace
    tied: cutting.Tied

    @classmethod
    def of(
        cls,
        model: nn.Module,
        K: int,
        *,
        cuts: Sequence[int | str] | None,
        units: cutting.Units | None,
        by: cutting.By,
        trace: cutting.Trace,
        tied: cutting.Tied,
    ) -> ModelCut:
        cutting.check_cutting(cuts=cuts, units=units, by=by, trace=trace, tied=tied)
        cutting.check_stages(model, K)
        _check_values(model)
        if K > MOST_STAGES:  # a model that is cut by its first batch
            raise UserError(f"K={K} stages: use at most {MOST_STAGES}")
        blocks = by == "flops" and cutting.default_units(model, K, cuts) == "blocks"
        chosen: cutting.Units = units or ("blocks" if blocks else "layers")
        if cuts is not None and chosen == "blocks":
            # refuses wrong ones before anything starts
            cuts = cutting.cut(model, K, cuts=cutting.block_cuts(model, cuts))
        return cls(model, K, cuts, chosen, by, trace, tied)

    @property
    def needs_batch(self) -> bool:
        """Whether the model cannot be cut without a sample."""
        return cutting.needs_batch(self.model, self.K, cuts=self.cuts, units=self.units, trace=self.trace)

    def partition(
        self, sample: Any, *, cuts: Sequence[int | str] | None, trace: cutting.Trace | None = None
    ) -> cutting.Partition:
        """The stages by these cuts, or where the sample balances."""
        return cutting.partition(
            self.model,
            self.K,
            sample,
            cuts=cuts,
            units=self.units,
            by=self.by,
            trace=trace or self.trace,
            tied=self.tied,
        )


def _check_values(model: nn.Module) -> None:
    """Refuse a model with a parameter or buffer that has no values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"{name} is on the meta device, without values: call model.to_empty(device='cpu') and initialize it "
                "or load its weights first"
            )
