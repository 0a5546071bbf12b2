"""Adam in a basis that follows the gradients: SOAP on blocks of matrices, with momentum in the original space."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from math import ceil, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.errors import UserError, number
from offbeat.optim.compensated import CompensatedOptimizer, Group, IsHidden, Tensors, gradients_of, weight
from offbeat.tf32 import tf32_products

PRECISIONS = (torch.float32, torch.float64)
LARGEST_ANGLE = 0.5  # bound of |S|: the next step halves what is left of an error of orthogonality, or does better
NO_GRADIENT = (
    1e-12  # of the largest eigenvalue of G G': those below it are of no gradient, or of its rounding in float32
)
ROUNDING = 1e-5  # of the largest entry: below it, what float32 has rounded in the products of a first gradient
FLOOR = 1e-5  # of the largest eigenvalue: below it, float32 has nothing but rounding to rotate by


class RotatedAdam(CompensatedOptimizer):
    """Adam in a rotated basis for hidden matrices (SOAP), and AdamW for all other parameters.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), with momentum in the original space, which
    is the basis rotation of asynchronous pipelines. A matrix (a convolution kernel as the matrix of its outputs by all
    others) is divided into blocks of at most `block` rows and columns. For a block with gradient G and d of
    `CompensatedOptimizer`, L and R are running averages of G G' and G' G with factor b2, and U and V bases close to
    their eigenvectors:

        v <- b2 v + (1-b2) (U' G V)^2
        u = (U' d V / (1 - a b^t)) / (sqrt(v / (1 - b2^t)) + eps),    |u_ij| <= c sqrt(1 - b2^t) / (1 - a b^t)
        theta <- theta - lr U u V'

    In a basis that stays, u is within that bound, for any gradients: c^2 = sum of (weight in d)^2 / (weight in v). When
    bases turn, v has no trace of what earlier gradients are in the new ones. The first basis diagonalises G, so that
    almost all of v was zero in the second update: without the bound it was up to 14 times as large as lr.

    Bases begin as eigenvectors of G G' and G' G, computed in float64; directions without a gradient follow the axes, so
    that a factorization chooses none of them. U' G V is then diagonal, and what float32 rounds beside its diagonal
    (below 1e-5 of the largest entry), which Adam would make as large as the rest, is left out of the first update.
    Every further update rotates them by angles S, as a step of QR iteration,
    U <- qr(L U), does to first order. With B = U' L U and f = 1e-5 max(B_kk):

        S_ij = B_ij / max(B_jj, f) if B_ii < B_jj,    S_ji = -S_ij,    S <- S min(1, 0.5 / (|S S| / sqrt(2))^(1/2))
        U <- U (I + S + S S / 2 + (I - U' U) / 2)

    |S S| is the Frobenius norm, so that no angle is above 0.5. All this is products of matrices, on a GPU in TF32, the
    same in every update, and can be captured in a CUDA graph. Blocks of equal shape are computed as one batch. L, R, U
    and V of a block of m x n are 2 m^2 + 2 n^2 numbers of state: four for each weight of a square block.

    betas          b and b2, also of AdamW
    block          rows and columns of a block, at most: larger ones take more time and lose less with late gradients
    weight_decay   decoupled: theta <- (1 - lr weight_decay) theta
    hidden         function (name, parameter) -> bool that chooses the hidden matrices; by default `is_hidden_matrix`,
                   which goes by names: give named parameters, model.named_parameters()
    capturable     on a GPU: count steps and read lr there, so that all steps but the first can be captured

    >>> import offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    >>> pipe = offbeat.Pipeline(layers, K=3, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=lambda parameters: RotatedAdam(parameters, lr=0.01, block=64))
    >>> losses = [float(pipe.step(torch.ones(4, 2), torch.full((4, 1), 3.0))) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    checks = CompensatedOptimizer.checks | {
        "block": partial(number, allowed="use a whole number from 1 up", fits=lambda n: n >= 1, whole=True),
    }

    def __init__(
        self,
        parameters: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        nesterov: bool = False,
        block: int = 128,
        hidden: IsHidden | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "block": block,
            "capturable": capturable,
        }
        super().__init__(parameters, defaults, hidden=hidden)

    def hidden_directions(self, group: Group, parameters: Tensors) -> Tensors:
        d, a = self.compensated(group, parameters)
        gradients, directions = gradients_of(parameters), list(d)
        grids = [Grid.of(p, group["block"]) for p in parameters]
        for t, alike in self.counted(group, parameters):
            batches: dict[Any, list[int]] = defaultdict(list)
            for place in alike:
                batches[grids[place].size, d[place].dtype, d[place].device].append(place)
            for places in batches.values():
                inside = [grids[place] for place in places]
                pairs = _pairs([(gradients[place], d[place]) for place in places], inside)
                stepped = [parameters[place] for place in places]
                are_new = [self._begin(p, grid) for p, grid in zip(stepped, inside, strict=True)]
                new = are_new[0]  # as all that have been stepped as often
                with nullcontext() if new else tf32_products(pairs.device):
                    found = self._directions(group, stepped, inside, pairs, a=a, t=t, new=new)
                for place, grid, blocks in zip(places, inside, found, strict=True):
                    directions[place] = grid.joined(blocks, parameters[place].shape)
        return directions

    def _directions(
        self, group: Group, parameters: Tensors, grids: list[Grid], pairs: Tensor, *, a: float, t: Any, new: bool
    ) -> tuple[Tensor, ...]:
        """The directions of the blocks of each parameter, from pairs (blocks, height, 2, width) of g and d."""
        (b, b2), (height, width) = map(float, group["betas"]), grids[0].size
        left, right = self._bases(parameters, pairs[:, :, 0], b2, new=new)
        rotated = torch.bmm(left.mT, pairs.flatten(2)).view(-1, 2 * height, width)  # g and d at once
        g, d = torch.bmm(rotated, right).view(pairs.shape).unbind(2)
        v = self._joined(parameters, "exp_avg_sq").mul_(b2).addcmul_(g, g, value=1 - b2)
        direction = bounded(d, v, weight(a, b, t), weight(1.0, b2, t), group["eps"], bound=largest(a, b, b2))
        if new:
            direction.masked_fill_(g.abs() < ROUNDING * g.abs().amax((1, 2), keepdim=True), 0.0)
        return torch.bmm(torch.bmm(left, direction), right.mT).split([grid.rows * grid.columns for grid in grids])

    def _bases(self, parameters: Tensors, g: Tensor, b2: float, *, new: bool) -> list[Tensor]:
        """U and V of all blocks, after g was added to L and R. Those of square blocks are one batch."""
        factors, bases = {"left": (g, g.mT), "right": (g.mT, g)}, []
        for sides in [("left", "right")] if g.shape[1] == g.shape[2] else [("left",), ("right",)]:
            averages = self._joined(parameters, *(f"{side}_average" for side in sides))
            kept = self._joined(parameters, *(f"{side}_basis" for side in sides))
            for side, average in zip(sides, averages.split(len(g)), strict=True):
                average.baddbmm_(*factors[side], beta=b2, alpha=1 - b2)
            if new:
                kept.copy_(torch.cat([first_basis(*factors[side]) for side in sides]))
            else:
                kept.copy_(refreshed(kept, averages))
            bases += kept.split(len(g))
        return bases

    def _joined(self, parameters: Tensors, *names: str) -> Tensor:
        """States as one batch, of which they become parts: the next step finds it without a copy."""
        places = [(self.state[p], name) for name in names for p in parameters]
        parts = [state[name] for state, name in places]
        batch, counts = parts[0]._base, [len(part) for part in parts]
        if batch is None or not _divide(batch, parts):
            before = [part._base for part in parts if part._base is not None]
            batch = torch.cat(parts)
            for (state, name), part in zip(places, batch.split(counts), strict=True):
                state[name] = part
            self._leave(before)
        return batch

    def _leave(self, batches: list[Tensor]) -> None:
        """Copy the states that are left in these batches: a part keeps the memory of the whole."""
        left = {id(batch) for batch in batches}
        for state in self.state.values():
            for name, value in state.items():
                if _is_part(value) and id(value._base) in left:
                    state[name] = value.clone()

    def __getstate__(self) -> dict[str, Any]:
        """With copies of the states that are parts of batches: pickle writes the whole for each part."""
        kept = super().__getstate__()
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for p, values in self.state.items():
            state[p] = {name: value.clone() if _is_part(value) else value for name, value in values.items()}
        return {**kept, "state": state}

    def _begin(self, p: Tensor, grid: Grid) -> bool:
        """Make the state of a matrix: whether there was none."""
        if p.dtype not in PRECISIONS:
            raise UserError(
                f"RotatedAdam with parameters of {p.dtype}: use float32, and precision='bf16' of a pipeline"
            )
        state, count, (height, width) = self.state[p], grid.rows * grid.columns, grid.size
        if "exp_avg_sq" in state:
            if state["exp_avg_sq"].shape != (count, height, width):
                raise UserError(
                    "this state of RotatedAdam has other blocks: use the version and the block= that saved it"
                )
            return False
        state["exp_avg_sq"] = p.new_zeros(count, height, width)
        for side, size in (("left", height), ("right", width)):
            for name in ("average", "basis"):
                state[f"{side}_{name}"] = p.new_zeros(count, size, size)
        return True


class Grid(NamedTuple):
    """How a matrix is divided into blocks of one size, which pad it with zeros if need be.

    >>> Grid.of(torch.empty(768, 300), 256)
    Grid(rows=3, columns=2, size=(256, 150))
    """

    rows: int
    columns: int
    size: tuple[int, int]  # of a block

    @classmethod
    def of(cls, p: Tensor, block: int) -> Grid:
        height, width = p.shape[0], p.shape[1:].numel()
        rows, columns = ceil(height / block), ceil(width / block)
        return cls(rows, columns, (ceil(height / rows), ceil(width / columns)))

    def divided(self, matrix: Tensor) -> Tensor:
        """The blocks (rows, columns, height, width) of a matrix."""
        (height, width), (rows, columns) = self.size, matrix.shape
        below, beside = self.rows * height - rows, self.columns * width - columns
        padded = functional.pad(matrix, (0, beside, 0, below)) if below or beside else matrix
        return padded.unflatten(1, (self.columns, width)).unflatten(0, (self.rows, height)).transpose(1, 2)

    def joined(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """The parameter of that shape that has these blocks (rows * columns, height, width)."""
        height, width = self.size
        whole = blocks.unflatten(0, (self.rows, self.columns)).transpose(1, 2)
        matrix = whole.reshape(self.rows * height, self.columns * width)
        return matrix[: shape[0], : shape[1:].numel()].reshape(shape)


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and value._base is not None


def _divide(batch: Tensor, parts: list[Tensor]) -> bool:
    """Whether a batch consists of these parts, in this order."""
    begins = accumulate((part.numel() for part in parts), initial=0)
    there = all(part._base is batch and part.storage_offset() == next(begins) for part in parts)
    return there and batch.shape == (sum(map(len, parts)), *parts[0].shape[1:])


def _pairs(tensors: list[tuple[Tensor, Tensor]], grids: list[Grid]) -> Tensor:
    """The blocks of two tensors of each parameter, side by side (blocks, height, 2, width)."""
    counts = [grid.rows * grid.columns for grid in grids]
    height, width = grids[0].size
    pairs = tensors[0][0].new_empty(sum(counts), height, 2, width)
    for part, pair, grid in zip(pairs.split(counts), tensors, grids, strict=True):
        for blocks, tensor in zip(part.unbind(2), pair, strict=True):
            blocks.unflatten(0, (grid.rows, grid.columns)).copy_(grid.divided(tensor.flatten(1)))
    return pairs


def bounded(d: Tensor, v: Tensor, weight_of_d: Any, weight_of_v: Any, eps: float, *, bound: float) -> Tensor:
    """(d / weight) / (sqrt(v / weight) + eps), with |d| at most bound * sqrt(v)."""
    root = weight_of_v**0.5
    ratios = torch.div(d, v.sqrt().add_(root, alpha=eps)).clamp_(-bound, bound)
    return ratios.mul_(root / weight_of_d)


def largest(a: float, b: float, b2: float) -> float:
    """The largest |d| / sqrt(v) that any gradients can give; see `RotatedAdam`.

    >>> round(largest(1.0, 0.95, 0.95), 9), round(largest(1.0, 0.9, 0.99), 2), largest(1.0, 0.99, 0.95)
    (1.0, 2.35, inf)
    """
    if b * b >= b2:
        return inf
    return (((1 - a * b) ** 2 + (a * b * (1 - b)) ** 2 / (b2 - b * b)) / (1 - b2)) ** 0.5


def first_basis(g: Tensor, transposed: Tensor) -> Tensor:
    """Eigenvectors of G G' for each block, in float64, which do not depend on how G is rounded.

    Where there is no gradient (rows of zeros, more rows than columns, few samples) any orthogonal vectors are
    eigenvectors, and a factorization returns what rounding chooses. Here they are those of P diag(1, 2, ...) P, with P
    the projection onto these directions: rows of zeros keep their axes. Gradients that are not finite make later steps
    NaN, as in Adam, not the factorization.
    """
    squares = torch.bmm(g.double(), transposed.double()).nan_to_num_(0.0, 0.0, 0.0)
    values, vectors = torch.linalg.eigh(squares)
    count = torch.arange(1, g.shape[1] + 1, dtype=torch.float64, device=g.device)
    none = (values <= NO_GRADIENT * values[:, -1:]).double()
    projection = torch.bmm(vectors * none[:, None], vectors.mT)
    ordered = torch.bmm(projection * count, projection)
    above = (1 - none) * (len(count) + count)  # in the order in which they are
    return torch.linalg.eigh(ordered.baddbmm_(vectors * above[:, None], vectors.mT)).eigenvectors


def refreshed(bases: Tensor, averages: Tensor) -> Tensor:
    """Bases, rotated towards the eigenvectors of the averages; see `RotatedAdam`."""
    rotated = torch.bmm(bases.mT, torch.bmm(averages, bases))
    values = rotated.diagonal(dim1=1, dim2=2)
    floor = values.amax(1, keepdim=True).mul_(FLOOR).clamp_(min=torch.finfo(values.dtype).tiny)  # of zeros
    angles = (rotated / values.maximum(floor)[:, None]).mul_(values[:, :, None] < values[:, None])
    angles = angles - angles.mT
    squares = torch.bmm(angles, angles)
    bound = torch.linalg.vector_norm(squares, dim=(1, 2), keepdim=True)  # sqrt(2) times the largest angle^2, or more
    excess = bound.div_(2**0.5 * LARGEST_ANGLE**2).clamp_(min=1)
    change = squares.div_(excess).addcdiv_(angles, excess.sqrt(), value=2)
    change.baddbmm_(bases.mT, bases, beta=0.5, alpha=-0.5).diagonal(dim1=1, dim2=2).add_(1.5)
    return torch.bmm(bases, change)
