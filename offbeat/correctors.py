"""Correctors: what a lagged method may do against the age of its gradients.

Each is a frozen declaration that answers one of the questions a lagged method leaves open, and the few lines that carry
the answer out. Delay is counted in updates: lag / M, or 1 where forwards use the window before. A corrector that would
do nothing (horizon 0, lambda 0, beta 1, no delay) is left out of a stage altogether, so it changes no bit.

What a corrector remembers of a parameter lies in the memory of its place, one dict a parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offbeat.errors import UserError, number, unknown

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Sequence["Tensor"]


@dataclass
class StageContext:
    """The stage that correctors work in.

    delay    mean updates between a forward and the use of its gradient
    memory   is theirs, by parameter
    """

    k: int
    K: int
    delay: float
    optimizer: Any = None
    memory: defaultdict[Tensor, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class Corrector:
    """One answer. `answers` names the questions, of which two correctors of a method may not share one."""

    name: ClassVar[str]
    answers: ClassVar[tuple[str, ...]]
    reads_momentum: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("stash", "hybrid", "replay")  # backward weights it can work with
    recordable: ClassVar[bool] = True  # whether what it does to a step is the same tensor work every time

    def active(self, place: StageContext) -> bool:
        """Whether it does anything in this stage."""
        return True

    def unfit(self, lag: Callable[[int, int], int], M: int) -> str | None:
        """Why it cannot work on a method of that lag and M, or None."""
        return None

    def forward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        """Parameters for the next forwards ("forward weights")."""
        raise NotImplementedError

    def backward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        """Parameters for the next backward ("backward weights")."""
        raise NotImplementedError

    def incoming(self, gradient: Tensor) -> Tensor:
        """The gradient from above, as the stage will use it and pass it on ("incoming gradient")."""
        raise NotImplementedError

    def gradient(self, gradient: Tensor, parameter: Tensor, forwarded: Tensor, place: StageContext) -> Tensor:
        """The gradient of one batch for one parameter, whose forward ran on `forwarded` ("gradient")."""
        raise NotImplementedError

    def before_step(self, place: StageContext, s: int) -> Any:
        """Ahead of update s; the result goes to `after_step`."""

    def after_step(self, place: StageContext, kept: Any) -> None:
        """Behind the optimizer's step."""


def _from_zero(value: float) -> bool:
    return 0 <= value < float("inf")


def _trained(place: StageContext) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Parameters that the next step will change, each with its group."""
    for group in place.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def _along_momentum(parameters: Tensors, place: StageContext, horizon: float) -> list[Tensor]:
    """theta - horizon * lr * v, with SGD's momentum buffer v; theta where there is none yet."""
    rates = {id(parameter): group["lr"] for group in place.optimizer.param_groups for parameter in group["params"]}
    ahead = []
    for parameter in parameters:
        v = place.optimizer.state[parameter].get("momentum_buffer") if id(parameter) in rates else None
        theta = parameter.detach()
        ahead.append(theta.clone() if v is None else theta - horizon * rates[id(parameter)] * v)
    return ahead


@dataclass(frozen=True)
class WeightPrediction(Corrector):
    """LWP: forward at the weights expected when the gradient is applied.

    Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021). With T the delay unless given:
    form "velocity": theta - lr T v;  form "weight": theta^s + T (theta^s - theta^(s-1)). They differ beside other
    corrections of the step.
    """

    name: ClassVar[str] = "lwp"
    answers: ClassVar[tuple[str, ...]] = ("forward weights",)
    horizon: float | None = None
    form: Literal["velocity", "weight"] = "velocity"

    def __post_init__(self) -> None:
        if self.horizon is not None:
            number(self.horizon, "horizon of the weight prediction", "use a number of updates from 0 up", _from_zero)
        if self.form not in ("velocity", "weight"):
            raise unknown("form", str(self.form), ("velocity", "weight"))

    @property
    def reads_momentum(self) -> bool:  # type: ignore[override]
        return self.form == "velocity"

    def _T(self, place: StageContext) -> float:  # noqa: N802
        return place.delay if self.horizon is None else self.horizon

    def active(self, place: StageContext) -> bool:
        return self._T(place) != 0

    def forward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        if self.form == "velocity":
            return _along_momentum(parameters, place, self._T(place))
        ahead = []
        for parameter in parameters:
            step = place.memory[parameter].get("last_step")
            theta = parameter.detach()
            ahead.append(theta.clone() if step is None else theta + self._T(place) * step)
        return ahead

    def before_step(self, place: StageContext, s: int) -> Any:
        if self.form == "weight":
            return [(parameter, parameter.detach().clone()) for _, parameter in _trained(place)]
        return ()

    def after_step(self, place: StageContext, kept: Any) -> None:
        for parameter, before in kept:
            step, memory = parameter.detach() - before, place.memory[parameter]
            memory["last_step"] = memory["last_step"].copy_(step) if "last_step" in memory else step


@dataclass(frozen=True)
class Speculation(Corrector):
    """SpecTrain's prediction: weights of a common later moment, forward and (version 1) backward apart.

    Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (2018).
    theta - s lr v with s = floor(r/2) + K - r - 1 in the forward and floor(r/2) in the backward, r = k - 1; with
    stashed weights the backward uses those of its forward. These s count the updates of 1F1B, one a batch.
    """

    name: ClassVar[str] = "spec"
    answers: ClassVar[tuple[str, ...]] = ("forward weights", "backward weights")
    reads_momentum: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("hybrid", "stash")

    def unfit(self, lag: Callable[[int, int], int], M: int) -> str | None:
        if M == 1 and all(lag(k, K) == K - k for K in range(1, 5) for k in range(1, K + 1)):
            return None
        return "it counts the updates of 1F1B, one a batch: use lwp, which predicts over any delay"

    def forward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        r = place.k - 1
        return _along_momentum(parameters, place, r // 2 + place.K - r - 1)

    def backward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        return _along_momentum(parameters, place, (place.k - 1) // 2)


@dataclass(frozen=True)
class Discrepancy(Corrector):
    """T2 of PipeMare: backward at an estimate of the weights that the forward used.

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021). With tau the delay:
    delta <- gamma delta + (1 - gamma)(theta^(s+1) - theta^s), gamma = C^(1/tau); backward at theta - tau delta.
    """

    name: ClassVar[str] = "t2"
    answers: ClassVar[tuple[str, ...]] = ("backward weights",)
    needs: ClassVar[tuple[str, ...]] = ("hybrid",)
    C: float = 0.135

    def __post_init__(self) -> None:
        number(self.C, "C of the discrepancy correction", "use a number between 0 and 1", lambda C: 0 < C < 1)

    def active(self, place: StageContext) -> bool:
        return place.delay > 0

    def backward_weights(self, parameters: Tensors, place: StageContext) -> list[Tensor]:
        back = []
        for parameter in parameters:
            drift = place.memory[parameter].get("drift")
            theta = parameter.detach()
            back.append(theta.clone() if drift is None else theta - place.delay * drift)
        return back

    def before_step(self, place: StageContext, s: int) -> Any:
        return [(parameter, parameter.detach().clone()) for _, parameter in _trained(place)]

    def after_step(self, place: StageContext, kept: Any) -> None:
        gamma = self.C ** (1 / place.delay)
        for parameter, before in kept:
            step = (parameter.detach() - before).mul_(1 - gamma)
            memory = place.memory[parameter]
            memory["drift"] = memory["drift"].mul_(gamma).add_(step) if "drift" in memory else step


@dataclass(frozen=True)
class Shrink(Corrector):
    """Gradient shrinking of FDG: every stage but the last multiplies the incoming gradient by beta.

    What it passes on is scaled too, so stage k sees beta^(K-k). Weight decay is not scaled.
    """

    name: ClassVar[str] = "shrink"
    answers: ClassVar[tuple[str, ...]] = ("incoming gradient",)
    beta: float = 0.5

    def __post_init__(self) -> None:
        number(self.beta, "beta", "use a factor above 0 and at most 1", lambda beta: 0 < beta <= 1)

    def active(self, place: StageContext) -> bool:
        return self.beta != 1 and place.k < place.K

    def incoming(self, gradient: Tensor) -> Tensor:
        return gradient * self.beta


@dataclass(frozen=True)
class DelayCompensation(Corrector):
    """DC: a first-order guess of the gradient at today's weights, g + lambda g*g*(theta - theta_forward).

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017), eq. (10). Applied to
    each batch before the mean of a window; g is of the mean loss at the batch's size. adaptive: lambda divided by
    sqrt(MS + 1e-7), MS <- 0.95 MS + 0.05 g*g (their lambda is then about 2).
    """

    name: ClassVar[str] = "dc"
    answers: ClassVar[tuple[str, ...]] = ("gradient",)
    needs: ClassVar[tuple[str, ...]] = ("stash",)
    lambda_: float = 0.04
    adaptive: bool = False

    def __post_init__(self) -> None:
        number(self.lambda_, "lambda of the delay compensation", "use a number from 0 up", _from_zero)

    def active(self, place: StageContext) -> bool:
        return self.lambda_ != 0 and place.delay > 0

    def gradient(self, gradient: Tensor, parameter: Tensor, forwarded: Tensor, place: StageContext) -> Tensor:
        square = gradient * gradient
        factor: Any = self.lambda_
        if self.adaptive:
            memory = place.memory[parameter]
            if "mean_square" not in memory:
                memory["mean_square"] = square.new_zeros(square.shape)
            factor = self.lambda_ / memory["mean_square"].mul_(0.95).add_(square, alpha=0.05).add(1e-7).sqrt()
        return gradient + factor * square * (parameter.detach() - forwarded.detach())


@dataclass(frozen=True)
class Rescheduling(Corrector):
    """T1 of PipeMare: a smaller rate early on where the delay is long.

    lr_k(s) = lr(s) / max(tau, 1)^p, p = 1 - min(s / updates, 1), tau the delay.
    """

    name: ClassVar[str] = "t1"
    answers: ClassVar[tuple[str, ...]] = ("rate",)
    recordable: ClassVar[bool] = False  # its factor changes with s
    updates: int = 1000

    def __post_init__(self) -> None:
        number(self.updates, "updates of rescheduling", "use a whole number from 1 up", lambda n: n >= 1, whole=True)

    def active(self, place: StageContext) -> bool:
        return place.delay > 1

    def before_step(self, place: StageContext, s: int) -> Any:
        p = 1 - min(s / self.updates, 1)
        return _scaled_rates(place, max(place.delay, 1) ** -p)

    def after_step(self, place: StageContext, kept: Any) -> None:
        _restore(place, kept)


@dataclass(frozen=True)
class SpikeCompensation(Corrector):
    """SC: what a gradient would have contributed already, had it not been late by D updates.

    Kosson et al. (MLSys 2021): v <- m v + g; theta <- theta - lr (a v + b g), a = m^D, b = (1 - m^D)/(1 - m), so that
    the total weight of a gradient stays 1/(1-m). D = 1 is Nesterov, D = 0 plain; D is the delay unless given.
    """

    name: ClassVar[str] = "sc"
    answers: ClassVar[tuple[str, ...]] = ("step",)
    reads_momentum: ClassVar[bool] = True
    delay: float | None = None

    def __post_init__(self) -> None:
        if self.delay is not None:
            number(self.delay, "delay of the spike compensation", "use a number from 0 up", _from_zero)

    def _D(self, place: StageContext) -> float:  # noqa: N802
        return place.delay if self.delay is None else self.delay

    def active(self, place: StageContext) -> bool:
        return self._D(place) != 0

    def before_step(self, place: StageContext, s: int) -> Any:
        """The gradients as SGD will use them, with its weight decay."""
        return [
            (group, parameter, parameter.grad.add(parameter.detach(), alpha=group["weight_decay"]))
            for group, parameter in _trained(place)
            if parameter.grad is not None
        ]

    def after_step(self, place: StageContext, kept: Any) -> None:
        """SGD went by -lr v; add what is missing to -lr (a v + b g)."""
        import torch

        D = self._D(place)
        with torch.no_grad():
            for group, parameter, g in kept:
                m, lr = group["momentum"], group["lr"]
                a, b = m**D, (1 - m**D) / (1 - m)
                v = place.optimizer.state[parameter]["momentum_buffer"]
                if isinstance(lr, torch.Tensor):  # on a device, where it must stay
                    parameter.add_(v * (lr * (1 - a))).sub_(g * (lr * b))
                else:
                    parameter.add_(v, alpha=lr * (1 - a)).add_(g, alpha=-lr * b)


@dataclass(frozen=True)
class LookAhead(Corrector):
    """Nesterov's look-ahead with a momentum near 1, long enough to bridge the delay.

    Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (ICML 2025), for SGD:
    v <- gamma v + g; theta <- theta - lr (1-gamma)/(1-m) (g + gamma v), theta being stored at the look-ahead point and
    m the optimizer's own momentum, whose effective rate lr/(1-m) is kept.
    """

    name: ClassVar[str] = "nag"
    answers: ClassVar[tuple[str, ...]] = ("step",)
    reads_momentum: ClassVar[bool] = True
    gamma: float = 0.99

    def __post_init__(self) -> None:
        number(self.gamma, "gamma of the look-ahead", "use a number between 0 and 1", lambda gamma: 0 < gamma < 1)

    def before_step(self, place: StageContext, s: int) -> Any:
        own = [(group["momentum"], group["nesterov"]) for group in place.optimizer.param_groups]
        rates = [group["lr"] for group in place.optimizer.param_groups]
        for group, (m, _) in zip(place.optimizer.param_groups, own, strict=True):
            group.update(lr=group["lr"] * (1 - self.gamma) / (1 - m), momentum=self.gamma, nesterov=True)
        return rates, own

    def after_step(self, place: StageContext, kept: Any) -> None:
        rates, own = kept
        for group, (momentum, nesterov) in zip(place.optimizer.param_groups, own, strict=True):
            group.update(momentum=momentum, nesterov=nesterov)
        _restore(place, rates)


def _scaled_rates(place: StageContext, factor: float) -> list[Any]:
    rates = [group["lr"] for group in place.optimizer.param_groups]
    for group in place.optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return rates


def _restore(place: StageContext, rates: list[Any]) -> None:
    for group, rate in zip(place.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


ORDER = ("forward weights", "backward weights", "incoming gradient", "gradient", "rate", "step")  # rates before steps

CORRECTORS: dict[str, type[Corrector]] = {
    kind.name: kind
    for kind in (
        WeightPrediction,
        SpikeCompensation,
        DelayCompensation,
        Rescheduling,
        Discrepancy,
        LookAhead,
        Shrink,
        Speculation,
    )
}


Corrections = str | Corrector | Sequence[Corrector] | None


def correctors(given: Corrections) -> tuple[Corrector, ...]:
    """Correctors from objects or from text, in the order in which they act: "lwp+sc", "dc:0.1".

    >>> correctors("sc+t1:500")
    (Rescheduling(updates=500), SpikeCompensation(delay=None))
    """
    if given is None:
        return ()
    if isinstance(given, str):
        found = [_parse(part.strip(), given) for part in given.split("+")] if given.strip() else []
    else:
        found = list(given) if isinstance(given, Iterable) else [given]
    for corrector in found:
        if not isinstance(corrector, Corrector):
            raise UserError(f"corrector {corrector!r}: use offbeat.SpikeCompensation() and the like, or a name")
    for question in ORDER:
        same = [corrector.name for corrector in found if question in corrector.answers]
        if len(same) > 1:
            raise UserError(f"correctors {' and '.join(same)} both set the {question}: use one of them")
    return tuple(sorted(found, key=lambda corrector: ORDER.index(corrector.answers[0])))


def _parse(text: str, whole: str) -> Corrector:
    name, colon, value = text.partition(":")
    if not name:
        raise UserError(f"corrector {whole!r}: a name is missing, write it as in lwp+sc")
    if name not in CORRECTORS:
        raise unknown("corrector", name, CORRECTORS)
    kind = CORRECTORS[name]
    if not colon:
        return kind()
    if not fields(kind):
        raise UserError(f"corrector {text!r}: {name} takes no number")
    first = fields(kind)[0]
    number = int if first.type == "int" else float
    try:
        return kind(**{first.name: number(value)})
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"corrector {text!r}: behind the colon goes a number, the {first.name} of {name}") from None


__all__ = [
    "CORRECTORS",
    "Corrections",
    "Corrector",
    "DelayCompensation",
    "Discrepancy",
    "LookAhead",
    "Rescheduling",
    "Shrink",
    "Speculation",
    "SpikeCompensation",
    "StageContext",
    "WeightPrediction",
    "correctors",
]
