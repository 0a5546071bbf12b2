"""ADL: Accumulated Decoupled Learning.

Zhuang, Lin, Toh, "Accumulated Decoupled Learning: Mitigating Gradient Staleness in Inter-Layer Model Parallelization"
(ICML 2021; arXiv version). In local iteration t, stage k runs the forward of batch t with its newest weights and the
backward of batch t-2(K-k) with the weights of that batch's forward. The mean of M gradients makes one update:

    g_k(t)         = dz_k(u)/dtheta_k^(v(u)) . g_z(u),   u = t - 2(K-k), v(u) the version in the forward of u
    theta_k^(s+1)  = theta_k^s - gamma_s (1/M) sum_{j<M} g_k(Ms+j)
    d_{k,j}        = ceil((2(K-k) - j)/M)                staleness of the j-th gradient of a window, mean 2(K-k)/M

    K=2, M=2        tick  0   1     2     3      4     5      6
    stage 1             | F0  F1    F2B0  F3B1U  F4B2  F5B3U  ...
    stage 2             | -   F0B0  F1B1U F2B2   F3B3U F4B4   ...

Locks: none. Held by stage k: 2(K-k)+1 graphs (inputs, with `recompute`), ceil(2(K-k)/M)+1 versions. Time per batch:
that of the slowest stage; a stage that recomputes takes F longer. A message has a whole tick to arrive, so a latency
below the time of a stage costs nothing.

A parameter that several stages use (tied weights) has the versions and the staleness of the first of them, in all of
its uses: that stage sends the version of its forward along with the batch, and its gradient is the sum over all uses.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags
from offbeat.ops import WindowRule


def ADL(  # noqa: N802
    M: int = 4,
    *,
    window: WindowRule = "count",
    weights: Weights = "stash",
    recompute: Recompute = False,
    corrector: CorrectorLike = None,
) -> Method:
    """Accumulated Decoupled Learning with M gradients per update.

    >>> [" ".join(map(str, iteration)) for iteration in ADL(M=2).program(1, 2, range(4))]
    ['F0', 'F1', 'F2 B0', 'F3 B1 U', 'B2', 'B3 U']
    """
    return Method(
        name="adl",
        title="accumulated decoupled learning",
        reference="Zhuang, Lin, Toh 2021",
        lag=lags.round_trip,
        M=M,
        window=window,
        weights=weights,
        recompute=recompute,
        correctors=correctors(corrector),
    )
