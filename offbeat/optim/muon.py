"""Muon: momentum, orthogonalised, for hidden matrices; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.errors import number, unknown
from offbeat.optim.compensated import CompensatedOptimizer, Group, IsHidden, Tensors

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOST_PADDING = {"cuda": 1.5}  # by type of device; 1 on others, where a batch takes no less time than its matrices
WIDE = {"cpu": 1.5}  # columns per row from which Gram matrices take fewer multiplications; bfloat16 is too inexact
SMALLEST_NORM = 1e-7
SCALES = ("rms", "spectral")


def _check_scale(value: Any, name: str) -> None:
    if value not in SCALES:
        raise unknown(name, str(value), SCALES)


class Muon(CompensatedOptimizer):
    """Muon for hidden matrices and AdamW for embeddings, output layers, norms and biases, as one optimizer.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A hidden matrix (a convolution
    kernel as the matrix of its outputs by all others) changes by -lr scale O, where O is d of `CompensatedOptimizer`
    with its singular values brought close to 1 by five Newton-Schulz iterations: in bfloat16 on a GPU, on the CPU in
    float32 or float64. Matrices of equal shape, transposed or not, are computed as one batch; on a GPU also smaller
    ones, padded with zeros, where that takes at most 1.5 times as many multiplications.

    lr, momentum, nesterov   of hidden matrices; lr also of the others unless adam_lr is given
    betas, eps               of AdamW
    weight_decay             of both, decoupled: theta <- (1 - lr weight_decay) theta
    scale                    "rms": 0.2 sqrt(max(rows, columns)), for learning rates as those of AdamW;
                             "spectral": sqrt(max(1, rows / columns)), for learning rates of about 0.02
    hidden                   function (name, parameter) -> bool that chooses the hidden matrices; by default
                             `is_hidden_matrix`, which goes by names: give named parameters, model.named_parameters()
    capturable               on a GPU: count steps and read lr there, so that a step can be captured in a CUDA graph

    >>> import offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    >>> pipe = offbeat.Pipeline(layers, K=3, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=lambda parameters: Muon(parameters, lr=0.02))
    >>> losses = [float(pipe.step(torch.ones(4, 2), torch.full((4, 1), 3.0))) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    checks = CompensatedOptimizer.checks | {
        "momentum": partial(number, allowed="use a number of at least 0 and below 1", fits=lambda b: 0 <= b < 1),
        "scale": _check_scale,
    }

    def __init__(
        self,
        parameters: Any,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adam_lr: float | None = None,
        scale: Literal["rms", "spectral"] = "rms",
        hidden: IsHidden | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "scale": scale,
            "capturable": capturable,
        }
        super().__init__(parameters, defaults, hidden=hidden, adam_lr=adam_lr)

    def momentum_of(self, group: Group) -> float:
        return float(group["momentum"] if group["hidden"] else group["betas"][0])

    def hidden_directions(self, group: Group, parameters: Tensors) -> Tensors:
        d, _ = self.compensated(group, parameters)
        kinds: dict[Any, list[int]] = defaultdict(list)
        for place, tensor in enumerate(d):
            kinds[tensor.dtype, tensor.device].append(place)
        directions = list(d)
        for (_, device), places in kinds.items():
            matrices = [d[place].flatten(1) for place in places]
            shapes = tuple(matrix.shape for matrix in matrices)
            for batch in batches(shapes, MOST_PADDING.get(device.type, 1.0)):
                found = _orthogonal([matrices[index] for index in batch], group["scale"])
                for index, direction in zip(batch, found, strict=True):
                    directions[places[index]] = direction.view(d[places[index]].shape)
        return directions


@lru_cache(maxsize=256)
def batches(shapes: tuple[tuple[int, ...], ...], most_padding: float) -> list[list[int]]:
    """The indices of matrices that are padded to one shape, in batches of at most `most_padding` times as many
    multiplications as their matrices one by one. A matrix has the shape of its transpose; equal ones are neighbours.

    >>> stage = (768, 256), (256, 256), (1024, 256), (256, 1024), (64, 64)
    >>> batches(stage, 1.5), batches(stage, 1.0)
    ([[2, 3, 0, 1], [4]], [[2, 3], [0], [1], [4]])
    """
    sizes = [(min(shape), max(shape)) for shape in shapes]
    found: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (sizes[index], shapes[index]), reverse=True):
        for batch in found:
            members = [sizes[other] for other in (*batch, index)]
            padded = len(members) * _multiplications(*map(max, zip(*members, strict=True)))
            if padded <= most_padding * sum(_multiplications(*size) for size in members):
                batch.append(index)
                break
        else:
            found.append([index])
    return found


def _multiplications(rows: int, columns: int) -> int:
    """Of one Newton-Schulz iteration."""
    return rows * rows * (2 * columns + rows)


def _orthogonal(matrices: Sequence[Tensor], scale: str) -> list[Tensor]:
    """The matrices orthogonalised, as one batch of wide ones that are padded with zeros, and scaled.

    Neighbours of equal shape are copied together.
    """
    runs = [list(run) for _, run in groupby(matrices, key=lambda matrix: matrix.shape)]
    stacks = [torch.stack(run) if len(run) > 1 else run[0][None] for run in runs]
    wide = [_wide(stack) for stack in stacks]
    rows, columns = (max(stack.shape[side] for stack in wide) for side in (1, 2))
    batch = matrices[0].new_zeros(len(matrices), rows, columns)
    for part, stack in zip(_parts(batch, wide), wide, strict=True):
        part.copy_(stack)
    directions: list[Tensor] = []
    for part, stack in zip(_parts(newton_schulz(batch), wide), stacks, strict=True):
        found = torch.empty_like(stack, memory_format=torch.contiguous_format)
        _wide(found).copy_(part)
        directions += found.unbind()
    torch._foreach_mul_(directions, [_factor(matrix, scale) for matrix in matrices])
    return directions


def _wide(stack: Tensor) -> Tensor:
    """The matrices, or their transposes if they have more rows than columns."""
    return stack.mT if stack.shape[1] > stack.shape[2] else stack


def _parts(batch: Tensor, stacks: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a batch that have the shapes of the stacks, without the zeros beside and below."""
    parts = batch.split([len(stack) for stack in stacks])
    return [part[:, : stack.shape[1], : stack.shape[2]] for part, stack in zip(parts, stacks, strict=True)]


def _factor(matrix: Tensor, scale: str) -> float:
    """The scale of a direction, by its name."""
    rows, columns = matrix.shape
    return 0.2 * max(rows, columns) ** 0.5 if scale == "rms" else max(1.0, rows / columns) ** 0.5


def newton_schulz(batch: Tensor) -> Tensor:
    """Matrices with the singular vectors of the given ones and singular values of about 1 (0.7 to 1.2).

    The matrices have no more rows than columns. X <- p(A) X with p(A) = a + b A + c A A and A = X X', from X = G / |G|.
    Rows and columns of zeros stay zero. Wide matrices take fewer multiplications if X is left out until the end:
    A <- p(A) A p(A) and Q <- p(A) Q, then Q X.
    """
    a, b, c = NEWTON_SCHULZ
    rows, columns = batch.shape[1:]
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True).clamp_(min=SMALLEST_NORM)
    precise = torch.float64 if batch.dtype == torch.float64 else torch.float32
    x = torch.empty_like(batch, dtype=torch.bfloat16 if batch.is_cuda else precise)
    torch.div(batch, norms, out=x)
    if columns > WIDE.get(batch.device.type, math.inf) * rows:
        return torch.bmm(_product_of_polynomials(torch.bmm(x, x.mT)), x)
    for _ in range(ITERATIONS):  # adding a to the diagonal would save a copy of X, but doubles the error in bfloat16
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """Q of `newton_schulz`, from the first A."""
    a, b, c = NEWTON_SCHULZ
    polynomials: list[Tensor] = []
    for _ in range(ITERATIONS):
        for last in polynomials[-1:]:
            gram = torch.bmm(torch.bmm(last, gram), last)
        polynomials.append(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        polynomials[-1].diagonal(dim1=1, dim2=2).add_(a)
    return reduce(torch.bmm, reversed(polynomials))
