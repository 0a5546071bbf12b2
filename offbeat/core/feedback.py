"""Where the backward of a stage starts when no gradient comes from above: at a loss, or at a synthetic gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.batch_guard import BatchGuard
from offbeat.core.descriptions import USER_CODE_ERRORS, batch_name, shapes
from offbeat.core.in_flight import InFlight
from offbeat.core.stage_network import Loss, StageNetwork
from offbeat.errors import NotFinite, UserError, first_line
from offbeat.method import Method
from offbeat.seeds import derive


class Feedback:
    """The loss of the last stage, the local loss of a head, or the gradients of a synthesiser.

    head       the auxiliary network of the stage; None where it learns from the stage above, or is the last
    teacher    the optimizer of a synthesiser, which learns apart from the stage
    lessons    outputs whose true gradient has not arrived yet, with their targets
    """

    def __init__(
        self, method: Method, network: StageNetwork, guard: BatchGuard, *, head: nn.Module | None, loss: Loss | None
    ) -> None:
        self.method, self.network, self.guard, self.head, self.loss = method, network, guard, head, loss
        self.synthesises = method.feedback == "synthesiser" and not network.last
        self.teacher = _teacher(head, method.head_lr)
        self.lessons: dict[int, tuple[Tensor, Any]] = {}

    def root(self, t: int, output: Any, target: Any, *, updates: int) -> Any:
        """What the backward of batch t starts from: the local loss, or the output itself."""
        if self.head is None:
            return output
        labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
        if not labels and getattr(self.head, "needs_labels", True):
            raise UserError(
                f"{self.method.name} trains every stage on class labels, but the targets of batch {t} are "
                f"{shapes(target)}: give a tensor of int64 class indices, or use a method with feedback from above"
            )
        if self.synthesises:
            self.lessons[t] = output.detach(), target
            return output
        try:
            with self.network.precision.computing():
                loss = self.head(output, target, self.loss)
        except USER_CODE_ERRORS as error:
            batch = batch_name(t, self.method.m)
            given = f"outputs of {shapes(output)} and targets of {shapes(target)}"
            raise UserError(
                f"the head of stage {self.network.k} cannot take {batch}, {given}: {first_line(error)}"
            ) from error
        self.guard.accepts_loss(t, loss.item(), updates=updates)
        return loss

    def gradients(self, t: int, batch: InFlight) -> list[Tensor | None]:
        """Gradients of the roots of batch t."""
        if self.guard.excludes(t):
            self.guard.skip(t)
            return [None for _ in batch.roots]
        if self.synthesises:
            return [self._synthetic(t)]
        scale = batch.share * (self.method.top if self.network.last else 1.0)
        return [torch.full_like(root, scale) for root in batch.roots]

    def _synthetic(self, t: int) -> Tensor:
        assert self.head is not None
        h, target = self.lessons[t]
        try:
            with torch.no_grad(), self.network.random.drawing(), self.network.precision.computing():
                gradient: Tensor = (self.head(h, target) / len(h)).to(h.dtype)
        except USER_CODE_ERRORS as error:
            raise UserError(
                f"the synthesiser of stage {self.network.k} cannot take batch {t} of {shapes(h)}: {first_line(error)}"
            ) from error
        return gradient

    def teach(self, t: int, gradients: list[Tensor | None]) -> None:
        """Train the synthesiser on the gradient that the stage above sends for batch t."""
        h, target = self.lessons.pop(t)
        if self.teacher is None or gradients[0] is None or self.guard.leaves_out(t):
            return
        assert self.head is not None
        self.teacher.zero_grad()
        with self.network.random.drawing(), self.network.precision.computing():
            lesson = self.head.lesson(h, target, gradients[0].to(h.device))  # type: ignore[operator]
        if math.isfinite(lesson.item()):
            lesson.backward()
            self.teacher.step()
        elif self.guard.on_nan == "stop":
            raise NotFinite(
                f"what batch {t} teaches the synthesiser of stage {self.network.k} of {self.network.K} is not "
                "finite: lower the learning rate, or look at this batch",
                [t],
            )

    def taught(self) -> list[Tensor]:
        """Parameters of the synthesiser that its own optimizer trains."""
        return [p for group in self.teacher.param_groups for p in group["params"]] if self.teacher else []


def _teacher(head: nn.Module | None, lr: float | None) -> torch.optim.Optimizer | None:
    trained = [] if head is None else [p for p in head.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=lr) if trained and lr is not None else None


def make_head(
    method: Method,
    k: int,
    *,
    output: tuple[tuple[int, ...], int] | None,
    like: nn.Module,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """The auxiliary network of stage k, for outputs of that shape and number of classes, from a random stream of its
    own, in the precision of the stage's module."""
    assert method.head is not None
    if output is None:
        raise UserError(f"{method.name} builds a head for each stage's output: give sample=, a batch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "head", k))
        head: nn.Module = method.head(*output)
    tensors = (t for t in (*like.parameters(), *like.buffers()) if t.is_floating_point())
    dtype = next((tensor.dtype for tensor in tensors), torch.float32)  # also of frozen ones
    return head.to(device=device, dtype=dtype)


def head_parameters(head: nn.Module, taken: Iterable[str]) -> dict[str, Tensor]:
    """The trained parameters of a head by name: "head.", or a longer prefix where the stage's module has such names.

    >>> list(head_parameters(nn.Linear(1, 1), ["weight"])), list(head_parameters(nn.Linear(1, 1), ["head.bias"]))
    (['head.weight', 'head.bias'], ['auxiliary_head.weight', 'auxiliary_head.bias'])
    """
    own = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    names, prefix = set(taken), "head."
    while any(prefix + name in names for name in own):
        prefix = f"auxiliary_{prefix}"
    return {prefix + name: parameter for name, parameter in own.items()}
