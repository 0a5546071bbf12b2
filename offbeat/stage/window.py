"""The open window: the gradients that the next update will apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from offbeat.errors import UserError


class Window:
    """The sum of the window's gradients, kept in `.grad` of the parameters, and the staleness of each."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.levels: list[int | None] = []  # None for a gradient from while the stage was filling
        self.batches: list[int] = []

    def add(
        self, t: int, gradients: Iterable[Tensor | None], level: int | None, foreign: Iterable[Tensor | None]
    ) -> None:
        """Add the gradients of batch t; `foreign` are tensors that others hold and whose memory is not ours."""
        if not self.levels:
            # Not right after the step: with the gradients gone, malloc gives the memory of a whole graph back to the
            # system before the next forward takes it again, and page faults cost 7 % of the time (ResNet-56, b=64).
            for parameter in self.parameters.values():
                parameter.grad = None
        owners = {tensor.untyped_storage().data_ptr() for tensor in foreign if tensor is not None}
        sums, terms = [], []
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise UserError(f"the gradient of {name} is sparse: use sparse=False, windows add dense gradients")
            if parameter.grad is not None:
                sums.append(parameter.grad)
                terms.append(gradient)
                continue
            storage = gradient.untyped_storage().data_ptr()
            shared = storage in owners or not torch.ops.aten.is_non_overlapping_and_dense(gradient)
            owners.add(storage)
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        if sums:
            torch._foreach_add_(sums, terms)
        self.levels.append(level)
        self.batches.append(t)

    def finite(self) -> bool:
        """Whether all gradients are."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return not gradients or bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all())

    def mean(self, over: int, *, clip_norm: float | None, of: Iterable[Tensor]) -> None:
        """Divide the sum by `over`, then clip the norm over the parameters `of` the optimizer."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if over > 1 and gradients:
            torch._foreach_div_(gradients, over)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(of, clip_norm)

    def clear(self) -> None:
        """Open the next window; the gradients go when it gets its first."""
        self.levels.clear()
        self.batches.clear()
