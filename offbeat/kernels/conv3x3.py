"""A 3x3 convolution between few channels, as a differentiable function: on a GPU by kernels of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offbeat.kernels.batch_norm import LARGEST, available

CHANNELS = (16, 32, 64)


def narrow(layer: nn.Module) -> bool:
    """Whether a layer is such a convolution: as many channels out as in, at the same resolution."""
    return (
        type(layer) is nn.Conv2d
        and layer.in_channels == layer.out_channels
        and layer.in_channels in CHANNELS
        and (layer.kernel_size, layer.stride, layer.dilation, layer.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and layer.padding in ((1, 1), "same")
        and layer.padding_mode == "zeros"
        and layer.bias is None
    )


def convolution(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """layer(x)."""
    return _Convolution.apply(x, layer.weight) if _fits(layer.weight, x) else layer(x)


def _fits(weight: Tensor, x: Tensor) -> bool:
    """Whether the kernels do what torch would: channels-last bfloat16 on a GPU."""
    if not (x.is_cuda and x.dim() == 4 and available()):
        return False
    last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return last and x.dtype == weight.dtype == torch.bfloat16 and 0 < x.numel() < LARGEST


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        from offbeat.kernels import conv3x3_triton as narrow_kernels

        ctx.save_for_backward(x, weight)
        return narrow_kernels.convolve(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        from offbeat.kernels import conv3x3_triton as narrow_kernels

        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        wanted = ctx.needs_input_grad
        return (
            narrow_kernels.convolve(dy, weight, back=True) if wanted[0] else None,
            narrow_kernels.weight_gradient(x, dy, weight) if wanted[1] else None,
        )
