"""Muon: momentum, orthogonalised, for hidden matrices; AdamW for all other parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.errors import number, unknown
from offbeat.optim.compensated import CompensatedOptimizer, Group, IsHidden, Tensors

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
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
    float32 or float64. Matrices of equal shape, transposed or not, are computed as one batch.

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
        batches: dict[Any, list[int]] = defaultdict(list)
        for place, tensor in enumerate(d):
            rows, columns = tensor.flatten(1).shape
            batches[min(rows, columns), max(rows, columns), tensor.dtype, tensor.device].append(place)
        directions = list(d)
        for places in batches.values():
            matrices = [d[place].flatten(1) for place in places]
            for place, direction in zip(places, _orthogonal(matrices, group["scale"]), strict=True):
                directions[place] = direction.view(d[place].shape)
        return directions


def _orthogonal(matrices: Sequence[Tensor], scale: str) -> list[Tensor]:
    """The matrices, of one shape or its transpose, orthogonalised as one batch of wide ones, and scaled."""
    tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    halves = [[m for m, is_tall in zip(matrices, tall, strict=True) if is_tall == side] for side in (False, True)]
    stacks = [torch.stack(half) for half in halves if half]
    wide = torch.cat([stack.mT if stack.shape[1] > stack.shape[2] else stack for stack in stacks])
    parts = newton_schulz(wide).to(wide.dtype).split([len(stack) for stack in stacks])
    found: dict[bool, list[Tensor]] = {}
    for stack, part in zip(stacks, parts, strict=True):
        rows, columns = stack.shape[1:]
        factor = 0.2 * max(rows, columns) ** 0.5 if scale == "rms" else max(1.0, rows / columns) ** 0.5
        is_tall = rows > columns
        found[is_tall] = list(((part.mT if is_tall else part) * factor).contiguous().unbind())
    return [found[is_tall].pop(0) for is_tall in tall]


def newton_schulz(batch: Tensor) -> Tensor:
    """Matrices with the singular vectors of the given ones and singular values of about 1 (0.7 to 1.2).

    The matrices have no more rows than columns. X <- a X + (b A + c A A) X with A = X X', from X = G / |G|.
    """
    a, b, c = NEWTON_SCHULZ
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    x = batch / norms
    if batch.is_cuda:
        x = x.bfloat16()
    elif batch.dtype != torch.float64:
        x = x.float()
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
