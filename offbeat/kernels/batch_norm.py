"""BatchNorm, the sum after it and ReLU as one differentiable function: on a GPU in two kernels each way."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LARGEST = 2**31  # elements that kernels can count


def norm(layer: nn.BatchNorm2d, x: Tensor, other: Tensor | None, *, relu: bool) -> Tensor:
    """relu(layer(x) + other), each where wanted."""
    if _fits(layer, x, other):
        statistics = layer.running_mean, layer.running_var, layer.num_batches_tracked
        return _Norm.apply(x, other, layer.weight, layer.bias, statistics, layer.eps, layer.momentum, relu)
    y = layer(x)
    if other is not None:
        y = y + other
    return F.relu(y) if relu else y


def _fits(layer: nn.BatchNorm2d, x: Tensor, other: Tensor | None) -> bool:
    """Whether the kernels do what torch would: a training batch of channels-last images on a GPU."""
    usual = layer.training and layer.affine and layer.track_running_stats and layer.momentum is not None
    if not (usual and x.is_cuda and available()):
        return False
    last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, other) if t is not None)
    alike = other is None or (other.shape == x.shape and other.dtype == x.dtype)
    few, some = x.numel() < LARGEST, x.numel() > x.shape[1] > 0
    return x.dim() == 4 and last and alike and few and some and x.dtype in (torch.float32, torch.bfloat16)


@cache
def available() -> bool:
    """Whether kernels can be made here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.version.hip is None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        statistics: Any,
        eps: float,
        momentum: float,
        relu: bool,
    ) -> Tensor:
        from offbeat.kernels import batch_norm_triton as norm_kernels

        y, saved = norm_kernels.forward(x, other, weight, bias, statistics, eps, momentum, relu)
        ctx.save_for_backward(x, y if relu else x, saved, weight)
        ctx.relu = relu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from offbeat.kernels import batch_norm_triton as norm_kernels

        x, y, saved, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        wanted = ctx.needs_input_grad
        found = norm_kernels.backward(dy, y, x, saved, weight, ctx.relu, wanted[1])
        return *(gradient if want else None for gradient, want in zip(found, wanted, strict=False)), *[None] * 4
