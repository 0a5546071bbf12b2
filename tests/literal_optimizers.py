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
    block=128,
) -> Tensor:
    """Adam in the bases of the eigenvectors of L and R, with momentum in the original space, for each block alone."""
    shape, theta = theta.shape, theta.reshape(theta.shape[0], -1)
    given = [g.reshape(theta.shape) for g in gradients]
    (rows, height), (columns, width) = (divided(size, block) for size in theta.shape)
    found = theta.new_zeros(rows * height, columns * width)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            parts = [padded(part[place], height, width) for part in (theta, *given)]
            found[place] = rotated_block(
                parts[0], parts[1:], lr=lr, betas=betas, exponent=exponent, decay=decay, eps=eps
            )
    return found[: theta.shape[0], : theta.shape[1]].reshape(shape)


def divided(size: int, block: int) -> tuple[int, int]:
    """The number of blocks of a side, and the size of each."""
    count = -(-size // block)
    return count, -(-size // count)


def padded(part: Tensor, height: int, width: int) -> Tensor:
    whole = part.new_zeros(height, width)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def rotated_block(
    theta: Tensor, gradients: list[Tensor], *, lr: float, betas, exponent: float, decay: float, eps: float
) -> Tensor:
    b, b2 = betas
    a, v, L, R, U, V = b**exponent, 0.0, 0.0, 0.0, None, None
    for t, (G, D) in enumerate(zip(gradients, compensated(gradients, b, exponent), strict=True), 1):
        L, R = b2 * L + (1 - b2) * G @ G.T, b2 * R + (1 - b2) * G.T @ G
        U, V = refreshed(U, L), refreshed(V, R)
        v = b2 * v + (1 - b2) * (U.T @ G @ V) ** 2
        c = a * (1 - b**t) + 1 - a
        u = (U.T @ D @ V / c) / ((v / (1 - b2**t)).sqrt() + eps)
        bound = sum(largest_ratios(a, b, b2)) ** 0.5 * (1 - b2**t) ** 0.5 / c
        theta = theta - lr * decay * theta - lr * U @ u.clamp(-bound, bound) @ V.T
    return theta


def largest_ratios(a: float, b: float, b2: float) -> Iterator[float]:
    """The square of the weight of a gradient in d, relative to the one in v, of the last 1000 gradients."""
    for age in range(1000):
        yield (a * (1 - b) * b**age + (1 - a) * (age == 0)) ** 2 / ((1 - b2) * b2**age)


def refreshed(U: Tensor | None, L: Tensor) -> Tensor:
    """Eigenvectors of L, or U, rotated towards them by one angle for each pair of columns."""
    if U is None:
        return torch.linalg.eigh(L).eigenvectors
    B, S, eye = U.T @ L @ U, torch.zeros_like(U), torch.eye(len(U), dtype=U.dtype)
    floor = 1e-5 * max(B.diagonal().tolist())
    for i in range(len(U)):
        for j in range(len(U)):
            if B[i, i] < B[j, j]:
                S[i, j] = B[i, j] / max(B[j, j], floor)
                S[j, i] = -S[i, j]
    largest = ((S @ S).square().sum().sqrt() / 2**0.5).sqrt()
    S = S * (0.5 / largest if largest > 0.5 else 1.0)
    return U @ (eye + S + S @ S / 2 + (eye - U.T @ U) / 2)
