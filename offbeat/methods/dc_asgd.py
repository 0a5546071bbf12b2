"""DC-ASGD: asynchronous data parallelism with delay compensation.

Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017),
eq. (10), with w_m the weights that the worker pulled:

    w <- w - gamma (g + lambda g*g*(w - w_m))

    N=2, one stage  | F0 F1 B0 U F2 B1 U F3 B2 U

With `adaptive` lambda is divided by sqrt(MS + eps), MS a running mean square of g; lambda is then about 2. In a
pipeline the same compensation is `--corrector dc`. Locks: none. Staleness N-1, compensated. Held: N graphs and
versions (the server's backups). Time per batch with N workers: (F + B)/N of the whole model.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.correctors import DelayCompensation, correctors
from offbeat.method import Method, Recompute
from offbeat.methods.asgd import ASGD


def DCASGD(  # noqa: N802
    N: int = 4, *, lambda_: float = 0.04, adaptive: bool = False, recompute: Recompute = False
) -> Method:
    """ASGD with delay-compensated gradients.

    >>> DCASGD(N=2, lambda_=2.0, adaptive=True).correctors
    (DelayCompensation(lambda_=2.0, adaptive=True),)
    """
    return replace(
        ASGD(N, recompute=recompute),
        name="dc-asgd",
        title="ASGD with delay compensation",
        reference="Zheng et al. 2017",
        correctors=correctors(DelayCompensation(lambda_, adaptive)),
    )
