"""Loss, error and top-5 error over many batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Metric = Callable[[Any, Any], Any]  # of (output, target): a mean over the batch, or several by name


def batch_size(*contents: Any) -> int:
    """Samples in pytrees of tensors: the first dimension of the first tensor that has one."""
    if isinstance(contents[0], Tensor) and contents[0].dim():
        return contents[0].shape[0]
    for leaf in pytree.tree_leaves(contents):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1


def wrong(output: Any, target: Any, *, top: int = 1) -> float | None:
    """Percentage of targets outside the `top` highest scores; classes are dimension 1, as for torch's cross_entropy.

    None where output and target are not scores and class indices.

    >>> scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]])
    >>> wrong(scores, torch.tensor([1, 2])), wrong(scores, torch.tensor([1, 2]), top=3)
    (50.0, 0.0)
    """
    if not scores_classes(output, target):
        return None
    best = output.detach().topk(min(top, output.shape[1]), dim=1).indices
    return 100.0 * (1.0 - (best == target.unsqueeze(1)).any(dim=1).double().mean().item())


def scores_classes(output: Any, target: Any) -> bool:
    """Whether these are scores and class indices; classes are dimension 1, as for torch's cross_entropy."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or output.dim() < 2 or not target.numel():
        return False
    return target.dtype in (torch.int64, torch.int32) and output.shape[:1] + output.shape[2:] == target.shape


def _top5(output: Any, target: Any) -> float | None:
    """The top-5 error; None for five classes or fewer, where nothing can be wrong."""
    return wrong(output, target, top=5) if scores_classes(output, target) and output.shape[1] > 5 else None


class Meter:
    """Means over the samples added since it was last emptied; `error` and `top5` are percentages. `top5` is None for
    five classes or fewer.

    A metric that returns a dict adds means under its keys.
    """

    def __init__(self, metric: Metric | None = None) -> None:
        self.metric = metric or wrong
        self.empty()

    def empty(self) -> None:
        self.samples = 0
        self.sums: dict[str, float | None] = {"loss": 0.0, "error": 0.0, "top5": 0.0}

    def add(self, loss: float, output: Any, target: Any) -> None:
        size = batch_size(target, output)
        found = self.metric(output, target)
        values = {"loss": loss, "error": None, "top5": _top5(output, target)}
        values |= found if isinstance(found, Mapping) else {"error": found}
        for name, value in values.items():
            before = self.sums.get(name, 0.0)
            self.sums[name] = None if value is None or before is None else before + float(value) * size
        self.samples += size

    def read(self) -> dict[str, Any]:
        """{loss, error, top5, samples} and what the metric names; None for what cannot be computed."""
        means = {
            name: None if total is None or not self.samples else total / self.samples
            for name, total in self.sums.items()
        }
        return {**means, "samples": self.samples}
