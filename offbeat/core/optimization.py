"""The optimizer of one stage: made and checked, stepped once per update, with its schedule and its correctors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.core.batch_guard import BatchGuard
from offbeat.core.clipping import Clipping
from offbeat.core.corrections import Corrections
from offbeat.core.window import GradientWindow
from offbeat.correctors import StageInfo
from offbeat.errors import UserError, first_line
from offbeat.method import Method

Parameters = Iterable[tuple[str, Tensor]]
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer] | Callable[[Parameters, StageInfo], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class Optimization(Protocol):
    """Applies windows of gradients to the parameters of a stage; optimizer is None where there are no parameters.

    made   the options of the optimizer's groups as they were made, before schedules and correctors change any
    """

    optimizer: torch.optim.Optimizer | None
    made: list[dict[str, Any]]
    scheduler: Any
    corrections: Corrections
    clipping: Clipping

    def prepare_for(self, later: Method) -> None:
        """Keep what the correctors of a method that will train the stage later need of the optimizer's last step.
        Refuse those that the optimizer does not support."""

    def norms(self, window: GradientWindow, over: int) -> list[float]:
        """The norms of the gradients that `apply` will use."""

    def apply(self, window: GradientWindow, over: int, s: int) -> bool:
        """Make update s from the sum of the window's gradients divided by `over`; whether the weights have changed."""

    def advance(self) -> None:
        """Set the learning rate of the next update."""

    def learning_rates(self) -> list[float]:
        """The learning rates of the next update, by parameter group."""

    def resume_schedule(self, updates: int) -> None:
        """Set the learning rate of the update after that many, for a schedule that is a function of the update
        (LambdaLR)."""


class EagerOptimization:
    """Applies windows when it is called."""

    def __init__(
        self,
        method: Method,
        k: int,
        K: int,
        *,
        parameters: Mapping[str, Tensor],
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        clipping: Clipping,
        device: torch.device,
        guard: BatchGuard,
    ) -> None:
        self.k, self.K, self.guard, self.clipping = k, K, guard, clipping
        self.parameters, self.make = parameters, optimizer
        self.optimizer: torch.optim.Optimizer | None = None
        self.made: list[dict[str, Any]] = []
        if parameters:
            made = self._made_for(method)
            self.made = [options_of(group) for group in made.param_groups]
            self.optimizer = _rates_on_device(made, device)
        self.scheduler = _checked_scheduler(scheduler(self.optimizer)) if scheduler and self.optimizer else None
        self.corrections = Corrections(method, k, K, self.optimizer)

    def _made_for(self, method: Method) -> torch.optim.Optimizer:
        given = (list(self.parameters.items()), method.stage_info(self.k, self.K))[: arguments_of(self.make)]
        return _checked_optimizer(self.make(*given), self.parameters)  # type: ignore[arg-type]

    def prepare_for(self, later: Method) -> None:
        if self.parameters and any(corrector.needs for corrector in later.correctors):
            self.corrections.prepare_for(Corrections(later, self.k, self.K, self._made_for(later)))

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]] if self.optimizer else []

    def norms(self, window: GradientWindow, over: int) -> list[float]:
        return window.norms(window.divisor(over), of=self._trained())

    def apply(self, window: GradientWindow, over: int, s: int) -> bool:
        if self.optimizer is None or not self.guard.accepts_gradients(window, s) or not self.clipping.finite():
            return False
        self.step(window, window.divisor(over))
        return True

    def step(self, window: GradientWindow, over: float) -> None:
        """The mean of the window's gradients, clipped, and the optimizer's step with it."""
        assert self.optimizer is not None
        window.mean(over)
        self.clipping.clip(self._trained())
        self.corrections.step()

    def advance(self) -> None:
        if self.scheduler is None:
            return
        if getattr(self.optimizer, "_opt_called", False):  # so that torch has nothing to warn of
            _step(self.scheduler)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            _step(self.scheduler)

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def resume_schedule(self, updates: int) -> None:
        if self.scheduler is None:
            return
        self.scheduler.last_epoch = updates - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _step(self.scheduler)


def _step(scheduler: Any) -> None:
    """Step a scheduler; one that has a length (OneCycleLR) raises beyond it."""
    try:
        scheduler.step()
    except ValueError as error:
        raise UserError(
            f"scheduler {type(scheduler).__name__} cannot be stepped further ({first_line(error)}): it is stepped once "
            "per update, not per batch; give it pipe.updates(batches) steps, of all batches that you train on"
        ) from error


def arguments_of(optimizer: MakeOptimizer) -> int:
    """With how many arguments to call the function: (parameters), or (parameters, stage) if the second is required or
    called `stage`.

    >>> arguments_of(torch.optim.SGD), arguments_of(lambda parameters, stage: None)
    (1, 2)
    """
    try:
        parameters = list(inspect.signature(optimizer).parameters.values())
    except ValueError:  # a builtin without a signature
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    second = positional[1:2]
    count = 2 if any(p.default is p.empty or p.name == "stage" for p in second) else 1
    missing = [p.name for p in positional[count:] if p.default is p.empty]
    missing += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing or not (positional or several):
        raise UserError(
            f"optimizer takes ({', '.join(map(str, parameters))}): give a function of one argument, lambda parameters: "
            "..., or of two, lambda parameters, stage: ..."
        )
    return count


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group as values: scalars on the device are read.

    >>> options_of({"params": [], "lr": torch.tensor(0.5), "nesterov": True})
    {'lr': 0.5, 'nesterov': True}
    """
    return {
        option: value.item() if isinstance(value, Tensor) and not value.dim() else value
        for option, value in group.items()
        if option not in ("params", "param_names")
    }


def _checked_optimizer(optimizer: torch.optim.Optimizer, given: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """An optimizer that steps the parameters that it was given, or some of them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer(parameters) returned an object of type {type(optimizer).__name__}: return a "
            "torch.optim.Optimizer"
        )
    known = {id(parameter) for parameter in given.values()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            "optimizer(parameters) holds other parameters than those of its stage: make it of its argument "
            "alone, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"optimizer {type(optimizer).__name__} repeats the forward in each step: use a first-order one")
    return optimizer


def _rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer with learning rates as tensors on the device, where it can read them there."""
    for group in optimizer.param_groups:
        if device.type == "cuda" and (group.get("fused") or group.get("capturable")):
            group.setdefault("initial_lr", float(group["lr"]))  # where schedules start
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
    return optimizer


def _checked_scheduler(scheduler: Any) -> Any:
    if not callable(getattr(scheduler, "step", None)):
        raise UserError(
            f"scheduler(optimizer) returned an object of type {type(scheduler).__name__}: return one of "
            "torch.optim.lr_scheduler"
        )
    if "metrics" in inspect.signature(scheduler.step).parameters:
        name = type(scheduler).__name__
        raise UserError(f"scheduler {name} steps on a metric, which stages cannot share: use one that counts steps")
    return scheduler
