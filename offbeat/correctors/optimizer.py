"""What correctors read from an optimizer, and what they change for one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offbeat.correctors.corrector import StageContext, Tensors

if TYPE_CHECKING:
    from torch import Tensor


def updated_parameters(context: StageContext) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The parameters that the next step will change, each with its parameter group."""
    for group in context.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def extrapolate(parameters: Tensors, context: StageContext, updates: float) -> list[Tensor]:
    """theta - updates * lr * v, with v the momentum buffer of SGD; a copy of theta where there is no buffer yet."""
    rates = {id(parameter): group["lr"] for group in context.optimizer.param_groups for parameter in group["params"]}
    ahead = []
    for parameter in parameters:
        v = context.optimizer.state[parameter].get("momentum_buffer") if id(parameter) in rates else None
        theta = parameter.detach()
        ahead.append(theta.clone() if v is None else theta - updates * rates[id(parameter)] * v)
    return ahead


def scale_learning_rates(context: StageContext, factor: float) -> list[Any]:
    """Multiply the learning rates by a factor and return the previous ones."""
    rates = [group["lr"] for group in context.optimizer.param_groups]
    for group in context.optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return rates


def set_learning_rates(context: StageContext, rates: list[Any]) -> None:
    """Set the learning rate of each parameter group."""
    for group, rate in zip(context.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
