"""DSP: layer-wise staleness by diversely stale parameters.

Xu, Huo, Huang, "On the Acceleration of Deep Learning Model Parallelism with Staleness" (CVPR 2020), with its default
queues, in which stage k has a lag of 2(K-k) batches. This is the schedule of ADL with M=1, but with one version of the
weights: a stage stores its inputs, and a backward repeats the forward with the current weights.

    K=2             tick  0   1      2         3
    stage 1             | F0  F1     F2F0B0U   F3F1B1U     (F0 repeated, current weights)
    stage 2             | -   F0B0U  F1B1U     F2B2U

Locks: none. Staleness of the input 2(K-k), of the Jacobian 0. Held by stage k: 2(K-k)+1 inputs, one version. Time
per batch: 2F + B (F + B if the repeated forward overlaps with other work).
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method
from offbeat.methods import lags


def DSP(*, corrector: CorrectorLike = None) -> Method:  # noqa: N802
    """The schedule of ADL with M=1 and repeated forwards.

    >>> method = DSP()
    >>> method.weights, [method.lag(k, 3) for k in (1, 2, 3)]
    ('replay', [4, 2, 0])
    """
    return Method(
        name="dsp",
        title="diversely stale parameters",
        reference="Xu, Huo, Huang 2020",
        lag=lags.round_trip,
        weights="replay",
        correctors=correctors(corrector),
    )
