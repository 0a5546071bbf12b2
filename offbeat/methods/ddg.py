"""DDG: decoupled parallel back-propagation with delayed gradients.

Huo, Gu, Yang, Huang, "Decoupled Parallel Backpropagation with Convergence Guarantee" (ICML 2018). In iteration t
batch t passes forward through all stages in order. Then all stages at the same time run a backward and update: stage k
that of batch t-(K-k), with the gradient that stage k+1 produced in iteration t-1:

    theta_k^(t+1) = theta_k^t - gamma g_k(t-(K-k)),   with the weights of that batch's forward

    K=2             iteration 0        iteration 1
    stage 1             | F0  .  .       F1  .  B0U
    stage 2             | .   F0 B0U     .   F1 B1U

Lock: forward, by a barrier before the backwards. Without it (`barrier=False`) the schedule is 1F1B. Staleness K-k. Held
by stage k: K-k+1 graphs and versions. Time per batch: KF + B with the barrier, F + B without.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags


def DDG(  # noqa: N802
    *,
    barrier: bool = True,
    weights: Weights = "stash",
    recompute: Recompute = False,
    corrector: CorrectorLike = None,
) -> Method:
    """Delayed gradients with a forward lock; the released code uses weights="hybrid".

    >>> [" ".join(map(str, iteration)) for iteration in DDG().program(1, 2, range(2))]
    ['F0 |', 'F1 | B0 U', 'B1 U']
    """
    return Method(
        name="ddg",
        title="delayed gradients",
        reference="Huo et al. 2018 (ICML)",
        locks=("forward",) if barrier else (),
        lag=lags.one_way,
        weights=weights,
        recompute=recompute,
        barrier=barrier,
        correctors=correctors(corrector),
    )
