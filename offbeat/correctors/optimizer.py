"""What correctors compute from an optimizer and its rule, and what they set for one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat.correctors.corrector import StageContext, Tensors
from offbeat.correctors.optimizer_rules import copied, scaled, updated_groups

if TYPE_CHECKING:
    from torch import Tensor


def updated_parameters(context: StageContext) -> list[Tensor]:
    """The parameters that the next step will change."""
    return [parameter for _, parameters in updated_groups(context.optimizer) for parameter in parameters]


def values_before_step(context: StageContext) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that the next step will change, and copies of their values."""
    parameters = updated_parameters(context)
    return parameters, copied(parameters)


def changes_since(kept: tuple[list[Tensor], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Those parameters, and by how much they have changed."""
    import torch

    parameters, before = kept
    now = [parameter.detach() for parameter in parameters]
    return parameters, list(torch._foreach_sub(now, before)) if parameters else []


def extrapolate(parameters: Tensors, context: StageContext, updates: float) -> list[Tensor]:
    """theta - updates * lr * (the optimizer's direction); a copy of theta where there is no direction yet."""
    import torch

    wanted = {id(parameter) for parameter in parameters}
    ahead: dict[int, Tensor] = {}
    for group in context.optimizer.param_groups:
        mine = [parameter for parameter in group["params"] if id(parameter) in wanted]
        directions = context.rule.directions(group, mine)
        known = [(p, direction) for p, direction in zip(mine, directions, strict=True) if direction is not None]
        if known:
            steps = scaled([direction for _, direction in known], updates * group["lr"])
            values = torch._foreach_sub([parameter.detach() for parameter, _ in known], steps)
            ahead.update(zip((id(parameter) for parameter, _ in known), values, strict=True))
    return _with_copies(parameters, ahead)


def _with_copies(parameters: Tensors, values: dict[int, Tensor]) -> list[Tensor]:
    """The values of the parameters by id, with a copy of each parameter that has none."""
    others = [parameter for parameter in parameters if id(parameter) not in values]
    values.update(zip(map(id, others), copied(others), strict=True))
    return [values[id(parameter)] for parameter in parameters]


def kept_tensors(context: StageContext, parameters: Tensors, name: str) -> list[Tensor]:
    """What a corrector keeps under that name for each of these parameters: zeros at first."""
    import torch

    for parameter in parameters:
        if name not in context.memory[parameter]:
            context.memory[parameter][name] = torch.zeros_like(parameter.detach())
    return [context.memory[parameter][name] for parameter in parameters]


def moved_along(parameters: Tensors, context: StageContext, name: str, factor: float) -> list[Tensor]:
    """theta + factor * (what a corrector keeps under that name); a copy of theta where it keeps nothing yet."""
    import torch

    kept = [context.memory[parameter].get(name) for parameter in parameters]
    known = [(parameter, tensor) for parameter, tensor in zip(parameters, kept, strict=True) if tensor is not None]
    moved = {}
    if known:
        changes = scaled([tensor for _, tensor in known], factor)
        values = torch._foreach_add([parameter.detach() for parameter, _ in known], changes)
        moved = dict(zip((id(parameter) for parameter, _ in known), values, strict=True))
    return _with_copies(parameters, moved)


@contextmanager
def scaled_rates(context: StageContext, factor: float) -> Iterator[None]:
    """The optimizer with its learning rates multiplied by a factor."""
    groups = context.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
