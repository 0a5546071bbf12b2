"""Output shapes of the stages of a model, for which auxiliary heads are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.descriptions import USER_CODE_ERRORS
from offbeat.errors import UserError, first_line


def shapes_and_classes(
    model: nn.Module, parts: Sequence[nn.Module], sample: Any, device: torch.device, method: str
) -> dict[str, Any]:
    """Output shapes of all stages for one sample, and the classes that the last one scores; changes nothing."""
    if sample is None:
        raise UserError(f"{method} builds a head for each stage's output: give sample=, a batch")
    training = [module for module in model.modules() if module.training]
    x, shapes = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), sample), []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for k, part in enumerate(parts, start=1):
                x = part(x)
                if not isinstance(x, Tensor) or x.dim() not in (2, 4):
                    raise UserError(
                        f"{method} needs vectors or images between stages, but stage {k} gives something "
                        'else: cut between blocks (units="blocks", or other cuts)'
                    )
                shapes.append(list(x.shape[1:]))
    except USER_CODE_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the model cannot take the sample: {first_line(error)}") from error
    finally:
        for module in training:
            module.training = True
    if len(shapes[-1]) != 1:
        raise UserError(
            f"{method} needs class scores from the model, but it gives {shapes[-1]} for a sample: use a "
            "method with feedback from above, such as adl"
        )
    return {"shapes": shapes, "classes": shapes[-1][0]}
