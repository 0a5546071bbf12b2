"""Deferred BatchNorm: running statistics of a whole batch that comes in micro-batches.

Each micro-batch is normalised by itself; the running mean and variance move once, at the update, by the statistics of
all samples together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class DeferredStatistics:
    """Collects over micro-batches what the BatchNorm layers of a module see."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)
                       and layer.track_running_stats and layer.running_mean is not None]  # fmt: skip
        self.seen: dict[int, tuple[int, Tensor, Tensor]] = {}  # layer -> samples, mean, squared distances from it

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around a forward: the layers' own statistics stay as they are, what they see is added up."""
        own: list[tuple[_BatchNorm, Any, Any]] = []
        hooks = []
        for number, layer in enumerate(self.layers):
            if layer.training:
                counter = layer.num_batches_tracked
                own.append((layer, layer.momentum, None if counter is None else counter.clone()))
                layer.momentum = 0.0
                hooks.append(layer.register_forward_pre_hook(partial(self._see, number)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, momentum, counter in own:
                layer.momentum = momentum
                if counter is not None and layer.num_batches_tracked is not None:
                    layer.num_batches_tracked.copy_(counter)

    def _see(self, number: int, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Join what this micro-batch holds to what came before: around the means, since the difference of large sums of
        squares would leave nothing of a small variance."""
        x = inputs[0].detach()
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        n, mean = x.numel() // x.shape[1], x.mean(dims)
        apart = x.var(dims, correction=0) * n
        if number in self.seen:
            before, mean_before, apart_before = self.seen[number]
            total, step = before + n, mean - mean_before
            apart = apart_before + apart + step.square() * (before * n / total)
            n, mean = total, mean_before + step * (n / total)
        self.seen[number] = n, mean, apart

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics by the whole batch, as one forward of it would have."""
        for number, (n, mean, apart) in self.seen.items():
            layer = self.layers[number]
            assert layer.running_mean is not None
            assert layer.running_var is not None
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
            factor = layer.momentum
            if factor is None:  # cumulative average
                factor = 1.0 / float(layer.num_batches_tracked)  # type: ignore[arg-type]
            variance = apart / max(1, n - 1)  # unbiased, as torch keeps it
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
            layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)
        self.seen.clear()
