"""The open window: the sum of the gradients that the next update will apply."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from offbeat.errors import UserError

Weighting = Literal["batches", "samples"]


class BatchWeights:
    """The weight of each batch's gradient in the mean of an update: 1, or its samples relative to the first batch's.

    gradients: in the mean, of all replicas; the mean of one gradient needs no weights
    """

    def __init__(self, weighting: Weighting, gradients: int) -> None:
        self.by_samples = weighting == "samples" and gradients > 1
        self.full_batch: int | None = None  # samples of the first batch

    def enter(self, samples: int, share: float = 1.0) -> float:
        """The weight of the batch of which that many samples are forwarded now; `share`: of all that it has."""
        batch = round(samples / share) if self.by_samples else samples
        self.full_batch = self.full_batch or batch
        return self.weight(batch)

    @property
    def unit(self) -> int:
        """Samples of a batch of weight 1; 1 where batches are not weighted."""
        return self.full_batch if self.by_samples and self.full_batch else 1

    def weight(self, samples: int) -> float:
        return samples / self.full_batch if self.by_samples and self.full_batch else 1.0


class GradientWindow:
    """The sum of the window's gradients, kept in `.grad` of the parameters, and the staleness of each.

    With replicas, `combined` is (gradients, excess) of all of them once their sums are added (see replicas.py); levels,
    batches and weights stay those of this replica.
    """

    fixed = False  # whether the sums stay where they are

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.combined: tuple[int, float] | None = None
        self.levels: list[int | None] = []  # None for a gradient of a forward before the stage was full
        self.batches: list[int] = []
        self.weights: list[float] = []  # of the batches in the mean

    def add(
        self,
        t: int,
        gradients: Iterable[Tensor | None],
        level: int | None,
        foreign: Iterable[Tensor | None],
        *,
        weight: float = 1.0,
        share: float = 1.0,
    ) -> None:
        """Add the gradients of batch t, times `weight`; `foreign` are tensors that others hold, whose memory a sum must
        not take over. `share`: of a micro-batch, by which its gradients are multiplied already."""
        gradients = _weighted(gradients, weight)
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
            _check_dense(name, gradient)
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
        self.count(t, level, weight if share == 1 else 1 + share * (weight - 1))

    def count(self, t: int, level: int | None, weight: float = 1.0) -> None:
        """Batch t has been added."""
        self.levels.append(level)
        self.batches.append(t)
        self.weights.append(weight)

    def divisor(self, over: int) -> float:
        """What the sum is divided by: `over` gradients, of which those in the window count by their weights."""
        excess = self.excess() if self.combined is None else self.combined[1]
        return over + excess if excess else over

    def excess(self) -> float:
        """By how much the weights of the window's gradients differ from their number."""
        return sum(weight - 1.0 for weight in self.weights)

    def filled(self) -> bool:
        """Whether there is a gradient to apply."""
        return bool(self.levels if self.combined is None else self.combined[0])

    def combine(self, sums: Mapping[str, Tensor], *, gradients: int, excess: float) -> None:
        """Replace the sums by those of all replicas, of that many gradients; the layout is the parameter's."""
        for name, parameter in self.parameters.items():
            if name not in sums:
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(sums[name])
        self.combined = gradients, excess

    def gradients(self) -> dict[str, Tensor]:
        """The sums so far, by name."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None} if self.levels else {}

    def load(
        self,
        levels: list[int | None],
        batches: list[int],
        gradients: Mapping[str, Tensor],
        weights: list[float] | None = None,
    ) -> None:
        """Restore what was saved; older files have no weights."""
        self.levels, self.batches = levels, batches
        self.weights = [1.0] * len(levels) if weights is None else list(weights)
        self.restore({name: gradients[name].to(p.device) for name, p in self.parameters.items() if name in gradients})

    def restore(self, gradients: Mapping[str, Tensor]) -> None:
        """These are the sums, by name."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    def finite(self) -> bool:
        """Whether all gradients are."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if not gradients:
            return True
        # A sum is finite only if all its terms are, and is 2 to 20 times faster than a norm on a CPU. It may overflow.
        if gradients[0].is_cpu and torch.stack([gradient.sum() for gradient in gradients]).isfinite().all():
            return True
        return bool(torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite().all())

    def mean(self, over: float) -> None:
        """Divide the sum by `over`."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if over != 1 and gradients:
            torch._foreach_div_(gradients, over)

    def norms(self, over: float, *, of: Iterable[Tensor]) -> list[float]:
        """The norms of the mean gradients of parameters `of` the optimizer."""
        gradients = [parameter.grad for parameter in of if parameter.grad is not None] if self.filled() else []
        if not gradients:
            return []
        means = torch._foreach_div(gradients, over) if over != 1 else gradients
        return torch.stack(torch._foreach_norm(means)).tolist()

    def clear(self) -> None:
        """Open the next window; the old gradients are dropped when it gets its first."""
        self.levels.clear()
        self.batches.clear()
        self.weights.clear()
        self.combined = None


class FixedSums(GradientWindow):
    """A window whose sums stay where they are, so that recorded backwards can add to them.

    An optimizer does not change parameters without a gradient, so the sum of a parameter that got none in this window
    is hidden from it. Parameters go by their index.

    given       those that got a gradient in this window
    recorded    those to which a recorded backward adds
    """

    fixed = True

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.given = self.recorded = frozenset[int]()

    def clear(self) -> None:
        super().clear()
        self.given = frozenset()

    def gradients(self) -> dict[str, Tensor]:
        with self.only(self.given):
            return super().gradients()

    def load(
        self,
        levels: list[int | None],
        batches: list[int],
        gradients: Mapping[str, Tensor],
        weights: list[float] | None = None,
    ) -> None:
        super().load(levels, batches, gradients, weights)
        self.given = frozenset(number for number, name in enumerate(self.parameters) if name in gradients)

    def combine(self, sums: Mapping[str, Tensor], *, gradients: int, excess: float) -> None:
        found = set()
        for number, (name, parameter) in enumerate(self.parameters.items()):
            if name in sums:
                found.add(number)
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(sums[name])
        self.given = frozenset(found)
        self.combined = gradients, excess

    def norms(self, over: float, *, of: Iterable[Tensor]) -> list[float]:
        with self.only(self.given):
            return super().norms(over, of=of)

    def add_recorded(self, t: int, level: int | None) -> None:
        """A recorded backward adds the gradients of batch t."""
        self.given = self.given | self.recorded if self.given else self.recorded
        self.count(t, level)

    @contextmanager
    def only(self, given: frozenset[int]) -> Iterator[None]:
        """Hide the sums of all other parameters."""
        others = [p for number, p in enumerate(self.parameters.values()) if number not in given]
        sums = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, kept in zip(others, sums, strict=True):
                parameter.grad = kept

    def zero(self) -> None:
        """Before the first gradient of a window; nothing but tensor work."""
        sums = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if sums:
            torch._foreach_zero_(sums)

    def fix(self, gradients: Iterable[Tensor | None]) -> frozenset[int]:
        """Allocate the sum of every parameter that has a gradient here; the indices of these parameters."""
        found = set()
        for number, ((name, parameter), gradient) in enumerate(zip(self.parameters.items(), gradients, strict=True)):
            if gradient is None:
                continue
            found.add(number)
            if parameter.grad is None:
                _check_dense(name, gradient)
                parameter.grad = torch.zeros_like(parameter)
        return frozenset(found)

    def sum(self, gradients: Iterable[Tensor | None]) -> None:
        """Add to the sums; nothing but tensor work."""
        pairs = [(p.grad, g) for p, g in zip(self.parameters.values(), gradients, strict=True) if g is not None]
        if pairs:
            sums, terms = zip(*pairs, strict=True)
            torch._foreach_add_(sums, terms)

    def add(
        self,
        t: int,
        gradients: Iterable[Tensor | None],
        level: int | None,
        foreign: Iterable[Tensor | None],
        *,
        weight: float = 1.0,
        share: float = 1.0,
    ) -> None:
        gradients = list(_weighted(gradients, weight))
        if not self.levels:
            self.zero()
        self.given |= self.fix(gradients)
        self.sum(gradients)
        self.count(t, level, weight if share == 1 else 1 + share * (weight - 1))


def _weighted(gradients: Iterable[Tensor | None], weight: float) -> Iterable[Tensor | None]:
    return gradients if weight == 1.0 else [None if gradient is None else gradient * weight for gradient in gradients]


def _check_dense(name: str, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise UserError(f"the gradient of {name} is sparse: use sparse=False, windows add dense gradients")
