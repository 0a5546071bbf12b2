"""Adam in a basis that follows the gradients: SOAP, with momentum in the original space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import UserError, number
from offbeat.optim.compensated import CompensatedOptimizer, Group, IsHidden, Tensors, check_flag

PRECISIONS = (torch.float32, torch.float64)


class RotatedAdam(CompensatedOptimizer):
    """Adam in a rotated basis for hidden matrices (SOAP), and AdamW for all other parameters.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), with momentum in the original space, which
    is the basis rotation of asynchronous pipelines. For a matrix (a convolution kernel as the matrix of its outputs by
    all others) with gradient G and d of `CompensatedOptimizer`, L and R are running averages of G G' and G' G with
    factor b2, and U and V bases close to their eigenvectors:

        v <- b2 v + (1-b2) (U' G V)^2
        theta <- theta - lr U ((U' d V / (1 - a b^t)) / (sqrt(v / (1 - b2^t)) + eps)) V'

    Bases begin as eigenvectors. Every `refresh` updates their columns are ordered by diag(U' L U), v in the same way,
    and U <- qr(L U). A matrix of m x n has 2 m^2 + 2 n^2 numbers of state for L, R, U and V. A factorization cannot be
    captured in a CUDA graph: updates with a refresh are done eagerly, and those between them can be recorded.

    betas          b and b2, also of AdamW
    refresh        updates between two refreshes; groups may have their own
    one_sided      rotate the smaller side alone: less memory and time
    max_dim        a side of more than this is not rotated
    weight_decay   decoupled: theta <- (1 - lr weight_decay) theta
    hidden         function (name, parameter) -> bool that chooses the hidden matrices; by default `is_hidden_matrix`,
                   which goes by names: give named parameters, model.named_parameters()
    capturable     on a GPU: count steps and read lr there, so that a step without a refresh can be captured

    >>> import offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    >>> pipe = offbeat.Pipeline(layers, K=3, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=lambda parameters: RotatedAdam(parameters, lr=0.01, refresh=20))
    >>> losses = [float(pipe.step(torch.ones(4, 2), torch.full((4, 1), 3.0))) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    checks = CompensatedOptimizer.checks | {
        "refresh": partial(
            number, allowed="use a whole number of updates from 1 up", fits=lambda n: n >= 1, whole=True
        ),
        "max_dim": partial(number, allowed="use a whole number from 0 up", fits=lambda n: n >= 0, whole=True),
        "one_sided": check_flag,
    }
    _repeats = False  # whether a regular step is repeated

    def __init__(
        self,
        parameters: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        nesterov: bool = False,
        refresh: int = 10,
        one_sided: bool = False,
        max_dim: int = 4096,
        hidden: IsHidden | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "refresh": refresh,
            "one_sided": one_sided,
            "max_dim": max_dim,
            "capturable": capturable,
        }
        super().__init__(parameters, defaults, hidden=hidden)
        self._taken: dict[Tensor, int] = {}  # steps of hidden matrices: reading those on a device would wait for it

    # ---- which steps are alike (see graphs/recorded_optimization.py)

    def next_is_regular(self) -> bool:
        """Whether the next step has no refresh."""
        return not any(self._due(group, p) for group in self.param_groups if group["hidden"] for p in group["params"])

    @contextmanager
    def regular(self) -> Iterator[None]:
        """Steps inside have no refresh and are not counted, whenever they are repeated."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    def count_step(self) -> None:
        """A regular step has been repeated."""
        for p in self._taken:
            self._taken[p] += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and after a state was loaded: steps are read from it again."""
        super().__setstate__(state)
        self._taken = {}

    def _due(self, group: Group, p: Tensor) -> bool:
        """Whether the bases of a matrix are refreshed in this step."""
        if self._repeats:
            return False
        if p not in self._taken:
            self._taken[p] = int(self.state[p]["step"]) if "step" in self.state.get(p, {}) else 0
        return self._taken[p] % int(group["refresh"]) == 0

    # ---- directions

    def hidden_directions(self, group: Group, parameters: Tensors) -> Tensors:
        for p in parameters:
            self._follow(group, p)
        bases = [(self.state[p].get("left_basis"), self.state[p].get("right_basis")) for p in parameters]
        back = [tuple(None if basis is None else basis.mT for basis in pair) for pair in bases]
        directions = self.adam_directions(group, parameters, lambda tensors: _rotated(tensors, bases))
        for p in () if self._repeats else parameters:
            self._taken[p] += 1
        return _rotated(directions, back)

    def _follow(self, group: Group, p: Tensor) -> None:
        """Add a gradient to L and R, and refresh the bases when it is time."""
        assert p.grad is not None
        if p.dtype not in PRECISIONS:
            raise UserError(
                f"RotatedAdam with parameters of {p.dtype}: use float32, and precision='bf16' of a pipeline"
            )
        due = self._due(group, p)
        state, g, b2 = self.state[p], p.grad.flatten(1), group["betas"][1]
        for side, dim in _sides(group, g):
            gram = g @ g.mT if dim == 0 else g.mT @ g
            if f"{side}_average" not in state:
                state[f"{side}_average"] = torch.zeros_like(gram)
            average = state[f"{side}_average"].lerp_(gram, 1 - b2)
            if not due:
                continue
            basis = state.get(f"{side}_basis")
            if basis is None:
                state[f"{side}_basis"] = torch.linalg.eigh(average).eigenvectors.flip(1).contiguous()
                continue
            order = (basis * (average @ basis)).sum(0).argsort(descending=True, stable=True)
            v = state["exp_avg_sq"]
            v.copy_(v.flatten(1).index_select(dim, order).view(v.shape))
            basis.copy_(torch.linalg.qr(average @ basis[:, order]).Q)


def _sides(group: Group, matrix: Tensor) -> list[tuple[str, int]]:
    """The sides of a matrix that are rotated, each with its dimension."""
    rows, columns = matrix.shape
    sides = [("left", 0), ("right", 1)]
    if group["one_sided"]:
        sides = [sides[rows > columns]]
    return [(side, dim) for side, dim in sides if matrix.shape[dim] <= group["max_dim"]]


def _rotated(tensors: Tensors, bases: list[Any]) -> list[Tensor]:
    """left' X right for each tensor as a matrix X; a basis of None is the identity."""
    found = []
    for tensor, (left, right) in zip(tensors, bases, strict=True):
        matrix = tensor.flatten(1)
        matrix = matrix if left is None else left.mT @ matrix
        matrix = matrix if right is None else matrix @ right
        found.append(matrix.view(tensor.shape))
    return found
