"""Weights other than the newest: those of the best evaluation, and their moving average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.callbacks.early_stopping import Best, Mode
from offbeat.core.stage import Stage
from offbeat.errors import UserError, number
from offbeat.pipeline import Pipeline
from offbeat.pipeline.callback import TrainingStep
from offbeat.pipeline.checks import path_of, writing


class BestModel:
    """Keep the weights of the best evaluation: as `weights`, a state dict, in every process or, with a path, in a file
    that the first process writes (to be read by `torch.load`).

    Needs `fit(evaluate=...)`, and must be given to all processes, which send their weights when an evaluation is the
    best so far.

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 5
    >>> best = BestModel("loss")
    >>> pipe.fit(batches, epochs=3, callbacks=[best], evaluate=batches)
    >>> _ = layers.load_state_dict(best.weights)
    """

    collective = evaluated = True

    def __init__(self, monitor: str = "loss", *, mode: Mode = "min", path: str | Path | None = None) -> None:
        self.best, self.path = Best(monitor, mode), None if path is None else path_of(path)
        self.tried = False  # whether the path can be written
        self.weights: dict[str, Tensor] = {}  # empty with a path
        self.leads = True  # whether this process saves them in checkpoints

    def on_step(self, step: TrainingStep) -> None:
        if self.path is not None and step.pipe.leads and not self.tried:  # not only after an epoch
            self.tried = True
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._unfinished(self.path).touch()

    def on_evaluate(self, step: TrainingStep, result: Mapping[str, Any]) -> None:
        if not self.best.improves(step, result):
            return
        state, self.leads = step.pipe.gather().state_dict(), step.pipe.leads
        if self.path is None:
            self.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
        elif step.pipe.leads:
            with writing(self.path):
                torch.save(state, self._unfinished(self.path))
                self._unfinished(self.path).replace(self.path)

    def on_end(self, step: TrainingStep) -> None:
        if self.path is not None and step.pipe.leads:
            with suppress(OSError):
                self._unfinished(self.path).unlink()

    @staticmethod
    def _unfinished(path: Path) -> Path:
        return path.with_name(path.name + ".unfinished")

    def state_dict(self) -> dict[str, Any]:
        """The best value and, without a path, its weights; these in the first process alone."""
        return {"best": self.best.state_dict(), "weights": self.weights if self.leads else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` of all processes returned."""
        self.best.load_state_dict(state["best"])
        self.weights = {name: tensor.clone() for name, tensor in state["weights"].items()}


class EMA:
    """Exponential moving average of the weights, one step per update of a stage:

        average <- decay * average + (1 - decay) * weights      starting from the weights after the first update

    as torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. Each process averages the stages that it has, so
    it must be given to all. Buffers (statistics of BatchNorm) and auxiliary heads are not averaged.

    weights     averages of the parameters of this process's stages, by name in the model

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 5
    >>> ema = EMA(decay=0.99)
    >>> pipe.fit(batches, epochs=3, callbacks=[ema])
    >>> with ema.averaged(pipe):
    ...     result = pipe.evaluate(batches)
    ...     averaged = {name: tensor.clone() for name, tensor in pipe.gather().state_dict().items()}
    >>> sorted(averaged) == sorted(layers.state_dict())
    True
    """

    collective = True

    def __init__(self, decay: float = 0.999) -> None:
        number(decay, "decay", "use a factor from 0 up to, but not including, 1", lambda factor: 0 <= factor < 1)
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self.loaded = False  # since the last step

    @torch.no_grad()
    def on_update(self, step: TrainingStep) -> None:
        step.pipe.engine.settle()  # stages may only have queued their updates
        self._keep_own(step.pipe)
        for k in step.updated:
            parameters = model_parameters(step.pipe.stages[k])
            new = {name: tensor for name, tensor in parameters.items() if name not in self.weights}
            known = [name for name in parameters if name in self.weights]
            if known:
                torch._foreach_lerp_(
                    [self.weights[name] for name in known],
                    [parameters[name].detach() for name in known],
                    1 - self.decay,
                )
            self.weights |= {name: tensor.detach().clone() for name, tensor in new.items()}

    def on_step(self, step: TrainingStep) -> None:
        self._keep_own(step.pipe)

    def _keep_own(self, pipe: Pipeline) -> None:
        """After `load_state_dict`: the averages of this process's stages, where their parameters are."""
        if self.loaded:
            own = {name: p for stage in pipe.stages.values() for name, p in model_parameters(stage).items()}
            self.weights = {name: self.weights[name].to(p.device) for name, p in own.items() if name in self.weights}
            self.loaded = False

    @contextmanager
    def averaged(self, pipe: Pipeline) -> Iterator[None]:
        """Meanwhile the stages have the averaged weights, for `pipe.evaluate` and `pipe.gather`; training continues on
        their own. After a `gather`, the model has averages for the stages of other processes until the next one.

        >>> import torch, offbeat
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = offbeat.Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
        >>> ema = EMA(decay=0.9)
        >>> pipe.fit(batches, callbacks=[ema])
        >>> with ema.averaged(pipe):
        ...     averaged = pipe.evaluate(batches)["loss"]
        >>> averaged != pipe.evaluate(batches)["loss"]
        True
        """
        if not self.weights:
            raise UserError("no averages: give this EMA to fit(callbacks=...), in every process, and train first")
        pipe.engine.settle()
        self._keep_own(pipe)
        parameters = {name: p for stage in pipe.stages.values() for name, p in model_parameters(stage).items()}
        own = {name: parameters[name].data for name in self.weights}
        try:
            for name, average in self.weights.items():
                parameters[name].data = average  # no copy: graphs of batches in flight and recordings use the memory
            yield
        finally:
            pipe.engine.settle()
            for name, tensor in own.items():
                parameters[name].data = tensor

    def state_dict(self) -> dict[str, Any]:
        """The averages of this process's stages.

        >>> EMA(decay=0.9).state_dict()
        {'decay': 0.9, 'weights': {}}
        """
        return {"decay": self.decay, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the averages that `state_dict` returned, here or in all processes.

        >>> ema = EMA()
        >>> ema.load_state_dict(EMA(decay=0.9).state_dict())
        >>> ema.decay
        0.9
        """
        self.decay, self.loaded = state["decay"], True
        self.weights = {name: tensor.clone() for name, tensor in state["weights"].items()}


def model_parameters(stage: Stage) -> dict[str, Tensor]:
    """The trained parameters of a stage that the model has too; those of heads have the same names in all stages."""
    own = dict(stage.network.module.named_parameters())
    return {name: tensor for name, tensor in stage.parameters.items() if name in own}
