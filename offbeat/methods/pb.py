"""PB: pipelined back-propagation with spike compensation and linear weight prediction.

Kosson, Chiley, Venigalla, Hestness, Koester, "Pipelined Backpropagation at Scale" (MLSys 2021). The schedule of ADL
with one update per batch, and backwards with stored activations and current weights. With D = 2(K-k):

    LWP   forward with theta - lr D v
    SC    v <- m v + g;  theta <- theta - lr (a v + b g),   a = m^D, b = (1 - m^D)/(1 - m)

    K=2             tick  0   1      2      3
    stage 1             | F0  F1     F2B0U  F3B1U
    stage 2             | -   F0B0U  F1B1U  F2B2U

Locks: none. Staleness 2(K-k). Held by stage k: 2(K-k)+1 graphs, one version. Time per batch: F + B. Needs SGD
with momentum; the paper used small batches and GroupNorm.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags


def PB(  # noqa: N802
    *, weights: Weights = "hybrid", recompute: Recompute = False, corrector: CorrectorLike = "lwp+sc"
) -> Method:
    """Pipelined back-propagation; by default with both correctors, `corrector=()` for none.

    >>> PB().weights, [corrector.name for corrector in PB().correctors], PB(corrector=()).correctors
    ('hybrid', ['lwp', 'sc'], ())
    """
    return Method(
        name="pb",
        title="pipelined back-propagation",
        reference="Kosson et al. 2021",
        lag=lags.round_trip,
        weights=weights,
        recompute=recompute,
        correctors=correctors(corrector),
    )
