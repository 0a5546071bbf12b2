"""Stages as torch.distributed.pipelining takes them: their values in and out are plain tensors.

Most versions of it announce every value that crosses a cut as one that requires a gradient, and raise an error where a
stage has none for it. Values within a block may get none: masks, tables of positions, what only gives its shape. So
every value is sent as floating point numbers that require a gradient, and those that the stage has none for get zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SAME_BITS = {8: torch.float64, 4: torch.float32, 2: torch.float16}  # floating point, by bytes per element


@dataclass
class Counter:
    """Bytes that pass, while it is on."""

    bytes: int = 0
    on: bool = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.bytes, self.on = 0, True
        yield
        self.on = False

    def see(self, tensor: Tensor) -> None:
        if self.on:
            self.bytes += tensor.nbytes


class Flat(nn.Module):
    """A stage whose values in and out are plain tensors.

    `inputs` is the tree of a sample message; what is no tensor in it is the same for every batch. `unused` are the
    tensors of it that get no gradient, by their index. Values and gradients are contiguous, since gloo sends no others.
    """

    def __init__(
        self, stage: nn.Module, inputs: Any, counter: Counter, *, unused: Collection[int] = (), last: bool
    ) -> None:
        super().__init__()
        self.stage, self.counter, self.unused, self.last = stage, counter, unused, last
        leaves, self.structure = pytree.tree_flatten(inputs)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [(place, leaf.dtype) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        leaves, unused = list(self.leaves), []
        for index, (tensor, (place, dtype)) in enumerate(zip(tensors, self.places, strict=True)):
            value = self._watched(tensor) if tensor.requires_grad else tensor
            if index in self.unused:
                unused.append(value)
                value = value.detach()
            leaves[place] = restored(value, dtype)
        output = self.stage(pytree.tree_unflatten(leaves, self.structure))
        sent = [output] if self.last else [as_floats(tensor) for tensor in tensors_of(output)]
        if any(value.requires_grad for value in unused):
            sent[0] = ZeroGradients.apply(sent[0], *unused)
        if not self.last:
            for tensor in sent:
                self.counter.see(tensor)
        return sent[0] if len(sent) == 1 else tuple(sent)

    def _watched(self, tensor: Tensor) -> Tensor:
        """The tensor, with contiguous gradients that are counted; its hooks end with this batch."""
        view = tensor.view_as(tensor)
        view.register_hook(Tensor.contiguous)
        if self.counter.on:
            view.register_hook(self.counter.see)
        return view


class ZeroGradients(torch.autograd.Function):
    """The first tensor; the others, on which it does not depend, get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient, *(gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def tensors_of(content: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor)]


def as_floats(tensor: Tensor) -> Tensor:
    """A tensor as it is sent: contiguous, of floating point numbers, and one that requires a gradient."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif not tensor.is_floating_point():
        one_byte = tensor.element_size() == 1
        tensor = tensor.to(torch.float16) if one_byte else tensor.view(SAME_BITS[tensor.element_size()])
    tensor = tensor.contiguous()
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of that type that was sent as floating point numbers."""
    if tensor.dtype == dtype:
        return tensor
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.to(dtype) if dtype.itemsize == 1 else tensor.view(dtype)


def tried(stage: nn.Module, inputs: Any) -> tuple[Any, set[int]]:
    """The outputs of a stage for a sample message, and which of its tensors get no gradient, by their index."""
    leaves = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), inputs)
    with torch.enable_grad():
        outputs = stage(pytree.tree_map_only(Tensor, torch.clone, leaves))
    given, results = tensors_of(leaves), [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    reached = [index for index, tensor in enumerate(given) if tensor.requires_grad]
    if not reached or not results:
        return outputs, set(range(len(given)))
    found = torch.autograd.grad(
        results, [given[index] for index in reached], [torch.ones_like(tensor) for tensor in results], allow_unused=True
    )
    gets = {index for index, gradient in zip(reached, found, strict=True) if gradient is not None}
    return outputs, set(range(len(given))) - gets


def announced(content: Any, *, crosses: bool) -> tuple[Tensor, ...]:
    """What torch.distributed.pipelining must know of the tensors in or out of a stage, so that it does not run the
    stage on tensors of its own, which would change the statistics of BatchNorm."""
    sent = [as_floats(tensor.detach()) if crosses else tensor for tensor in tensors_of(content)]
    return tuple(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta").requires_grad_(crosses)
        for tensor in sent
    )
