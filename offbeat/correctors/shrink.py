"""Gradient shrinking of FDG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat.correctors.corrector import Corrector, StageContext
from offbeat.errors import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shrink(Corrector):
    """Gradient shrinking of FDG: every stage but the last multiplies the incoming gradient by beta.

    The gradient that it sends to the previous stage is scaled too, so the gradient of stage k is scaled by beta^(K-k).
    Weight decay is not scaled.

    >>> import offbeat
    >>> offbeat.FDG(beta=0.5).correctors == (offbeat.Shrink(beta=0.5),)
    True
    """

    name: ClassVar[str] = "shrink"
    changes: ClassVar[tuple[str, ...]] = ("incoming gradient",)
    beta: float = 0.5

    def __post_init__(self) -> None:
        number(self.beta, "beta", "use a factor above 0 and at most 1", lambda beta: 0 < beta <= 1)

    def active(self, context: StageContext) -> bool:
        return self.beta != 1 and context.k < context.K

    def incoming(self, gradient: Tensor) -> Tensor:
        return gradient * self.beta
