"""The learning rates of all updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.pipeline.callback import TrainingStep


class LearningRateMonitor:
    """Record the learning rate of each parameter group after every update of the stages of this process.

    history     by stage: (updates, learning rates of its groups), for the next update

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, method="adl", M=2, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ...                         scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    >>> monitor = LearningRateMonitor()
    >>> pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 4, callbacks=[monitor])
    >>> monitor.history[1]
    [(1, [0.05]), (2, [0.005000000000000001])]
    """

    def __init__(self) -> None:
        self.history: dict[int, list[tuple[int, list[float]]]] = {}

    def on_update(self, step: TrainingStep) -> None:
        for k in step.updated:
            stage = step.pipe.stages[k]
            if rates := stage.optimization.learning_rates():
                self.history.setdefault(k, []).append((stage.update_index, rates))

    def on_step(self, step: TrainingStep) -> None:
        self.history = {k: self.history[k] for k in self.history if k in step.pipe.stages}  # may be loaded of others

    def state_dict(self) -> dict[str, Any]:
        """The history of the stages of this process."""
        return {"history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the history that `state_dict` returned."""
        self.history = {k: list(history) for k, history in state["history"].items()}
