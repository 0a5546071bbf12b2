"""What correctors need of an optimizer: one rule per class of optimizers, found by `rule_of`.

A corrector names its needs, and works with the optimizers whose rule provides all of them:

    "direction"      the direction of a step per unit of the learning rate, from the optimizer's own state
    "compensation"   a step in which each gradient counts as if it had arrived D updates earlier (spike compensation)
    "nesterov"       a step of Nesterov's method with another momentum

`RULES` has the optimizers of torch. Any other optimizer can implement `SelfCompensating`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Need = Literal["direction", "compensation", "nesterov"]
Group = dict[str, Any]
Scalar = Any  # a float, or a tensor with one element on the device, which is not copied to the host


class SelfCompensating(Protocol):
    """An optimizer that correctors work with and that needs no rule here.

    Every parameter group has these entries, for example as defaults of the optimizer:

        "compensation"     updates D: the step uses d = a m + (1-a) g, with m <- b m + (1-b) g and a = b^D, where the
                           optimizer with "compensation" 0 uses m; with Nesterov's method a = b^(D+1) instead of b
        "keep_direction"   whether `direction` is needed; a corrector sets it when the stage is built
        "momentum", "nesterov"   only if corrector `nag` is to work: b, and whether to use Nesterov's method

    A corrector sets "compensation" before a step and restores it after the step.
    """

    param_groups: list[Group]

    def direction(self, parameter: Tensor) -> Tensor | None:
        """The direction of the last step per unit of the learning rate, without decoupled weight decay: the parameter
        moved by -lr times this. None before the first step. Always the same tensor, changed in place."""


class OptimizerRule:
    """What correctors can do with the optimizer of one stage.

    provides   the needs that it meets
    condition  which optimizers of its class it covers, in words; empty if it covers all
    between    options that must lie between two numbers
    """

    provides: ClassVar[tuple[Need, ...]] = ()
    condition: ClassVar[str] = ""
    between: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def meets(self, need: Need) -> bool:
        """Whether it meets the need for this optimizer."""
        return need in self.provides

    @classmethod
    def outside(cls, options: Mapping[str, Any]) -> list[str]:
        """The options that do not lie between the numbers that are declared.

        >>> SGDRule.outside({"momentum": 0.0}), SGDRule.outside({"momentum": 0.9})
        (['momentum'], [])
        """
        return [name for name, (least, most) in cls.between.items() if not least < options[name] < most]

    def unsupported_options(self) -> str | None:
        """The options of the optimizer that the rule does not cover, and which to use; None if it covers all."""
        return None

    def prepare(self, needs: Iterable[Need]) -> None:
        """Called when the stage is built, with all that its correctors, and those that follow a warm-up, need."""

    def before_step(self) -> None:
        """Called before each step."""

    def directions(self, group: Group, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The direction for each of these parameters of the group; None for one that has not been stepped."""
        raise NotImplementedError

    def before_compensated_step(self, D: float) -> Any:
        """Called before a step that is compensated over D updates; the result is passed to the next method."""
        raise NotImplementedError

    def after_compensated_step(self, D: float, kept: Any) -> None:
        """Called after that step."""
        raise NotImplementedError

    def nesterov_options(self, group: Group, gamma: float) -> Group:
        """The options of the group for a step of Nesterov's method with momentum gamma."""
        raise NotImplementedError


class SGDRule(OptimizerRule):
    """v <- m v + g. Compensated: theta <- theta - lr (a v + b g), a = m^D, b = (1 - m^D)/(1 - m)."""

    provides = ("direction", "compensation", "nesterov")
    condition = "with momentum"
    between: ClassVar[Mapping[str, tuple[float, float]]] = {"momentum": (0.0, 1.0)}

    def unsupported_options(self) -> str | None:
        for group in self.optimizer.param_groups:
            others = group["dampening"] or group["nesterov"] or group["maximize"]
            if others or self.outside(group):
                options = ("momentum", "dampening", "nesterov", "maximize")
                given = ", ".join(f"{name}={group[name]}" for name in options)
                return f"{given}: use a momentum between 0 and 1, and neither dampening, nesterov nor maximize"
        return None

    def directions(self, group: Group, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        return [self.optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]

    def before_compensated_step(self, D: float) -> Any:
        return [(*each, _with_decay(*each)) for each in updated_groups(self.optimizer)]

    def after_compensated_step(self, D: float, kept: Any) -> None:
        """The step of SGD was -lr v; add the difference to -lr (a v + b g)."""
        import torch

        for group, parameters, gradients in kept:
            m, lr = group["momentum"], group["lr"]
            a, b = m**D, (1 - m**D) / (1 - m)
            velocities = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
            if isinstance(lr, torch.Tensor):
                torch._foreach_add_(parameters, scaled(velocities, lr * (1 - a)))
                torch._foreach_sub_(parameters, scaled(gradients, lr * b))
            else:
                torch._foreach_add_(parameters, velocities, alpha=lr * (1 - a))
                torch._foreach_add_(parameters, gradients, alpha=-lr * b)

    def nesterov_options(self, group: Group, gamma: float) -> Group:
        """Its velocity is a sum: the rate changes so that the total weight of a gradient, lr/(1-m), does not."""
        lr = group["lr"] * (1 - gamma) / (1 - group["momentum"])
        return {"lr": lr, "momentum": gamma, "nesterov": True}


class AdamRule(OptimizerRule):
    """m <- b1 m + (1-b1) g, v <- b2 v + (1-b2) g*g; theta <- theta - lr m_hat / (sqrt(v_hat) + eps) in update t.

    Compensated, with a = b1^D: (a m + (1-a) g) / c_t instead of m_hat = m / (1 - b1^t), where
    c_t = a (1 - b1^t) + 1 - a, so that the weights of all gradients have the sum 1.
    """

    provides: ClassVar[tuple[Need, ...]] = ("direction", "compensation")

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.stepped: list[Tensor] = []  # what the last step changed
        self.alike: dict[tuple[int, ...], tuple[list[Tensor], list[list[int]]]] = {}

    def unsupported_options(self) -> str | None:
        for group in self.optimizer.param_groups:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    return f"{option}=True: use {option}=False"
        return None

    def before_step(self) -> None:
        """Parameters that are stepped together keep their numbers of updates alike; after other steps, compare."""
        stepped = [parameter for _, parameters in updated_groups(self.optimizer) for parameter in parameters]
        if stepped and (len(stepped) != len(self.stepped) or any(map(_other, stepped, self.stepped))):
            self.stepped = stepped
            self.alike.clear()

    def _by_update(self, parameters: Sequence[Tensor]) -> list[tuple[Scalar, list[Tensor]]]:
        """The parameters in lists of those with the same number of updates t, which is read from the device only if
        other parameters were stepped than before."""
        steps = [self.optimizer.state[parameter]["step"] for parameter in parameters]
        if all(step.device.type == "cpu" for step in steps):
            by_number = _positions([float(step) for step in steps])
            return [(t, [parameters[at] for at in where]) for t, where in by_number.items()]
        key = tuple(map(id, steps))
        if key not in self.alike:
            self.alike[key] = steps, list(_positions([float(step) for step in steps]).values())
        return [(steps[where[0]], [parameters[at] for at in where]) for where in self.alike[key][1]]

    def _moments(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        states = [self.optimizer.state[parameter] for parameter in parameters]
        return as_real([state["exp_avg"] for state in states]), as_real([state["exp_avg_sq"] for state in states])

    def directions(self, group: Group, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        import torch

        found: dict[int, Tensor] = {}
        for t, alike in self._by_update([p for p in parameters if self.optimizer.state.get(p)]):
            first, second = self._moments(alike)
            divisors = _denominators(second, group, t)
            torch._foreach_mul_(divisors, 1 - group["betas"][0] ** t)
            values = torch._foreach_div(first, divisors)
            found.update(zip(map(id, alike), as_given(values, alike), strict=True))
        return [found.get(id(parameter)) for parameter in parameters]

    def before_compensated_step(self, D: float) -> Any:
        return [
            (group, parameters, _gradients(parameters) if self._decoupled(group) else _with_decay(group, parameters))
            for group, parameters in updated_groups(self.optimizer)
        ]

    def _decoupled(self, group: Group) -> bool:
        """Whether weight decay is a part of the step and not of the gradient."""
        default = any(kind.__name__ == "AdamW" for kind in type(self.optimizer).__mro__)
        return bool(group.get("decoupled_weight_decay", default))

    def after_compensated_step(self, D: float, kept: Any) -> None:
        """Add the difference to the step that was made."""
        import torch

        for group, parameters, gradients in kept:
            gradient_of = dict(zip(map(id, parameters), as_real(gradients), strict=True))
            for t, alike in self._by_update(parameters):
                first, second = self._moments(alike)
                of_m, of_g = self._differences(group, alike, t, D)
                change = scaled(first, of_m)
                torch._foreach_add_(change, scaled([gradient_of[id(parameter)] for parameter in alike], of_g))
                torch._foreach_div_(change, _denominators(second, group, t))
                torch._foreach_sub_(as_real(alike), scaled(change, group["lr"]))

    def _differences(self, group: Group, parameters: list[Tensor], t: Scalar, D: float) -> tuple[Scalar, Scalar]:
        """By how much the weights of m and g in the compensated step differ from those in the optimizer's own."""
        b, a = group["betas"][0], group["betas"][0] ** D
        c = a * (1 - b**t) + 1 - a
        return a / c - 1 / (1 - b**t), (1 - a) / c


class NAdamRule(AdamRule):
    """The numerator of NAdam, (1 - mu_t) g / (1 - P_t) + mu_(t+1) m / (1 - P_(t+1)) with P_t = mu_1 ... mu_t.

    Compensated: the weights 1 - mu_t^(1+D) of g and mu_(t+1)^(1+D) of m instead; D = 0 is NAdam itself.
    """

    provides = ("direction", "compensation", "nesterov")

    def _differences(self, group: Group, parameters: list[Tensor], t: Scalar, D: float) -> tuple[Scalar, Scalar]:
        mu, following = (
            group["betas"][0] * (1 - 0.5 * 0.96 ** (number * group["momentum_decay"])) for number in (t, t + 1)
        )
        product = self.optimizer.state[parameters[0]]["mu_product"]
        P = float(product) if product.device.type == "cpu" else product
        of_m = (following ** (1 + D) - following) / (1 - P * following)
        return of_m, (mu - mu ** (1 + D)) / (1 - P)

    def nesterov_options(self, group: Group, gamma: float) -> Group:
        return {"betas": (gamma, group["betas"][1])}


class SelfCompensatingRule(OptimizerRule):
    """Leaves all to an optimizer that is `SelfCompensating`."""

    provides = ("direction", "compensation", "nesterov")

    keeps_directions = False

    def meets(self, need: Need) -> bool:
        return need != "nesterov" or all({"momentum", "nesterov"} <= g.keys() for g in self.optimizer.param_groups)

    def prepare(self, needs: Iterable[Need]) -> None:
        self.keeps_directions = "direction" in needs
        self.before_step()

    def before_step(self) -> None:
        """A checkpoint may have been saved without directions."""
        if self.keeps_directions:
            for group in self.optimizer.param_groups:
                group["keep_direction"] = True

    def directions(self, group: Group, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        return [self.optimizer.direction(parameter) for parameter in parameters]  # type: ignore[attr-defined]

    def before_compensated_step(self, D: float) -> Any:
        own = [group["compensation"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["compensation"] = D
        return own

    def after_compensated_step(self, D: float, kept: Any) -> None:
        for group, own in zip(self.optimizer.param_groups, kept, strict=True):
            group["compensation"] = own

    def nesterov_options(self, group: Group, gamma: float) -> Group:
        return {"momentum": gamma, "nesterov": True}


RULES: dict[str, type[OptimizerRule]] = {  # by the name of the class in torch.optim
    "SGD": SGDRule,
    "Adam": AdamRule,
    "AdamW": AdamRule,
    "NAdam": NAdamRule,
}


def rule_of(optimizer: Optimizer) -> OptimizerRule | None:
    """The rule of an optimizer's class or of the nearest class that it is derived from; None if there is none."""
    if callable(getattr(optimizer, "direction", None)) and all("compensation" in g for g in optimizer.param_groups):
        return SelfCompensatingRule(optimizer)
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in RULES:
            return RULES[kind.__name__](optimizer)
    return None


def why_not(needs: Iterable[Need], optimizer: Optimizer, rule: OptimizerRule | None) -> str | None:
    """Why a corrector with these needs does not work with the optimizer, and what to use; None if it works."""
    name = _public_name(type(optimizer))
    for need in needs:
        if rule is None or not rule.meets(need):
            return f"optimizer {name}: use {usable_with(need)}"
        options = rule.unsupported_options()
        if options:
            return f"optimizer {name} with {options}"
    return None


def usable_with(need: Need) -> str:
    """The optimizers that meet the need, in words."""
    *names, last = [name for name, rule in RULES.items() if need in rule.provides]
    return (
        f"{', '.join(names)} or {last} of torch.optim, offbeat.optim.Muon, or another that implements "
        "offbeat.correctors.SelfCompensating"
    )


def _public_name(kind: type) -> str:
    """The name of an optimizer's class; in torch and here, which both have a Muon, with its package."""
    packages = [package for package in ("torch.optim", "offbeat.optim") if kind.__module__.startswith(package)]
    return ".".join([*packages, kind.__name__])


# ---- lists of tensors


def updated_groups(optimizer: Any) -> list[tuple[Group, list[Tensor]]]:
    """The parameters that the next step will change, by parameter group; groups without any are left out."""
    groups = ((group, [p for p in group["params"] if p.grad is not None]) for group in optimizer.param_groups)
    return [(group, parameters) for group, parameters in groups if parameters]


def scaled(tensors: Sequence[Tensor], factor: Scalar) -> list[Tensor]:
    """New tensors, each multiplied by the factor."""
    import torch

    if isinstance(factor, torch.Tensor) and factor.device != tensors[0].device:
        factor = float(factor)  # from the CPU
    return list(torch._foreach_mul(list(tensors), factor))


def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with views of complex ones as pairs of real numbers, which torch's optimizers step one by one."""
    import torch

    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def as_given(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values, with complex ones where the tensors are complex."""
    import torch

    pairs = zip(values, tensors, strict=True)
    return [torch.view_as_complex(value) if tensor.is_complex() else value for value, tensor in pairs]


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, without autograd."""
    import torch

    copies = [torch.empty_like(tensor) for tensor in (each.detach() for each in tensors)]
    if copies:
        torch._foreach_copy_(copies, [tensor.detach() for tensor in tensors])
    return copies


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _with_decay(group: Group, parameters: list[Tensor]) -> list[Tensor]:
    """g + weight_decay theta, the gradient as SGD and Adam use it."""
    import torch

    gradients = _gradients(parameters)
    if not group["weight_decay"]:
        return gradients
    values = [parameter.detach() for parameter in parameters]
    return list(torch._foreach_add(gradients, values, alpha=group["weight_decay"]))


def _denominators(second: list[Tensor], group: Group, t: Scalar) -> list[Tensor]:
    """sqrt(v / (1 - b2^t)) + eps."""
    import torch

    found = torch._foreach_div(second, 1 - group["betas"][1] ** t)
    torch._foreach_sqrt_(found)
    torch._foreach_add_(found, group["eps"])
    return list(found)


def _positions(values: Sequence[float]) -> dict[float, list[int]]:
    """Where each value is in the list."""
    found: dict[float, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found


def _other(one: object, another: object) -> bool:
    return one is not another
