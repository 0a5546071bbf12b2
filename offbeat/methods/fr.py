"""FR: features replay.

Huo, Gu, Huang, "Training Neural Networks Using Features Replay" (NeurIPS 2018). It has the delays of DDG, but a
stage stores only its inputs. For the backward of batch t-(K-k) it repeats the forward with its current weights and uses
the gradient that stage k+1 produced one iteration earlier. So the local Jacobian is current; the input and the incoming
gradient are K-k iterations old. The last stage runs an ordinary forward and backward.

    K=2             iteration 0        iteration 1
    stage 1             | F0  .  .       F1  .  F0B0U      (F0 repeated, current weights)
    stage 2             | .   F0 B0U     .   F1 B1U

Lock: forward. Staleness of the input K-k, of the Jacobian 0. Held by stage k: K-k+1 inputs, one version. Time per
batch: KF + F + B with the barrier, 2F + B without.
"""

from __future__ import annotations

from offbeat.correctors import CorrectorLike, correctors
from offbeat.method import Method
from offbeat.methods import lags


def FR(*, barrier: bool = True, corrector: CorrectorLike = None) -> Method:  # noqa: N802
    """Features replay, by default with a forward lock.

    >>> [" ".join(map(str, iteration)) for iteration in FR().program(1, 2, range(2))]
    ['F0 |', 'F1 | B0 U', 'B1 U']
    """
    return Method(
        name="fr",
        title="features replay",
        reference="Huo et al. 2018 (NeurIPS)",
        locks=("forward",) if barrier else (),
        lag=lags.one_way,
        weights="replay",
        barrier=barrier,
        correctors=correctors(corrector),
    )
