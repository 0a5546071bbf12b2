"""PipeDream-2BW: double-buffered weights, a staleness of exactly one update in every stage.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), eq. (1). On the 1F1B schedule with M
gradients per update, M >= K-1, all stages use for the batches of window s the version of the previous window:

    W^(s+1) = W^s - gamma grad f(W^(s-1))

    K=2, M=2 (F2' is a forward with the version before the newest)
    stage 1             | F0 F1 B0 F2 B1 U F3' B2 F4 B3 U
    stage 2             | .  F0 B0 F1 B1 U F2' B2 F3' B3 U

Locks: none. Staleness 1 in every stage, so that the whole gradient belongs to one version. Held by stage k: K-k+1
graphs, two versions. Time per batch: F + B and two latencies.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute
from offbeat.methods import lags


def TwoBW(  # noqa: N802
    M: int = 8, *, recompute: Recompute = False, corrector: CorrectorLike = None
) -> Method:
    """1F1B with two weight buffers and M gradients per update.

    >>> method = TwoBW(M=4)
    >>> [method.staleness(k, 4) for k in (1, 2, 3, 4)], method.versions(1, 4)
    ([1.0, 1.0, 1.0, 1.0], 2)
    """

    def limit(K: int) -> str | None:
        return None if M >= K - 1 else f"two versions of the weights need M >= K-1: use M={K - 1} or more, not {M}"

    return Method(
        name="2bw",
        title="1F1B with two weight buffers",
        reference="Narayanan et al. 2021",
        lag=lags.one_way,
        M=M,
        forward="before",
        recompute=recompute,
        limit=limit,
        correctors=correctors(corrector),
    )
