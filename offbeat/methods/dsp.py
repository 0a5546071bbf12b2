"""DSP: layer-wise staleness by diversely stale parameters.

Xu, Huo, Huang, "On the Acceleration of Deep Learning Model Parallelism with Staleness" (CVPR 2020), with its default
queues, in which stage k is 2(K-k) batches behind: the schedule of ADL with M=1, one set of parameters, inputs stored
and the forward repeated on the current weights at the backward.

Locks: none. Held by stage k: 2(K-k)+1 inputs, one version. Time a batch: 2F + B (F + B where the repeat is hidden).
"""

from __future__ import annotations

from offbeat.method import Method
from offbeat.methods import lags


def DSP() -> Method:  # noqa: N802
    """The tick schedule with replayed forwards."""
    return Method(name="dsp", lag=lags.round_trip, weights="replay")
