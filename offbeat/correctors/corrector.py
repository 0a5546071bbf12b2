"""The interface of a corrector, and the stage that it works in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat.errors import UserError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.correctors.optimizer_rules import Need

Tensors = Sequence["Tensor"]


@dataclass(frozen=True)
class StageInfo:
    """What a method states about one stage; passed to `optimizer(parameters, stage)`.

    k, K    the stage, from 1, and the number of stages
    delay   mean number of updates between a forward and the use of its gradient
    lag     batches between the forward and the backward of one local iteration
    M       gradients per update
    """

    k: int
    K: int
    delay: float
    lag: int
    M: int


@dataclass
class StageContext:
    """The stage that correctors work in.

    delay       mean number of updates between a forward and the use of its gradient
    optimizer   the optimizer of the stage
    rule        what correctors can do with that optimizer; None if it has no rule
    late_updates
                updates made so far with late gradients: of this method, and of late ones before it (staleness_warmup)
    memory      the state of the correctors: a dict of tensors per parameter
    """

    k: int
    K: int
    delay: float
    optimizer: Any = None
    rule: Any = None
    late_updates: int = 0
    memory: defaultdict[Tensor, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class Corrector:
    """A correction of late gradients. A subclass overrides the methods that belong to what it `changes`.

    name                on the command line
    changes             what it changes, one or more of `CHANGES`; two correctors of a method may not change the same
    needs               what it needs of the optimizer (see optimizer_rules.py); without needs it works with all
    supported_weights   the settings of `Method.weights` that it works with
    recordable          whether every step runs the same tensor operations, so that a CUDA graph can repeat them
    """

    name: ClassVar[str]
    changes: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[Need, ...]] = ()
    supported_weights: ClassVar[tuple[str, ...]] = ("stash", "hybrid", "replay")
    recordable: ClassVar[bool] = True

    @property
    def differs_in_replicas(self) -> bool:
        """Whether what it keeps follows the batches of its replica: if it changes their gradients, before the mean over
        all replicas. Weights, steps and directions of the optimizer are the same in all."""
        return not {"gradient", "incoming gradient"}.isdisjoint(self.changes)

    def active(self, context: StageContext) -> bool:
        """Whether it changes anything in this stage."""
        return True

    def unsupported(self, lag: Callable[[int, int], int], M: int) -> str | None:
        """The reason why it does not work with a method of this lag and M, or None."""
        return None

    def forward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        """Parameters for the next forwards ("forward weights")."""
        raise NotImplementedError

    def backward_weights(self, parameters: Tensors, context: StageContext) -> list[Tensor]:
        """Parameters for the next backward ("backward weights")."""
        raise NotImplementedError

    def incoming(self, gradient: Tensor) -> Tensor:
        """The gradient received from the next stage; the result is also what is propagated ("incoming gradient")."""
        raise NotImplementedError

    def gradients(
        self, gradients: Tensors, parameters: Tensors, forwarded: Tensors, context: StageContext
    ) -> Sequence[Tensor]:
        """The gradients of one batch for these parameters; its forward used the values `forwarded` ("gradient")."""
        raise NotImplementedError

    def rate(self, context: StageContext) -> float:
        """Factor of the learning rates of the next update, in its step and in predictions of weights ("rate")."""
        return 1.0

    def before_step(self, context: StageContext) -> Any:
        """Called before the optimizer's step; the result is passed to `after_step` ("step", "weights after a step")."""

    def after_step(self, context: StageContext, kept: Any) -> None:
        """Called after the optimizer's step, with what `before_step` returned."""

    def check(self) -> None:
        """Raise UserError where its class is incomplete."""
        kind = type(self).__name__
        for attribute in ("name", "changes"):
            if not hasattr(self, attribute):
                raise UserError(
                    f"corrector {kind} has no {attribute}: declare it in the class, as in offbeat.correctors.Corrector"
                )
        if not isinstance(self.changes, tuple | list) or not self.changes:
            raise UserError(
                f"changes={self.changes!r} of corrector {self.name}: use a tuple of names, such as ('gradient',)"
            )
        for change in self.changes:
            if change not in CHANGES:
                raise unknown(f"change of corrector {self.name}", change, CHANGES)
            method = REQUIRED.get(change)
            if method and getattr(type(self), method) is getattr(Corrector, method):
                raise UserError(
                    f"corrector {self.name} changes the {change}, but {kind} does not override {method}: define it"
                )


# In the order in which before_step is called; after_step is called in the reverse order.
CHANGES = (
    "forward weights",
    "backward weights",
    "incoming gradient",
    "gradient",
    "weights after a step",
    "rate",
    "step",
)
REQUIRED = {  # the method that a change needs, where the one of the base class does nothing
    "forward weights": "forward_weights",
    "backward weights": "backward_weights",
    "incoming gradient": "incoming",
    "gradient": "gradients",
}
