"""The equations of the optimizers, one parameter at a time, as plain loops; parameters and gradients to try them on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

SHAPES = {
    "block.up.weight": (8, 3),
    "block.down.weight": (3, 8),
    "block.again.weight": (3, 8),
    "block.square.weight": (5, 5),
    "block.conv.weight": (4, 3, 3, 3),
    "block.up.bias": (8,),
    "embedding.weight": (7, 4),
    "head.weight": (4, 3),
}
HIDDEN = tuple(name for name in SHAPES if name.startswith("block") and name.endswith("weight"))
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    given = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=given, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradients(steps: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    given = torch.Generator().manual_seed(1)
    return [
        {n: torch.randn(shape, generator=given, dtype=torch.float64).to(dtype) for n, shape in SHAPES.items()}
        for _ in range(steps)
    ]


def take(optimizer: torch.optim.Optimizer, given: dict[str, nn.Parameter], steps: list[dict[str, Tensor]]) -> None:
    for step in steps:
        for name, p in given.items():
            p.grad = step[name].clone() if name in step else None
        optimizer.step()


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


def rotated_adam(
    theta: Tensor,
    gradients: list[Tensor],
    *,
    lr: float,
    betas=(0.95, 0.95),
    exponent=0.0,
    decay=0.1,
    eps=1e-8,
    refresh=10,
    sides=("left", "right"),
) -> Tensor:
    """Adam in the bases of the eigenvectors of L (left) and R (right), with momentum in the original space."""
    b, b2 = betas
    rows, columns = theta.reshape(theta.shape[0], -1).shape
    L, R = (torch.zeros(n, n, dtype=theta.dtype) for n in (rows, columns))
    U, V = (torch.eye(n, dtype=theta.dtype) for n in (rows, columns))
    a, v = b**exponent, torch.zeros(rows, columns, dtype=theta.dtype)
    for t, (g, d) in enumerate(zip(gradients, compensated(gradients, b, exponent), strict=True), 1):
        G, D = g.reshape(rows, columns), d.reshape(rows, columns)
        L, R = torch.lerp(L, G @ G.T, 1 - b2), torch.lerp(R, G.T @ G, 1 - b2)
        if "left" in sides and (t - 1) % refresh == 0:
            U, order = basis(L, None if t == 1 else U)
            v = v[order]
        if "right" in sides and (t - 1) % refresh == 0:
            V, order = basis(R, None if t == 1 else V)
            v = v[:, order]
        v = b2 * v + (1 - b2) * (U.T @ G @ V) ** 2
        c = a * (1 - b**t) + 1 - a
        u = U @ ((U.T @ D @ V / c) / ((v / (1 - b2**t)).sqrt() + eps)) @ V.T
        theta = theta - lr * decay * theta - lr * u.reshape(theta.shape)
    return theta


def basis(L: Tensor, Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eigenvectors of L, or one step of power iteration from Q, and how the columns of Q were ordered for it.

    With few gradients L is singular, and rounding chooses some of the vectors: the optimizer has the same operations.
    """
    if Q is None:
        return torch.linalg.eigh(L).eigenvectors.flip(1), torch.arange(len(L))
    order = (Q * (L @ Q)).sum(0).argsort(descending=True, stable=True)  # by diag(Q' L Q)
    return torch.linalg.qr(L @ Q[:, order]).Q.contiguous(), order
