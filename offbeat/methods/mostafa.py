"""Local errors: every stage is trained with a fixed random classifier.

Mostafa, Ramesh, Cauwenberghs, "Deep Supervised Learning Using Local Errors" (Frontiers in Neuroscience 2018). The
scores of a stage are W z, with W random and not trained. Their cross-entropy trains this stage only. The gradient
passes through the transpose of W, or through a random matrix with the same signs:

    g_z = W^T g_scores    or    S^T g_scores,   S = |r| sign(W)

    K=2             tick  0      1      2
    stage 1             | F0B0U  F1B1U  F2B2U
    stage 2             | -      F0B0U  F1B1U

Locks: forward. Staleness 0. Held: one graph, one version. Time per batch: F + B + A, with A the time of the classifier.
"""

from __future__ import annotations

from typing import Any, Literal

from offbeat.errors import unknown
from offbeat.method import Method
from offbeat.methods import lags


def Mostafa(feedback: Literal["transpose", "sign"] = "transpose") -> Method:  # noqa: N802
    """Local errors from fixed random classifiers.

    >>> method = Mostafa(feedback="sign")
    >>> method.feedback, method.staleness(1, 4)
    ('local', 0.0)
    """
    if feedback not in ("transpose", "sign"):
        raise unknown("feedback of mostafa", str(feedback), ("transpose", "sign"))

    def head(shape: tuple[int, ...], classes: int) -> Any:
        from offbeat.heads import FixedClassifier

        return FixedClassifier(shape, classes, signs=feedback == "sign")

    return Method(
        name="mostafa",
        title="fixed local classifiers",
        reference="Mostafa et al. 2018",
        locks=("forward",),
        lag=lags.none,
        feedback="local",
        head=head,
    )
