"""PipeDream: one forward, one backward, with weight stashing.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training" (2018); Narayanan et al. (SOSP 2019).
After K-k warm-up forwards, stage k alternates one forward and one backward, and updates after each backward. The
backward of a batch uses the weights of its forward:

    W_k^(t+1) = W_k^t - gamma g_k(t-(K-k))

    K=2
    stage 1             | F0 F1 B0 U F2 B1 U F3
    stage 2             | .  F0 B0 U F1 B1 U

Results are those of DDG without its barrier. Locks: none. Staleness K-k. Held by stage k: K-k+1 graphs and versions.
Time per batch: F + B and two latencies. The released code drains the pipeline at the end of every epoch; here epochs do
not drain.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags


def PipeDream(  # noqa: N802
    *, weights: Weights = "stash", recompute: Recompute = False, corrector: CorrectorLike = None
) -> Method:
    """1F1B with stashed weights and one update per batch.

    >>> [" ".join(map(str, iteration)) for iteration in PipeDream().program(1, 2, range(3))]
    ['F0', 'F1 B0 U', 'F2 B1 U', 'B2 U']
    """
    return Method(
        name="pipedream",
        title="1F1B with weight stashing",
        reference="Narayanan et al. 2019",
        lag=lags.one_way,
        weights=weights,
        recompute=recompute,
        correctors=correctors(corrector),
    )
