"""SpecTrain: 1F1B with predicted weights.

Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (2018).
Each stage uses the weights predicted for the time at which the batch has passed all stages, from SGD's momentum v:

    What = W - s gamma v,   s = floor(r/2) + K - r - 1 in the forward, floor(r/2) in the backward,   r = k-1

    K=2
    stage 1             | F0 F1 B0 U F2 B1 U F3
    stage 2             | .  F0 B0 U F1 B1 U

Version 1 predicts the weights again for the backward, which uses stored activations; version 2 uses the prediction of
the forward. Locks: none. Staleness K-k; 0 if the prediction were exact. Held by stage k: K-k+1 graphs, one version
(version 2: K-k+1). Time per batch: F + B and two latencies. Needs SGD with momentum.
"""

from __future__ import annotations

from typing import Literal

from offbeat.correctors import CorrectorLike, Speculation, correctors
from offbeat.errors import UserError, unknown
from offbeat.method import Method, Recompute
from offbeat.methods import lags


def SpecTrain(  # noqa: N802
    version: Literal[1, 2] = 1, *, recompute: Recompute = False, corrector: CorrectorLike = None
) -> Method:
    """1F1B with predicted weights; `recompute` needs version 2, whose backwards use the weights of their forwards.

    >>> SpecTrain(version=2).weights, SpecTrain().correctors
    ('stash', (Speculation(),))
    """
    if version not in (1, 2):
        raise unknown("version of spectrain", str(version), ("1", "2"))
    if version == 1 and recompute:
        raise UserError(
            "spectrain of version=1 does not keep the weights of its forwards: use version=2, or leave out recompute"
        )
    return Method(
        name="spectrain",
        title="1F1B on predicted weights",
        reference="Chen et al. 2018",
        lag=lags.one_way,
        weights="hybrid" if version == 1 else "stash",
        recompute=recompute,
        correctors=correctors((Speculation(), *correctors(corrector))),
    )
