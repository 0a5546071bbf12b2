"""DNI: decoupled neural interfaces, learning from synthetic gradients.

Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients" (ICML 2017). A synthesiser S_k predicts
the gradient of the stage's output from that output (and from the labels, with `conditional`). The stage is trained with
the prediction immediately. The gradient of its input trains the synthesiser of the previous stage, two ticks later:

    h_k = f_k(h_(k-1));   theta_k <- theta_k - gamma dh_k/dtheta_k . S_k(h_k)/b;   min ||S_k(h_k) - b g_(k+1)||^2 / b

    K=2             tick  0      1      2       3
    stage 1             | F0B0U  F1B1U  F2B2UT0 F3B3UT1      T: train the synthesiser
    stage 2             | -      F0B0U  F1B1U   F2B2U

The gradient of a mean loss is of order 1/b, so the synthesiser predicts b times the gradient. Its last layer is
initialised to zero, and Adam trains it. Locks: forward. Staleness 0, of a gradient that is a prediction. Held: one
graph, one version. Time per batch: F + B + A, with A the time of the synthesiser.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import nonnegative, number
from offbeat.method import Head, Method
from offbeat.methods import lags

HIDDEN = 128  # filters, in the CIFAR networks of the paper


def network(shape: tuple[int, ...], classes: int, conditional: bool) -> Any:
    """Two hidden 5x5 convolutions of 128 filters with BatchNorm (linear layers for vectors); the last layer is zero."""
    from torch import nn

    from offbeat.heads import Synthesiser

    C = shape[0]
    if len(shape) == 1:
        hidden = max(HIDDEN, C)
        first: nn.Module = nn.Linear(C, hidden)
        middle = [nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        last: Any = nn.Linear(hidden, C)
    else:
        hidden = HIDDEN
        first = nn.Conv2d(C, hidden, 5, padding=2)
        middle = [
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 5, padding=2),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
        ]
        last = nn.Conv2d(hidden, C, 5, padding=2)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    embedding = nn.Linear(classes, hidden, bias=False) if conditional else None
    return Synthesiser(first, nn.Sequential(*middle, last), embedding)


def DNI(  # noqa: N802
    conditional: bool = False, *, lr: float = 3e-5, synthesiser: Head | None = None
) -> Method:
    """Synthetic gradients; `synthesiser(shape, classes)` returns a module that is called with (h, labels or None).

    >>> [" ".join(map(str, iteration)) for iteration in DNI().program(1, 2, range(3))]
    ['F0 B0 U', 'F1 B1 U', 'F2 B2 U T0', 'T1', 'T2']
    """
    number(lr, "lr", "use a finite learning rate of at least 0 for the synthesisers", nonnegative)

    def head(shape: tuple[int, ...], classes: int) -> Any:
        from offbeat.heads import Synthesised

        net = synthesiser(shape, classes) if synthesiser else network(shape, classes, conditional)
        return Synthesised(net, classes if conditional else None)

    return Method(
        name="dni",
        title="synthetic gradients",
        reference="Jaderberg et al. 2017",
        locks=("forward",),
        lag=lags.none,
        feedback="synthesiser",
        head=head,
        head_lr=lr,
    )
