"""Whether an evaluation is the best so far, and stopping when it no longer is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from offbeat.errors import UserError, number, unknown
from offbeat.pipeline.callback import TrainingStep

Mode = Literal["min", "max"]


class Best:
    """The best value of one figure of the evaluations so far.

    monitor     key of the result of an evaluation
    mode        whether "min" or "max" is better
    min_delta   by how much a value must be better
    """

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        if mode not in get_args(Mode):
            raise unknown("mode", mode, get_args(Mode))
        number(min_delta, "min_delta", "use a number from 0 up", lambda delta: delta >= 0)
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.value: float | None = None
        self.batch: int | None = None  # after which it was measured

    def improves(self, step: TrainingStep, result: Mapping[str, Any]) -> bool:
        """Whether the result is the best so far, which it then is for later ones. NaN is not."""
        value = result.get(self.monitor)
        if isinstance(value, bool) or not isinstance(value, int | float):
            known = [name for name, each in result.items() if isinstance(each, int | float)]
            raise UserError(
                f"monitor={self.monitor!r}: the evaluation has no such number, use one of {', '.join(known)}"
            )
        gain = 0.0 if self.value is None else self.value - value if self.mode == "min" else value - self.value
        if math.isnan(value) or (self.value is not None and gain <= self.min_delta):
            return False
        self.value, self.batch = float(value), step.batch
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.batch = state["value"], state["batch"]


class EarlyStopping:
    """Stop training after `patience` evaluations in a row without an improvement.

    Needs `fit(evaluate=...)`. All processes have the same results, so it may be given to one of them or to all.

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 5
    >>> stopping = EarlyStopping("loss", patience=2)
    >>> pipe.fit(batches, epochs=100, callbacks=[stopping], evaluate=batches)
    >>> pipe.batches, stopping.best.batch
    (15, 4)
    """

    evaluated = True

    def __init__(self, monitor: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode = "min") -> None:
        number(patience, "patience", "use a whole number of evaluations from 1 up", lambda n: n >= 1, whole=True)
        self.best, self.patience = Best(monitor, mode, min_delta), patience
        self.waited = 0  # evaluations since the best

    def on_evaluate(self, step: TrainingStep, result: Mapping[str, Any]) -> None:
        self.waited = 0 if self.best.improves(step, result) else self.waited + 1
        if self.waited >= self.patience:
            step.stop()

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the evaluations since."""
        return {"best": self.best.state_dict(), "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.best.load_state_dict(state["best"])
        self.waited = state["waited"]
