"""FDG: fully decoupled learning with delayed gradients and gradient shrinking.

Zhuang, Wang, Liu, Lin, "Fully Decoupled Neural Network Learning Using Delayed Gradients" (TNNLS 2021; arXiv 2019). The
schedule of ADL with M=1. Every stage but the last multiplies the gradient that it receives by beta before its backward.
The gradient that it sends is scaled too, so that of stage k is scaled by beta^(K-k). Weight decay is not scaled.

    theta_k^(t+1) = theta_k^t - gamma beta^(K-k) g_k(t - 2(K-k)),   with the weights of that batch's forward

    K=2             tick  0   1      2      3
    stage 1             | F0  F1     F2B0U  F3B1U
    stage 2             | -   F0B0U  F1B1U  F2B2U

Locks: none. Staleness 2(K-k); one less in the released code, which updates before the forward. Held by stage k:
2(K-k)+1 graphs and versions. Time per batch: F + B. With beta=1 it is ADL with M=1.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, Shrink, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags


def FDG(  # noqa: N802
    beta: float = 1.0,
    *,
    weights: Weights = "stash",
    recompute: Recompute = False,
    corrector: CorrectorLike = None,
) -> Method:
    """Delayed gradients, scaled by beta per stage (0.2 to 0.8 in the paper).

    >>> method = FDG(beta=0.5)
    >>> method.correctors, [method.lag(k, 3) for k in (1, 2, 3)]
    ((Shrink(beta=0.5),), [4, 2, 0])
    """
    return Method(
        name="fdg",
        title="fully decoupled, delayed gradients",
        reference="Zhuang et al. 2021 (TNNLS)",
        lag=lags.round_trip,
        weights=weights,
        recompute=recompute,
        correctors=correctors((Shrink(beta), *correctors(corrector))),
    )
