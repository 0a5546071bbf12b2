"""NAG-async: Nesterov's method for asynchronous pipelines.

Ajanthan, Ramasinghe, Zuo, Avraham, Long, "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (ICML 2025):
d_t = gamma (w_t - w_(t-1)), w_(t+1) = w_t + d_t - eta (1-gamma) g, with g the delayed gradient at the look-ahead point
and gamma close to 1, so that the look-ahead covers the delay. Parameters are stored at that point, which for SGD gives

    v <- gamma v + g;  theta <- theta - lr (1-gamma)/(1-m) (g + gamma v)

    K=2
    stage 1             | F0 F1 B0 U F2 B1 U F3
    stage 2             | .  F0 B0 U F1 B1 U

where m is the momentum given to the optimizer; its effective learning rate lr/(1-m) stays the same. The paper trains
language models with NAdam, which here is `pipedream` with torch.optim.NAdam. Locks: none. Staleness K-k. Held by stage
k: K-k+1 graphs and versions. Time per batch: F + B and two latencies.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, NesterovMomentum, correctors
from offbeat.method import Method, Recompute
from offbeat.methods import lags


def NAGAsync(  # noqa: N802
    gamma: float = 0.99, *, recompute: Recompute = False, corrector: CorrectorLike = None
) -> Method:
    """1F1B with stashed weights and a Nesterov look-ahead with momentum gamma.

    >>> NAGAsync(gamma=0.95).correctors
    (NesterovMomentum(gamma=0.95),)
    """
    return Method(
        name="nag-async",
        title="1F1B with Nesterov look-ahead",
        reference="Ajanthan et al. 2025",
        lag=lags.one_way,
        recompute=recompute,
        correctors=correctors((NesterovMomentum(gamma), *correctors(corrector))),
    )
