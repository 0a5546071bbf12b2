"""The weight prediction of SpecTrain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext, Tensors
from offbeat.correctors.optimizer import extrapolate

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.correctors.optimizer_rules import Need


@dataclass(frozen=True)
class Speculation(Corrector):
    """The prediction of SpecTrain: all stages use the weights predicted for the same later update.

    Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (2018).
    theta - s lr v, with v the direction of the optimizer, s = floor(r/2) + K - r - 1 in the forward and floor(r/2) in
    the backward, r = k - 1. With weights="stash" the backward uses the weights of its forward. These s hold for 1F1B
    with one update per batch.

    >>> import offbeat
    >>> offbeat.SpecTrain().correctors == (offbeat.Speculation(),)
    True
    """

    name: ClassVar[str] = "spec"
    changes: ClassVar[tuple[str, ...]] = ("forward weights", "backward weights")
    needs: ClassVar[tuple[Need, ...]] = ("direction",)
    supported_weights: ClassVar[tuple[str, ...]] = ("hybrid", "stash")

    def unsupported(self, lag: Callable[[int, int], int], M: int) -> str | None:
        if M == 1 and all(lag(k, K) == K - k for K in range(1, 5) for k in range(1, K + 1)):
            return None
        return "it predicts for lag K-k and one update per batch: use lwp, which predicts over any delay"

    def forward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        r = context.k - 1
        return extrapolate(parameters, context, r // 2 + context.K - r - 1)

    def backward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        return extrapolate(parameters, context, (context.k - 1) // 2)
