"""DSP: layer-wise staleness by diversely stale parameters.

Xu, Huo, Huang, "On the Acceleration of Deep Learning Model Parallelism with Staleness" (CVPR 2020), with its default
queues, in which stage k is 2(K-k) batches behind: the schedule of ADL with M=1, one set of parameters, inputs stored
and the forward repeated on the current weights at the backward.

    K=2             tick  0   1      2         3
    stage 1             | F0  F1     F2F0B0U   F3F1B1U     (F0 again, on the weights of then)
    stage 2             | -   F0B0U  F1B1U     F2B2U

Locks: none. Staleness of the input 2(K-k), of the Jacobian 0. Held by stage k: 2(K-k)+1 inputs, one version. Time a
batch: 2F + B (F + B where the repeat is hidden).
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method
from offbeat.methods import lags


def DSP(*, corrector: CorrectorLike = None) -> Method:  # noqa: N802
    """The tick schedule with replayed forwards."""
    return Method(
        name="dsp",
        title="diversely stale parameters",
        reference="Xu, Huo, Huang 2020",
        lag=lags.round_trip,
        weights="replay",
        correctors=correctors(corrector),
    )
