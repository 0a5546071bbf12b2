"""What the optimizers of this package have in common: two kinds of parameters, momentum with compensation, AdamW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from offbeat.errors import UserError, nonnegative, number
from offbeat.optim.branches import branches
from offbeat.optim.names import is_hidden_matrix

Group = dict[str, Any]
Tensors = list[Tensor] | tuple[Tensor, ...]
IsHidden = Callable[[str | None, Tensor], bool]
Check = Callable[[Any, str], None]  # (value, name) of an option: raises UserError for a value that is not allowed
CPU = torch.device("cpu")
AT_LEAST_0 = partial(number, allowed="use a finite number of at least 0", fits=nonnegative)


def check_flag(value: Any, name: str) -> None:
    """Refuse an option that is not True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}: use True or False")


def _check_nonnegative(value: Any, name: str) -> None:
    AT_LEAST_0(_plain(value), name)


def _check_betas(value: Any, name: str) -> None:
    betas = [_plain(beta) for beta in value] if isinstance(value, tuple | list) else []
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"{name}={value}: use two numbers of at least 0 and below 1")


def _plain(value: Any) -> Any:
    """The number of a tensor with one element."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class CompensatedOptimizer(torch.optim.Optimizer, ABC):
    """Steps hidden matrices along directions of a subclass, and all other parameters by AdamW.

    Each given parameter group becomes up to two: `group["hidden"]` is True for the one of hidden matrices. With b the
    momentum of a group (`momentum_of`), g the gradient and m its running average:

        m <- b m + (1-b) g;    d = a m + (1-a) g,    a = b^(compensation + nesterov)

    and the direction is computed from d. `group["compensation"]` is a number of updates: set to the delay of the
    gradients, the total weight of a gradient stays 1 and its late part is applied at once. `group["keep_direction"]`
    keeps the direction of each step in the state, for `direction`.

    checks   by the names of options, of the optimizer and of groups; a subclass adds its own
    """

    checks: ClassVar[dict[str, Check]] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), _check_nonnegative),
        **dict.fromkeys(("nesterov", "capturable", "hidden"), check_flag),
        "betas": _check_betas,
    }
    adam_lr: float | None = None
    is_hidden: IsHidden = staticmethod(is_hidden_matrix)

    def __init__(
        self, parameters: Any, defaults: Group, *, hidden: IsHidden | None = None, adam_lr: float | None = None
    ) -> None:
        if adam_lr is not None:
            AT_LEAST_0(adam_lr, "adam_lr")
        self.adam_lr = adam_lr
        if hidden is not None:
            if not callable(hidden):
                raise UserError(f"hidden={hidden!r}: give a function (name, parameter) -> bool")
            self.is_hidden = hidden
        self._check(defaults)  # also of groups without parameters
        super().__init__(parameters, {**defaults, "compensation": 0.0, "keep_direction": False})
        # by group: the counts that were stepped last, and which are equal; kept, so that no other has their identity
        self._alike: dict[int, tuple[list[Tensor], list[list[int]]]] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add the hidden matrices of a group and its other parameters as a group each.

        With "hidden" in the group, all its parameters are hidden matrices or none is.
        """
        self._check(param_group)
        params = param_group["params"]
        listed = params if isinstance(params, set) else [params] if isinstance(params, Tensor) else list(params)
        pairs = [given if isinstance(given, tuple) else (None, given) for given in listed]
        if not pairs or isinstance(params, set) or not all(isinstance(p, Tensor) for _, p in pairs):
            super().add_param_group({"hidden": False, **param_group, "params": listed})  # raises where torch does
            return
        for hidden in (True, False):
            chosen = [(name, p) for name, p in pairs if self._is_hidden(name, p, param_group) == hidden]
            if not chosen:
                continue
            named = [p if name is None else (name, p) for name, p in chosen]
            options = {**param_group, "params": named, "hidden": hidden}
            if hidden:
                _check_matrices(chosen)
            else:
                options["nesterov"] = False
                options.setdefault("lr", self.defaults["lr"] if self.adam_lr is None else self.adam_lr)
            super().add_param_group(options)

    def _check(self, options: Group) -> None:
        """Raise UserError for options that are not allowed."""
        for name, value in options.items():
            if name in self.checks:
                self.checks[name](value, name)

    def _is_hidden(self, name: str | None, parameter: Tensor, group: Group) -> bool:
        return bool(group["hidden"] if "hidden" in group else self.is_hidden(name, parameter))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [
            (group, [p for p in group["params"] if p.grad is not None and p.numel()]) for group in self.param_groups
        ]
        given = sorted((pair for pair in given if pair[1]), key=lambda pair: bool(pair[0]["hidden"]))
        for _, parameters in given:
            _check_gradients(parameters)
        with branches(given[0][1][0].device if given else CPU) as aside:
            for group, parameters in given:
                directions = self.hidden_directions if group["hidden"] else self.adam_directions
                with nullcontext() if group["hidden"] else aside():
                    self._move(group, parameters, directions(group, parameters))
        return loss

    def direction(self, parameter: Tensor) -> Tensor | None:
        """The change of a parameter by its last step, without weight decay and divided by -lr.

        None before the first step with `group["keep_direction"]`.
        """
        found: Tensor | None = self.state.get(parameter, {}).get("direction")
        return found

    @abstractmethod
    def hidden_directions(self, group: Group, parameters: Tensors) -> Tensors:
        """The directions of hidden matrices, from their gradients; updates their state."""

    def momentum_of(self, group: Group) -> float:
        """The momentum b of a group."""
        return float(group["betas"][0])

    def averages(self, parameters: Tensors, name: str) -> list[Tensor]:
        """A running average of each parameter's shape, from the state, zero at first."""
        for p in parameters:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in parameters]

    def compensated(self, group: Group, parameters: Tensors) -> tuple[Tensors, float]:
        """d and a for each parameter, after the update of m. Do not write to d: it may be m."""
        gradients = gradients_of(parameters)
        m, b = self.averages(parameters, "exp_avg"), self.momentum_of(group)
        torch._foreach_lerp_(m, gradients, 1 - b)
        a = b ** (group["compensation"] + group["nesterov"])
        return (m if a == 1 else torch._foreach_lerp(gradients, m, a)), a

    def adam_directions(self, group: Group, parameters: Tensors) -> Tensors:
        """(d / (1 - a b^t)) / (sqrt(v / (1 - b2^t)) + eps), with v the running average of g^2.

        1 - a b^t is the total weight of the gradients in d after t updates.
        """
        b, b2 = self.momentum_of(group), group["betas"][1]
        d, a = self.compensated(group, parameters)
        gradients, v = gradients_of(parameters), self.averages(parameters, "exp_avg_sq")
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - b2)
        directions = list(d)
        for t, places in self.counted(group, parameters):
            chosen = [d[place] for place in places], [v[place] for place in places]
            found = scaled(*chosen, weight(a, b, t), weight(1.0, b2, t), group["eps"])
            for place, direction in zip(places, found, strict=True):
                directions[place] = direction
        return directions

    def counted(self, group: Group, parameters: Tensors) -> list[tuple[Any, list[int]]]:
        """Count a step: the numbers of steps of the parameters, each with the indices of those that have it.

        With capturable=True they are on the device, and parameters that are stepped together have the same: they are
        compared, which waits for the device, only when others are stepped than before.
        """
        for p in parameters:
            if "step" not in self.state[p]:
                device = p.device if group.get("capturable") else "cpu"
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)
        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1.0)
        if not group.get("capturable"):
            return [(float(steps[places[0]]), places) for places in _equal(steps)]
        before, _ = self._alike.get(id(group), ([], []))
        if len(before) != len(steps) or any(old is not new for old, new in zip(before, steps, strict=True)):
            self._alike[id(group)] = steps, _equal(steps)
        return [(steps[places[0]], places) for places in self._alike[id(group)][1]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and after a state was loaded: the numbers of steps are compared again."""
        super().__setstate__(state)
        self._alike = {}

    def _move(self, group: Group, parameters: Tensors, directions: Tensors) -> None:
        """theta <- theta - lr (direction + weight_decay theta)."""
        if group["keep_direction"]:
            torch._foreach_copy_(self.averages(parameters, "direction"), directions)
        lr = group["lr"] if group.get("capturable") else float(group["lr"])
        changes = directions
        if group["weight_decay"]:
            changes = torch._foreach_add(directions, parameters, alpha=group["weight_decay"])
        if isinstance(lr, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(changes, lr))
        else:
            torch._foreach_add_(parameters, changes, alpha=-lr)


def _check_matrices(chosen: Iterable[tuple[str | None, Tensor]]) -> None:
    for name, p in chosen:
        if p.ndim < 2:
            raise UserError(
                f"hidden= chooses {name or 'a parameter'} of shape {list(p.shape)}: choose matrices and convolution "
                "kernels, of at least two dimensions"
            )


def _check_gradients(parameters: Iterable[Tensor]) -> None:
    if any(g.is_sparse or g.is_complex() for g in gradients_of(parameters)):
        raise UserError("a gradient is sparse or complex: use torch.optim.SparseAdam or torch.optim.AdamW for it")


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _equal(scalars: Tensors) -> list[list[int]]:
    """The indices of those that are equal and on one device."""
    found: dict[Any, list[int]] = defaultdict(list)
    for place, scalar in enumerate(scalars):
        found[float(scalar), scalar.device].append(place)
    return list(found.values())


def scaled(d: Tensors, v: Tensors, weight_of_d: Any, weight_of_v: Any, eps: float) -> Tensors:
    """(d / weight) / (sqrt(v / weight) + eps) for each pair, the step of Adam with its corrections of bias."""
    divisors = torch._foreach_div(v, weight_of_v)
    torch._foreach_sqrt_(divisors)
    torch._foreach_add_(divisors, eps)
    torch._foreach_mul_(divisors, weight_of_d)
    return torch._foreach_div(d, divisors)


def weight(a: float, b: float, t: float | Tensor) -> Any:
    """1 - a b^t, on the device where t is."""
    return torch.rsub(b**t, 1.0, alpha=a) if isinstance(t, Tensor) else 1 - a * b**t
