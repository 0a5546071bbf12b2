"""pred, sim, pred-sim: local classification and similarity matching.

Nøkland, Eidnes, "Training Neural Networks with Local Error Signals" (ICML 2019). Each stage minimises

    pred      CE(A z, y)                               A linear, initialised to zero
    sim       ||S(h) - S(y)||^2 (mean)                 h = a 3x3 convolution (or linear layer) of z
    predsim   (1-beta) pred + beta sim                 beta = 0.99; the last stage's loss is scaled by 1-beta too

where S is the matrix of cosine similarities between the samples of a batch, after subtracting the mean of each sample
over its features (for images: over the standard deviations of its channels). A stage sends the output from before its
update.

    K=2             tick  0      1      2
    stage 1             | F0B0U  F1B1U  F2B2U
    stage 2             | -      F0B0U  F1B1U

Locks: forward. Staleness 0. Held: one graph, one version. Time per batch: F + B + A, with A the time of the heads. The
similarity depends on the samples of a batch, so another batch size is another objective.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import number
from offbeat.method import Method
from offbeat.methods import lags

MOST_FEATURES = 2048  # largest number of features after pooling, for the classifier


def _local(name: str, title: str, *, pred: float, sim: float, top: float = 1.0) -> Method:
    def head(shape: tuple[int, ...], classes: int) -> Any:
        from offbeat.heads import LocalErrors

        return LocalErrors(shape, classes, pred=pred, sim=sim, most=MOST_FEATURES)

    return Method(
        name=name,
        title=title,
        reference="Nøkland, Eidnes 2019",
        locks=("forward",),
        lag=lags.none,
        feedback="local",
        head=head,
        top=top,
    )


def Pred() -> Method:  # noqa: N802
    """Local classification.

    >>> [" ".join(map(str, iteration)) for iteration in Pred().program(1, 2, range(2))]
    ['F0 B0 U', 'F1 B1 U']
    """
    return _local("pred", "local classifiers", pred=1.0, sim=0.0)


def Sim() -> Method:  # noqa: N802
    """Local similarity matching.

    >>> method = Sim()
    >>> method.feedback, method.top
    ('local', 1.0)
    """
    return _local("sim", "local similarity matching", pred=0.0, sim=1.0)


def PredSim(beta: float = 0.99) -> Method:  # noqa: N802
    """Local classification and similarity matching, weighted by beta.

    >>> method = PredSim(beta=0.9)
    >>> method.feedback, method.staleness(1, 4)
    ('local', 0.0)
    """
    number(beta, "beta", "use a number between 0 and 1", lambda beta: 0 < beta < 1)
    return _local("predsim", "local classifiers and similarity", pred=1 - beta, sim=beta, top=1 - beta)
