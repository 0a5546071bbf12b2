"""ASGD: asynchronous data parallelism, with gradients from N workers in turn.

Dean et al., "Large Scale Distributed Deep Networks" (2012); as analysed by Zheng et al. (ICML 2017). A worker pulls the
weights, computes a gradient on its batch and pushes it; the server applies it immediately. In round-robin order every
gradient is N-1 updates late:

    w_(t+1) = w_t - gamma g(w_(t-N+1); x_t)

    N=2, one stage  | F0 F1 B0 U F2 B1 U F3 B2 U

This is the program of one stage (K = 1) with lag N-1: the weights, the staleness and the memory are those of N workers,
but one process does all the work. Locks: none. Staleness N-1. Held: N graphs and versions. Time per batch with N
workers: (F + B)/N of the whole model.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method, Recompute


def alone(K: int) -> str | None:
    """Data parallelism does not cut the model."""
    return None if K == 1 else "its workers hold the whole model: use K=1, and N for the number of workers"


def ASGD(N: int = 4, *, recompute: Recompute = False, corrector: CorrectorLike = None) -> Method:  # noqa: N802
    """Asynchronous data parallelism with N workers in turn.

    >>> method = ASGD(N=3)
    >>> method.workers, method.staleness(1, 1)
    (3, 2.0)
    """

    def lag(k: int, K: int) -> int:
        """N-1"""
        return N - 1

    return Method(
        name="asgd",
        title="asynchronous data parallelism",
        reference="Dean et al. 2012",
        lag=lag,
        limit=alone,
        workers=N,
        recompute=recompute,
        correctors=correctors(corrector),
    )
