"""The stage: everything that changes while a network trains, and the three operations that change it."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.errors import NotFinite, UserError, first_line
from offbeat.method import Method
from offbeat.metrics import Meter, batch_size
from offbeat.stage.random import RandomStream
from offbeat.stage.weights import POLICIES, Live, Version, WeightPolicy, call
from offbeat.theory import versions_held

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class Staleness(Counter[int]):
    """Applied gradients by their level of staleness (in updates): whole windows, from when the stage is full."""

    @property
    def mean(self) -> float:
        """Mean level of staleness; 0 where nothing was counted yet.

        >>> Staleness({0: 1, 1: 3}).mean
        0.75
        """
        return sum(level * count for level, count in self.items()) / max(1, self.total())


@dataclass(frozen=True)
class Report:
    """What a stage tells about itself since its last report; loss and error only where the loss is."""

    k: int
    t: int
    updates: int
    samples: int
    in_flight: int
    versions: int
    lr: float | None
    loss: float | None
    error: float | None
    staleness: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class InFlight:
    """A batch between its forward and its backward."""

    inputs: list[Any]  # leaves of the input tree, gradients are taken to those that require them
    structure: pytree.TreeSpec
    target: Any
    version: Version
    update: int  # index of that version
    steady: bool  # forwarded when the stage was full, so that its staleness is the formula's
    random: list[Tensor]
    roots: list[Any] = field(default_factory=list)  # leaves of the output tree, or the loss


class Stage:
    """Stage k of K: forward, backward, update.

    `module` is the stage's part of the model and `prefix` what stands before its parameters' names in the whole;
    `loss` is given to the last stage alone.
    """

    def __init__(
        self,
        k: int,
        K: int,
        module: nn.Module,
        *,
        method: Method,
        optimizer: MakeOptimizer,
        loss: Loss | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        prefix: str = "",
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        self.k, self.K, self.module, self.loss = k, K, module, loss
        self.clip_norm = clip_norm
        self.device = device or torch.device("cpu")
        self.lag, self.M = method.lag(k, K), method.M
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        policy = POLICIES[method.weights] if self.lag else Live
        self.weights: WeightPolicy = policy(dict(self.parameters))
        self.most_versions = versions_held(self.lag, self.M)
        self.optimizer = optimizer([(prefix + n, p) for n, p in self.parameters.items()]) if self.parameters else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        if self.scheduler and "metrics" in inspect.signature(self.scheduler.step).parameters:
            name = type(self.scheduler).__name__
            raise UserError(f"scheduler {name} steps on a metric, which stages cannot share: use one that counts steps")
        self.random = RandomStream(seed, k, self.device)
        self.in_flight: dict[int, InFlight] = {}
        self.update_index = 0  # s: windows closed
        self.gradients = 0  # in the open window
        self.levels: list[int | None] = []  # their staleness; None for those from while the stage was filling
        self.samples = 0
        self.last_batch = -1
        self.staleness = Staleness()
        self.meter = Meter()
        self.changes_input: bool | None = None  # whether the module writes into its input; seen at the first forward

    # ---- forward

    def forward(self, t: int, x: Any, target: Any) -> Any:
        """Forward batch t on the newest weights; the output without its graph, or the loss at the last stage."""
        leaves, structure = pytree.tree_flatten(x)
        if self.k > 1:  # below the first stage nobody waits for a gradient
            leaves = [leaf.requires_grad_() if isinstance(leaf, Tensor) and differentiable(leaf) else leaf
                      for leaf in leaves]  # fmt: skip
        steady = len(self.in_flight) >= self.lag
        batch = InFlight(
            leaves, structure, target, self.weights.current(), self.update_index, steady, self.random.state
        )
        with self.random.drawing(), torch.set_grad_enabled(not self.weights.replays):
            output = self._run(t, batch)
        if not self.weights.replays:
            batch.roots = pytree.tree_leaves(output)
        self.in_flight[t] = batch
        self.samples += batch_size(x)
        self.last_batch = t
        assert len(self.in_flight) <= self.lag + 1, "more batches in flight than the lag allows"
        assert self.weights.versions() <= self.most_versions, "more weight versions than the window allows"
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    def _run(self, t: int, batch: InFlight, *, again: bool = False) -> Any:
        """The stage's part of the network on one batch, and at the last stage the loss."""
        leaves = batch.inputs
        copies = self.changes_input is not False  # also the first time, when it is not known yet
        if copies:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            before = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        x = pytree.tree_unflatten(leaves, batch.structure)
        try:
            output = call(self.module, batch.version.tensors, (x,), buffers=not again)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"stage {self.k} cannot take batch {t} of {shapes(x)}: {first_line(error)}") from error
        if self.changes_input is None:
            after = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
            self.changes_input = after != before
        return output if self.loss is None else self._loss(t, output, batch.target, again=again)

    def _loss(self, t: int, output: Any, target: Any, *, again: bool) -> Tensor:
        assert self.loss is not None
        try:
            loss = self.loss(output, target)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            given = f"outputs of {shapes(output)} and targets of {shapes(target)}"
            raise UserError(f"the loss cannot take batch {t}, {given}: {first_line(error)}") from error
        if loss.dim():
            raise UserError(f"the loss of batch {t} has shape {tuple(loss.shape)}: return the mean, a single number")
        if not again:
            value = loss.item()
            if value != value or value in (float("inf"), float("-inf")):
                raise NotFinite(
                    f"the loss of batch {t} is {value} (seen at stage {self.k} of {self.K}, after {self.update_index} "
                    "updates): lower the learning rate, or look at this batch"
                )
            self.meter.add(value, output, target)
        return loss

    # ---- backward

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Backward batch t; `gradients` belong to the leaves of its output (None at the last stage: the loss itself).

        Adds to the open window and returns the gradients of the leaves of the input.
        """
        batch = self.in_flight.pop(t)
        if self.weights.replays:
            with self.random.drawing(replay=batch.random):
                batch.roots = pytree.tree_leaves(self._run(t, batch, again=True))
        if gradients is None:
            gradients = [torch.ones_like(root) for root in batch.roots]
        pairs = [
            (root, gradient.to(root.device))
            for root, gradient in zip(batch.roots, gradients, strict=True)
            if isinstance(root, Tensor) and root.requires_grad and gradient is not None
        ]
        parameters = list((batch.version.tensors or self.parameters).values())
        wanted = [leaf for leaf in batch.inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        taken: list[Tensor | None] = [None] * (len(parameters) + len(wanted))
        if pairs and taken:
            roots, incoming = zip(*pairs, strict=True)
            taken = list(torch.autograd.grad(roots, [*parameters, *wanted], incoming, allow_unused=True))
        to_inputs = iter(taken[len(parameters) :])
        below = [
            next(to_inputs) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in batch.inputs
        ]
        self._accumulate(taken[: len(parameters)], foreign=[*below, *(pair[1] for pair in pairs)])
        self.levels.append(self.update_index - batch.update if batch.steady else None)
        return below

    def _accumulate(self, gradients: list[Tensor | None], foreign: list[Tensor | None]) -> None:
        """Add to the sum of the open window, which `.grad` of the parameters holds."""
        if self.optimizer and not self.gradients:
            # Not right after the step: with the gradients gone, malloc gives the memory of a whole graph back to the
            # system before the next forward takes it again, and page faults cost 7 % of the time (ResNet-56, b=64).
            self.optimizer.zero_grad(set_to_none=True)
        owners = {tensor.untyped_storage().data_ptr() for tensor in foreign if tensor is not None}
        sums, terms = [], []
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is not None:
                sums.append(parameter.grad)
                terms.append(gradient)
                continue
            storage = gradient.untyped_storage().data_ptr()
            shared = storage in owners or not torch.ops.aten.is_non_overlapping_and_dense(gradient)
            owners.add(storage)
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        if sums:
            torch._foreach_add_(sums, terms)
        self.gradients += 1

    # ---- update

    def update(self, over: int) -> None:
        """Apply the window: the sum of its gradients divided by `over`, at the learning rate of this update."""
        if len(self.levels) == self.M and None not in self.levels:
            self.staleness.update(level for level in self.levels if level is not None)
        self.levels.clear()
        self.update_index += 1
        if self.gradients and self.optimizer:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            if over > 1 and gradients:
                torch._foreach_div_(gradients, over)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm)
            self.optimizer.step()
            self.weights.changed()
        if self.scheduler:
            with warnings.catch_warnings():  # an empty window moves the schedule, not the weights
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
                self.scheduler.step()
        self.gradients = 0

    # ---- what it tells

    def evaluate(self, x: Any) -> Any:
        """The output on the newest weights in evaluation mode; training state stays as it is."""
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            with torch.no_grad():
                return self.module(x)
        finally:
            for module in training:
                module.training = True

    def report(self) -> Report:
        """Figures since the last report."""
        seen = self.meter.read() if self.loss else {"loss": None, "error": None}
        samples, self.samples = self.samples, 0
        self.meter.empty()
        return Report(
            k=self.k,
            t=self.last_batch,
            updates=self.update_index,
            samples=samples,
            in_flight=len(self.in_flight),
            versions=self.weights.versions(),
            lr=self.optimizer.param_groups[0]["lr"] if self.optimizer else None,
            loss=seen["loss"],
            error=seen["error"],
            staleness=dict(self.staleness),
        )


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def shapes(content: Any) -> str:
    """Shapes and types of the tensors in a pytree, for messages."""
    found = [f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
             for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor)]  # fmt: skip
    return "shape " + ", ".join(found) if found else type(content).__name__

