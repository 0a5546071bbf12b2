"""Triton kernels of BatchNorm, the sum after it and ReLU: two forwards and two backwards.

A channels-last image batch is a matrix of rows (samples and places) and C channels. Every program takes
`span` rows, BR at a time, of BC channels. The first kernel of a pair leaves sums of its rows; every program of the
second one adds all of those up again, in the same order, which is less work than a kernel between the two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # of a program at once
MOST = 128  # programs along the rows
WARPS = 4


@triton.jit
def _moments(x, sums, rows, C, span, BR: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean of the program's rows, and the squared distances from it."""
    g = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean = tl.zeros([BC], tl.float32)
    apart = tl.zeros([BC], tl.float32)
    first = g * span
    last = tl.minimum(first + span, rows)
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)
        inside = (row < last)[:, None] & (c < C)[None, :]
        value = tl.load(x + row[:, None] * C + c[None, :], inside, 0.0).to(tl.float32)
        n = tl.minimum(BR, last - start).to(tl.float32)
        before = (start - first).to(tl.float32)
        own = tl.sum(value, 0) / n
        distance = tl.where(inside, value - own[None, :], 0.0)
        step = own - mean
        apart += tl.sum(distance * distance, 0) + step * step * (before * n / (before + n))
        mean += step * (n / (before + n))
    tl.store(sums + g * C + c, mean, c < C)
    tl.store(sums + (tl.num_programs(0) + g) * C + c, apart, c < C)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    other,
    y,
    weight,
    bias,
    sums,
    saved,
    running_mean,
    running_var,
    count,
    rows,
    C,
    span,
    eps,
    momentum,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BG: tl.constexpr,
    OTHER: tl.constexpr,
    RELU: tl.constexpr,
):
    """The rows, normalised; one program also leaves mean and scale for the backward and moves the statistics."""
    g, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BG)
    known = (p < programs)[:, None] & (c < C)[None, :]
    means = tl.load(sums + p[:, None] * C + c[None, :], known, 0.0)
    aparts = tl.load(sums + (programs + p[:, None]) * C + c[None, :], known, 0.0)
    n = tl.maximum(tl.minimum(span, rows - p * span), 0).to(tl.float32)[:, None]
    all_rows = rows.to(tl.float32)
    mean = tl.sum(means * n, 0) / all_rows
    step = means - mean[None, :]
    apart = tl.sum(tl.where(known, aparts + step * step * n, 0.0), 0)
    scale = 1.0 / tl.sqrt(apart / all_rows + eps)
    if g == 0:
        tl.store(saved + c, mean, c < C)
        tl.store(saved + C + c, scale, c < C)
        old_mean, old_var = tl.load(running_mean + c, c < C), tl.load(running_var + c, c < C)
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), c < C)
        tl.store(running_var + c, old_var + momentum * (apart / (all_rows - 1.0) - old_var), c < C)
        if tl.program_id(1) == 0:
            tl.store(count, tl.load(count) + 1)
    w = tl.load(weight + c, c < C).to(tl.float32) * scale
    b = tl.load(bias + c, c < C).to(tl.float32) - mean * w
    first = g * span
    last = tl.minimum(first + span, rows)
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)
        inside = (row < last)[:, None] & (c < C)[None, :]
        place = row[:, None] * C + c[None, :]
        value = tl.load(x + place, inside, 0.0).to(tl.float32) * w[None, :] + b[None, :]
        if OTHER:
            value += tl.load(other + place, inside, 0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # what is no number stays none
        tl.store(y + place, value, inside)


@triton.jit
def _gradient_sums(dy, y, x, saved, sums, rows, C, span, BR: tl.constexpr, BC: tl.constexpr, RELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the gradient and of its product with the normalised input over the program's rows."""
    g = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, scale = tl.load(saved + c, c < C, 0.0), tl.load(saved + C + c, c < C, 0.0)
    plain = tl.zeros([BC], tl.float32)
    product = tl.zeros([BC], tl.float32)
    first = g * span
    last = tl.minimum(first + span, rows)
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)
        inside = (row < last)[:, None] & (c < C)[None, :]
        place = row[:, None] * C + c[None, :]
        gradient = tl.load(dy + place, inside, 0.0).to(tl.float32)
        if RELU:
            gradient = tl.where(tl.load(y + place, inside, 0.0).to(tl.float32) > 0, gradient, 0.0)
        normal = (tl.load(x + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        plain += tl.sum(gradient, 0)
        product += tl.sum(gradient * normal, 0)
    tl.store(sums + g * C + c, plain, c < C)
    tl.store(sums + (tl.num_programs(0) + g) * C + c, product, c < C)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    dy,
    y,
    x,
    saved,
    weight,
    sums,
    dx,
    dother,
    dweight,
    dbias,
    rows,
    C,
    span,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BG: tl.constexpr,
    OTHER: tl.constexpr,
    RELU: tl.constexpr,
):
    """Gradients of the input, of what was added, and by one program of weight and bias."""
    g, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.arange(0, BG)
    known = (p < programs)[:, None] & (c < C)[None, :]
    plain = tl.sum(tl.load(sums + p[:, None] * C + c[None, :], known, 0.0), 0)
    product = tl.sum(tl.load(sums + (programs + p[:, None]) * C + c[None, :], known, 0.0), 0)
    if g == 0:
        tl.store(dweight + c, product, c < C)
        tl.store(dbias + c, plain, c < C)
    mean, scale = tl.load(saved + c, c < C, 0.0), tl.load(saved + C + c, c < C, 0.0)
    w = tl.load(weight + c, c < C).to(tl.float32) * scale
    all_rows = rows.to(tl.float32)
    first = g * span
    last = tl.minimum(first + span, rows)
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)
        inside = (row < last)[:, None] & (c < C)[None, :]
        place = row[:, None] * C + c[None, :]
        gradient = tl.load(dy + place, inside, 0.0).to(tl.float32)
        if RELU:
            gradient = tl.where(tl.load(y + place, inside, 0.0).to(tl.float32) > 0, gradient, 0.0)
        if OTHER:
            tl.store(dother + place, gradient, inside)
        normal = (tl.load(x + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        value = w[None, :] * (gradient - (plain[None, :] + normal * product[None, :]) / all_rows)
        tl.store(dx + place, value, inside)


def forward(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    eps: float,
    momentum: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and mean and scale of each channel. `statistics` (mean, variance, count of batches) are moved."""
    rows, C, grid, sizes = _divided(x)
    sums = torch.empty(2, grid[0], C, dtype=torch.float32, device=x.device)
    saved = torch.empty(2, C, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    span, blocks = sizes
    _moments[grid](x, sums, rows, C, span, **blocks, num_warps=WARPS)
    _normalise[grid](
        x,
        x if other is None else other,
        y,
        weight,
        bias,
        sums,
        saved,
        *statistics,
        rows,
        C,
        span,
        eps,
        momentum,
        **blocks,
        BG=triton.next_power_of_2(grid[0]),
        OTHER=other is not None,
        RELU=relu,
        num_warps=WARPS,
    )
    return y, saved


def backward(
    dy: Tensor, y: Tensor, x: Tensor, saved: Tensor, weight: Tensor, relu: bool, other: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of x, of what was added where that is wanted, of weight and bias."""
    rows, C, grid, (span, blocks) = _divided(x)
    sums = torch.empty(2, grid[0], C, dtype=torch.float32, device=x.device)
    dx, dother = torch.empty_like(x), torch.empty_like(x) if other else None
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _gradient_sums[grid](dy, y, x, saved, sums, rows, C, span, **blocks, RELU=relu, num_warps=WARPS)
    _gradients[grid](
        dy,
        y,
        x,
        saved,
        weight,
        sums,
        dx,
        dx if dother is None else dother,
        dweight,
        dbias,
        rows,
        C,
        span,
        **blocks,
        BG=triton.next_power_of_2(grid[0]),
        OTHER=other,
        RELU=relu,
        num_warps=WARPS,
    )
    return dx, dother, dweight, dbias


def _divided(x: Tensor) -> tuple[int, int, tuple[int, int], tuple[int, dict[str, Any]]]:
    """Rows, channels, the grid of programs, rows of each and the sizes of its blocks."""
    C = x.shape[1]
    rows = x.numel() // C
    BC = min(64, triton.next_power_of_2(C))
    BR = ELEMENTS // BC
    tiles = -(-rows // BR)
    span = BR * -(-tiles // MOST)
    return rows, C, (-(-rows // span), -(-C // BC)), (span, {"BR": BR, "BC": BC})
