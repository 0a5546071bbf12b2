"""GPipe: synchronous pipelining over micro-batches.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (NeurIPS 2019). A batch is
split into m micro-batches. All forwards run first, then all backwards, then one update applies the exact gradient.

    K=2, m=2
    stage 1             | F0 F1 .  .  .  B1 B1 B0 B0 U
    stage 2             | .  F0 F1 B1 B1 B0 B0 U

Lock: update. Staleness 0. Held: graphs of m micro-batches (inputs, with `recompute`), one version. Time per batch:
(m+K-1)/m (F + B), and (m+K-1)/m F more with `recompute`.
"""

from __future__ import annotations

from offbeat.method import Method, Recompute
from offbeat.methods import lags


def GPipe(m: int = 4, *, recompute: Recompute = False) -> Method:  # noqa: N802
    """Fill and drain over the m micro-batches of each batch; one update per batch.

    BatchNorm normalises each micro-batch separately; its running statistics are updated once per batch, with the
    statistics of the whole batch.

    >>> [" ".join(map(str, iteration)) for iteration in GPipe(m=2).program(1, 2, range(2))]
    ['F0 F1 B1 B0 U', 'F2 F3 B3 B2 U']
    """
    return Method(
        name="gpipe",
        title="synchronous pipeline over micro-batches",
        reference="Huang et al. 2019",
        locks=("update",),
        lag=lags.none,
        m=m,
        recompute=recompute,
    )
