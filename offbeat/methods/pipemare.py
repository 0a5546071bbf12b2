"""PipeMare: asynchronous pipeline without weight stashing, with rescheduled learning rates and corrected weights.

Yang, Zhang, Li, Re, Aberger, De Sa, "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021). The weights
of a forward at stage k are tau = 2(K-k)/M updates old when its gradient arrives. The backward uses stored activations
and corrected weights (T2); learning rates can be rescheduled (T1):

    T1   lr_k(s) = lr(s) / max(tau, 1)^p,   p = 1 - min(l/S1, 1)               (only with `anneal`, S1 updates)
    T2   theta - tau delta,   delta <- g delta + (1-g)(theta^(s+1) - theta^s),  g = C^(1/tau)

l counts updates with late gradients: a synchronous start (T3, `staleness_warmup`) does not count.

    K=2, M=1        tick  0   1      2      3
    stage 1             | F0  F1     F2B0U  F3B1U
    stage 2             | -   F0B0U  F1B1U  F2B2U

Locks: none. Staleness 2(K-k)/M; the paper also counts the tick of the stage itself, one batch more. Held by stage k:
2(K-k)+1 graphs, one version and delta. Time per batch: F + B.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, Discrepancy, Rescheduling, correctors
from offbeat.method import Method
from offbeat.methods import lags


def PipeMare(  # noqa: N802
    M: int = 1, *, anneal: int | None = None, C: float = 0.135, corrector: CorrectorLike = None
) -> Method:
    """The schedule of ADL with current weights and T2, and with T1 over the first `anneal` late updates.

    >>> method = PipeMare(M=2, anneal=1000)
    >>> method.weights, [corrector.name for corrector in method.correctors]
    ('hybrid', ['t2', 't1'])
    """
    first = () if anneal is None else (Rescheduling(anneal),)
    return Method(
        name="pipemare",
        title="asynchronous without stash, corrected",
        reference="Yang et al. 2021",
        lag=lags.round_trip,
        M=M,
        weights="hybrid",
        correctors=correctors((*first, Discrepancy(C), *correctors(corrector))),
    )
