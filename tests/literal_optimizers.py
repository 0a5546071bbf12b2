"""The equations of the optimizers, one parameter at a time, as plain loops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def compensated(gradients: list[Tensor], b: float, exponent: float) -> Iterator[Tensor]:
    """d of each update: a m + (1-a) g."""
    m, a = torch.zeros_like(gradients[0]), b**exponent
    for g in gradients:
        m = b * m + (1 - b) * g
        yield a * m + (1 - a) * g


def orthogonal(d: Tensor) -> Tensor:
    """Five Newton-Schulz iterations."""
    wide = d if d.shape[0] <= d.shape[1] else d.T
    x = wide / wide.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if d.shape[0] <= d.shape[1] else x.T


def muon(theta: Tensor, gradients: list[Tensor], *, lr: float, b=0.95, exponent=1.0, decay=0.1, scale="rms") -> Tensor:
    for d in compensated(gradients, b, exponent):
        matrix = d.reshape(d.shape[0], -1)
        rows, columns = matrix.shape
        factor = 0.2 * max(rows, columns) ** 0.5 if scale == "rms" else max(1.0, rows / columns) ** 0.5
        theta = theta - lr * decay * theta - lr * factor * orthogonal(matrix).reshape(d.shape)
    return theta


def adamw(
    theta: Tensor, gradients: list[Tensor], *, lr: float, betas=(0.9, 0.95), exponent=0.0, decay=0.1, eps=1e-8
) -> Tensor:
    b, b2 = betas
    a, v = b**exponent, torch.zeros_like(theta)
    for t, (g, d) in enumerate(zip(gradients, compensated(gradients, b, exponent), strict=True), 1):
        v = b2 * v + (1 - b2) * g * g
        c = a * (1 - b**t) + 1 - a
        theta = theta - lr * decay * theta - lr * (d / c) / ((v / (1 - b2**t)).sqrt() + eps)
    return theta
