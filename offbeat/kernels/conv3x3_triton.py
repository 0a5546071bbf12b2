"""Triton kernels of a 3x3 convolution between few channels: forward, gradient of the input, gradient of the weight.

Images are channels-last: rows (samples and places) of C channels; so are weights, with C filters of nine taps. The
libraries' tiles are made for wide layers: with 16 channels most of what they reserve is idle, and a few of them fill a
GPU on which stages are to run side by side. These reserve little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# By channels; chosen among four each on an H200, alone and eight at once (images of 32, 16 and 8 a side, b=32).
ROWS = {16: 256, 32: 128, 64: 64}  # of a program of _convolve
CHUNK = {16: 128, 32: 64, 64: 64}  # rows that _products takes at once
SPAN = {16: 512, 32: 256, 64: 128}  # and in all
WARPS = {16: 2, 32: 2, 64: 4}  # of _products
MOST = 128  # programs along the rows


@triton.jit
def _convolve(x, w, y, rows, H, W, C: tl.constexpr, BACK: tl.constexpr, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = x * w, or with BACK the same with flipped and transposed filters."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, C)
    h, v = (row // W) % H, row % W
    inside = row < rows
    total = tl.zeros([BR, C], tl.float32)
    for tap in range(9):
        dh, dv = tap // 3 - 1, tap % 3 - 1
        there = inside & (h + dh >= 0) & (h + dh < H) & (v + dv >= 0) & (v + dv < W)
        value = tl.load(x + (row + dh * W + dv)[:, None] * C + c[None, :], there[:, None], 0.0)
        if BACK:  # from the filter of c_out at the opposite tap, to its c_in
            weight = tl.load(w + (c[:, None] * 9 + (8 - tap)) * C + c[None, :])
        else:
            weight = tl.load(w + (c[None, :] * 9 + tap) * C + c[:, None])
        total = tl.dot(value, weight, total)
    tl.store(y + row[:, None] * C + c[None, :], total, inside[:, None])


@triton.jit
def _products(x, dy, parts, rows, H, W, span, C: tl.constexpr, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """For one row of taps, products of gradients and inputs, summed up over the program's rows."""
    g, dh = tl.program_id(0), tl.program_id(1) - 1
    c = tl.arange(0, C)
    left = tl.zeros([C, C], tl.float32)
    middle = tl.zeros([C, C], tl.float32)
    right = tl.zeros([C, C], tl.float32)
    last = tl.minimum((g + 1) * span, rows)
    for start in range(g * span, last, BR):
        row = start + tl.arange(0, BR)
        h, v = (row // W) % H + dh, row % W
        inside = row < last
        gradient = tl.trans(tl.load(dy + row[:, None] * C + c[None, :], inside[:, None], 0.0))
        there = inside & (h >= 0) & (h < H)
        place = x + (row + dh * W)[:, None] * C + c[None, :]
        left = tl.dot(gradient, tl.load(place - C, (there & (v > 0))[:, None], 0.0), left)
        middle = tl.dot(gradient, tl.load(place, there[:, None], 0.0), middle)
        right = tl.dot(gradient, tl.load(place + C, (there & (v < W - 1))[:, None], 0.0), right)
    out = parts + g * C * 9 * C + (c[:, None] * 9 + (dh + 1) * 3) * C + c[None, :]
    tl.store(out, left)
    tl.store(out + C, middle)
    tl.store(out + 2 * C, right)


@triton.jit
def _sum(parts, out, programs, size, BG: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over the programs of _products, in the same order every time."""
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    g = tl.arange(0, BG)
    known = (g < programs)[:, None] & (i < size)[None, :]
    tl.store(out + i, tl.sum(tl.load(parts + g[:, None] * size + i[None, :], known, 0.0), 0), i < size)


def convolve(x: Tensor, weight: Tensor, *, back: bool = False) -> Tensor:
    """The convolution; with `back` the gradient of its input, for a gradient x of its output."""
    N, C, H, W = x.shape
    y, rows, BR = torch.empty_like(x), N * H * W, ROWS[C]
    _convolve[(-(-rows // BR),)](x, weight, y, rows, H, W, C=C, BACK=back, BR=BR, num_warps=4)
    return y


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight."""
    N, C, H, W = x.shape
    rows = N * H * W
    span = CHUNK[C] * -(-rows // (CHUNK[C] * MOST)) if rows > SPAN[C] * MOST else SPAN[C]
    programs, size = -(-rows // span), C * 9 * C
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    found = torch.empty_like(weight)
    _products[(programs, 3)](x, dy, parts, rows, H, W, span, C=C, BR=CHUNK[C], num_warps=WARPS[C])
    BG = triton.next_power_of_2(programs)
    BS = max(16, 4096 // BG)
    _sum[(-(-size // BS),)](parts, found, programs, size, BG=BG, BS=BS, num_warps=4)
    return found
