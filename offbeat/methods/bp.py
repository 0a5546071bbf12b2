"""BP: back-propagation, and back-propagation with gradient accumulation.

Rumelhart, Hinton, Williams, "Learning representations by back-propagating errors", Nature 323 (1986). Accumulation is
eq. (11)-(12) of the ADL paper: theta^(s+1) = theta^s - gamma_s (1/M) sum_j g^(Ms+j).

    K=2, M=1        tick  0   1     2   3   4     5
    stage 1             | F0  -     B0U F1  -     B1U
    stage 2             | -   F0B0U -   -   F1B1U -

Locks: forward, backward and update; all stages but one are idle. Staleness 0. Held: one graph, one version.
Time per batch: K(F + B).

With `pipelined` and M > 1, the batches of a window fill and drain the pipeline, in the order of Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021; PipeDream-Flush), over whole batches. The weights are the
same between two updates, so results are equal to those above bit for bit:

    K=2, M=2
    stage 1             | F0 F1 .  .  B0 B0 .  B1 B1 U
    stage 2             | .  F0 B0 B0 F1 B1 B1 U

Lock: update. Staleness 0. Held: K-k+1 graphs, at most M (inputs, with `recompute`), one version. Time per batch:
(M+K-1)/M (F + B). A checkpoint within a window first runs the backwards of its batches in flight.

On one GPU (engine streams) with M > 1, the batches of a window run at the same time (graphs/windows.py). Results
are the same bit for bit, stages wait only at the ends of a window, and a stage holds up to M graphs.
"""

from __future__ import annotations

from offbeat.errors import UserError
from offbeat.method import Method, Recompute, Weights
from offbeat.methods import lags
from offbeat.ops import WindowRule


def BP(  # noqa: N802
    M: int = 1,
    *,
    window: WindowRule = "count",
    weights: Weights = "stash",
    pipelined: bool = False,
    recompute: Recompute = False,
) -> Method:
    """Back-propagation; with M > 1 the mean of M gradients makes one update.

    Without a lag the weights cannot change between a forward and its backward, so `weights` makes no difference.
    `recompute` needs `pipelined`: otherwise a stage holds a single graph, and uses it at once.

    >>> [" ".join(map(str, iteration)) for iteration in BP(M=2).program(1, 1, range(3))]
    ['F0 B0', 'F1 B1 U', 'F2 B2', 'U']
    >>> [" ".join(map(str, iteration)) for iteration in BP(M=2, pipelined=True).program(1, 2, range(3))]
    ['F0', 'F1 B0 B1 U', 'F2', 'B2 U']
    """
    if recompute and not pipelined:
        raise UserError("method bp: recompute needs pipelined: set that, or leave out recompute")
    return Method(
        name="bp",
        title="back-propagation",
        reference="Rumelhart et al. 1986",
        locks=("update",) if pipelined else ("forward", "backward", "update"),
        lag=lags.none,
        M=M,
        window=window,
        weights=weights,
        pipelined=pipelined,
        recompute=recompute,
    )
