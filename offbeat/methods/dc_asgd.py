"""DC-ASGD: asynchronous data parallelism with delay compensation.

Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017),
eq. (10); w_m are the weights that the worker pulled:

    w <- w - gamma (g + lambda g*g*(w - w_m))

    N=2, one stage  | F0 F1 B0 U F2 B1 U F3 B2 U

adaptive: lambda / sqrt(MS + eps) with a running mean square MS of g (there lambda is about 2). As a corrector inside a
pipeline: `--corrector dc`. Locks: none. Staleness N-1, corrected. Held: N graphs and versions (the server's backups).
Time a batch: (F + B)/N of the whole model.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.correctors import DelayCompensation, correctors
from offbeat.method import Method
from offbeat.methods.asgd import ASGD


def DCASGD(N: int = 4, *, lambda_: float = 0.04, adaptive: bool = False) -> Method:  # noqa: N802
    """ASGD with compensated gradients."""
    return replace(
        ASGD(N),
        name="dc-asgd",
        title="ASGD with delay compensation",
        reference="Zheng et al. 2017",
        correctors=correctors(DelayCompensation(lambda_, adaptive)),
    )
