"""Cut a sequence of units into K contiguous stages of equal forward FLOPs, or at the places given.

Where a model is cut decides each layer's staleness, so a cut must be the same on every machine: FLOPs are counted on
the meta device, exactly and without computing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from offbeat.errors import UserError, first_line
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.solve import check_count, solve, too_few_units


def units(model: nn.Module) -> list[nn.Module]:
    """The units between which a model can be cut: the entries of an nn.Sequential, or the model as a whole."""
    # not children(), which leaves out an entry that stands there twice
    return list(model._modules.values()) if is_sequence(model) else [model]  # type: ignore[arg-type]


def is_sequence(model: nn.Module) -> bool:
    """Whether running the entries one after the other is all that the model does."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return False
    own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    return not (own or model._forward_hooks or model._forward_pre_hooks or model._backward_hooks)


def balanced(costs: Sequence[int], K: int) -> list[int]:
    """Cuts of the contiguous partition into K non-empty stages with the smallest largest cost, the rest balanced too.

    A cut c is before unit c.

    >>> balanced([4, 1, 1, 1, 4, 1], 3)
    [1, 4]
    """
    return list(solve(costs, K).cuts)


def forward_flops(model: nn.Module, sample: Any) -> list[int]:
    """Forward FLOPs of each unit on that sample (convolutions, matrix products, attention)."""
    dry = copy_model(model).to("meta")
    x = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), sample)
    counts = []
    for position, unit in enumerate(units(dry)):
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                x = unit(x)
        except Exception as error:
            raise UserError(
                f"unit {position} ({type(unit).__name__}) cannot be measured on this sample: {first_line(error)}; "
                "fix the model or the sample, or give the cuts: cuts=[...]"
            ) from error
        counts.append(counter.get_total_flops())
    return counts


def cut(model: nn.Module, K: int, *, cuts: Sequence[int] | None = None, sample: Any = None) -> list[int]:
    """The cuts of a model into K stages: those given, checked, or the balanced ones for a sample."""
    check_blocks(model, K)
    count = len(units(model))
    if cuts is None:
        if K > 1 and sample is None:
            raise UserError("there is no batch to cut the model by: give a sample, or cuts=[...]")
        return balanced(forward_flops(model, sample), K) if K > 1 else []
    chosen = list(cuts)
    check_count(chosen, K)
    if any(a >= b for a, b in zip([0, *chosen], [*chosen, count], strict=True)):
        raise UserError(f"cuts {chosen} of {count} units: they must increase, from 1 to {count - 1}")
    return chosen


def check_stages(model: nn.Module, K: int) -> None:
    """Refuse a K that no cut of this model can give, as far as can be seen without tracing."""
    if isinstance(K, bool) or not isinstance(K, int) or K < 1:
        raise UserError(f"K={K!r} stages: use a whole number from 1 up")
    if not isinstance(model, nn.Module):
        raise UserError(f"model is of type {type(model).__name__}: give an nn.Module")
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if K > 1 and scripted:
        which = f"{scripted[0]} is" if scripted[0] else "the model is"
        raise UserError(f"{which} a scripted module, which cannot be cut: give the Python module that was scripted")


def check_blocks(model: nn.Module, K: int) -> None:
    """Refuse a K that cannot be had by cutting between the entries of an nn.Sequential."""
    check_stages(model, K)
    count = len(units(model))
    if K > 1 and not is_sequence(model):
        raise UserError(
            f"K={K} stages but the model is not a plain nn.Sequential (without a forward, parameters or hooks of its "
            f"own): give one, or a list of {K} stages"
        )
    if count < K:
        raise too_few_units(K, count, ", or units='layers'")


def split(model: nn.Module, cuts: Sequence[int]) -> list[nn.Module]:
    """The stages between the cuts; they share the model's own layers and keep their names."""
    parts: list[nn.Module] = [model]
    if cuts:
        entries = list(model._modules.items())
        edges = zip([0, *cuts], [*cuts, len(entries)], strict=True)
        parts = [
            nn.Sequential(OrderedDict((name, unit) for name, unit in entries[start:end] if unit is not None))
            for start, end in edges
        ]
    refuse_shared(parts)
    return parts


def refuse_shared(parts: Sequence[nn.Module]) -> None:
    """A parameter or buffer of two stages would have two histories: refuse it, with its names."""
    owner: dict[int, tuple[int, str]] = {}
    for k, part in enumerate(parts, start=1):
        here = part.named_parameters(remove_duplicate=False), part.named_buffers(remove_duplicate=False)
        for name, tensor in (pair for named in here for pair in named):
            first_k, first_name = owner.setdefault(id(tensor), (k, name))
            if first_k != k:
                raise UserError(
                    f"{first_name} of stage {first_k} and {name} of stage {k} are one tensor: "
                    'cut so that both are in one stage, or cut the model with units="layers", which shares them'
                )
