"""ADL on the 1F1B lag: accumulated decoupled learning with the shortest delay that a pipeline allows.

The accumulation of Zhuang, Lin, Toh, "Accumulated Decoupled Learning" (2021), on the schedule of PipeDream (Narayanan
et al., SOSP 2019). Activations are sent right after the forward, so a gradient arrives after K-k batches instead of
2(K-k). The staleness is half that of ADL at the same ideal throughput:

    d_{k,j} = ceil(((K-k) - j)/M),   mean (K-k)/M

    K=2, M=2
    stage 1             | F0 F1 B0 F2 B1 U F3 B2 F4 B3 U
    stage 2             | .  F0 B0 F1 B1 U F2 B2 F3 B3 U

Locks: none. Staleness (K-k)/M. Held by stage k: K-k+1 graphs, ceil((K-k)/M)+1 versions. Time per batch: that of the
slowest stage plus two latencies, which the longer lag of ADL hides.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags
from offbeat.ops import WindowRule


def ADL1F1B(  # noqa: N802
    M: int = 4,
    *,
    window: WindowRule = "count",
    weights: Weights = "stash",
    recompute: Recompute = False,
    corrector: CorrectorLike = None,
) -> Method:
    """ADL with lag K-k and M gradients per update.

    >>> method = ADL1F1B(M=2)
    >>> [method.lag(k, 4) for k in (1, 2, 3, 4)], [method.staleness(k, 4) for k in (1, 2, 3, 4)]
    ([3, 2, 1, 0], [1.5, 1.0, 0.5, 0.0])
    """
    return Method(
        name="adl-1f1b",
        title="ADL on the 1F1B lag",
        reference="this project",
        lag=lags.one_way,
        M=M,
        window=window,
        weights=weights,
        recompute=recompute,
        correctors=correctors(corrector),
    )
