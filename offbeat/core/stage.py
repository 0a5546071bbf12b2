"""The stage: everything that changes while a network trains, and the three operations that change it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.compiled import Compiled
from offbeat.core.corrections import Corrections
from offbeat.core.deferred_statistics import DeferredStatistics
from offbeat.core.fused import Fused
from offbeat.core.lazy_copy import lazy_copy
from offbeat.core.memory import Saved, size
from offbeat.core.metrics import Meter, batch_size
from offbeat.core.precision import FULL, PrecisionPolicy
from offbeat.core.random_stream import RandomStream
from offbeat.core.stage_report import Report, Staleness
from offbeat.core.weights import Version, WeightPolicy, WeightSources, call, make_policy, substituted
from offbeat.core.window import Window
from offbeat.errors import NotFinite, UserError, first_line
from offbeat.kernels import batch_norm as norms
from offbeat.method import Method
from offbeat.seeds import derive

Loss = Callable[[Any, Any], Tensor]
OnNan = Literal["stop", "skip"]
Weighting = Literal["batches", "samples"]
MakeOptimizer = Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
USERS_CODE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)  # what a model may raise


@dataclass
class InFlight:
    """A batch between its forward and its backward."""

    inputs: list[Any]  # leaves of the input tree; gradients are taken to those that require them
    structure: pytree.TreeSpec
    target: Any
    version: Version
    update: int  # index of that version
    steady: bool  # forwarded when the stage was full, so that its staleness is the formula's
    random: list[Tensor]
    share: float = 1.0  # of its batch's samples, for a micro-batch
    kept: Version | None = None  # what the forward used, where the policy itself forgets it
    weight: float = 1.0  # of its gradient in the mean of a window
    roots: list[Any] = field(default_factory=list)  # leaves of the output tree, or the loss


class Stage:
    """Stage k of K: forward, backward, update.

    `module` is the stage's part of the model, under the names of the whole. `loss` is given to the last stage, and to
    all that learn from a local loss; `output` is the shape of one sample's output and the number of classes, for stages
    that have a head of their own. `on_nan` says what a loss or gradient that is not finite does; the gradients of the
    batches `left_out` are not used. `numbers` are those that it computes with; `compile` has torch.compile do it, and
    `fuse` joins BatchNorm with what follows it.
    """

    retains = False  # whether graphs are kept after their backward
    recording = False  # whether its work is recorded, on inputs in a fixed place

    def __init__(
        self,
        k: int,
        K: int,
        module: nn.Module,
        *,
        method: Method,
        optimizer: MakeOptimizer,
        loss: Loss | None = None,
        output: tuple[tuple[int, ...], int] | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        device: torch.device | None = None,
        seed: int = 0,
        on_nan: OnNan = "stop",
        left_out: Iterable[int] = (),
        numbers: PrecisionPolicy = FULL,
        compile: bool = False,
        fuse: bool = False,
        weighting: Weighting = "batches",
    ) -> None:
        self.on_nan, self.left_out = on_nan, frozenset(left_out)
        self.weighting = weighting
        self.full_batch: int | None = None  # samples of the first batch, against which others are weighed
        self.bad: set[int] = set()  # batches whose loss is not finite
        self.skipped = 0
        self.k, self.K, self.module, self.method = k, K, module, method
        self.last = k == K
        self.clip_norm = clip_norm
        self.device = device or torch.device("cpu")
        self.numbers = numbers
        self.loss = None if loss is None else self.numbers.in_full(loss)
        self.lag, self.M = method.lag(k, K), method.M
        self.parameters: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.head = self._make_head(method, output, seed) if method.head and not self.last else None
        own = dict(self.parameters)
        if self.head is not None and method.head_lr is None:
            self.parameters |= {f"head.{name}": p for name, p in self.head.named_parameters() if p.requires_grad}
        self.teacher = self._make_teacher(method.head_lr)
        self.optimizer = self._make_optimizer(optimizer) if self.parameters else None
        self.scheduler = _checked_scheduler(scheduler(self.optimizer)) if scheduler and self.optimizer else None
        self.corrections = Corrections(method, k, K, self.optimizer)
        sources = WeightSources(
            own,
            self.corrections.forward_weights(own),
            self.corrections.backward_weights(own),
            method.forward_version if method.forward == "before" else None,
            self.numbers,
        )
        self.in_flight = in_flight = dict[int, InFlight]()
        self.weights: WeightPolicy = make_policy(
            method.weights,
            sources,
            lag=self.lag,
            replays=method.replays(k, K),
            in_flight=lambda: [batch.version for batch in in_flight.values()],
        )
        self.most_versions, self.most_in_flight = method.versions(k, K), method.held(k, K)
        self.deferred = DeferredStatistics(module) if method.m > 1 else None
        self._call = self._compiled() if compile else self._fused() if fuse else partial(call, module)
        self.random = RandomStream(self.device, seed, "stage", k)
        self.evaluation_random = RandomStream(self.device, seed, "evaluation", k)
        self.lessons: dict[int, tuple[Tensor, Any]] = {}  # outputs whose true gradient has not been reported yet
        self.held_bytes: int | None = None  # for one batch in flight
        self.keeping = False
        self.writes_input: bool | None = None  # in place; known once its forward is recorded
        self.most_held = 0  # batches in flight at once, so far
        self.newest_used = 0
        self.window = Window(self.parameters)
        self.update_index = 0  # s: windows closed
        self.samples = 0
        self.last_batch = -1
        self.staleness = Staleness()
        self.meter = Meter()
        self.backwards = 0

    def _make_head(self, method: Method, output: tuple[tuple[int, ...], int] | None, seed: int) -> nn.Module:
        """The auxiliary network of this stage, from its own random stream, in the precision of the stage."""
        assert method.head is not None
        if output is None:
            raise UserError(f"{method.name} builds a head for each stage's output: give sample=, a batch")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "head", self.k))
            head: nn.Module = method.head(*output)
        tensors = (t for t in (*self.module.parameters(), *self.module.buffers()) if t.is_floating_point())
        dtype = next((tensor.dtype for tensor in tensors), torch.float32)  # also of frozen ones
        return head.to(device=self.device, dtype=dtype)

    def _make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        return _rates_on_device(_checked_optimizer(make(list(self.parameters.items())), self.parameters), self.device)

    def _make_teacher(self, lr: float | None) -> torch.optim.Optimizer | None:
        trained = [p for p in self.head.parameters() if p.requires_grad] if self.head is not None else []
        return torch.optim.Adam(trained, lr=lr) if trained and lr is not None else None

    def _compiled(self) -> Callable[..., Any]:
        why = None
        if self.weights.forgets:
            why = "hybrid weights need the activations of the forward, some of which a compiled backward computes again"
        elif self.deferred and self.deferred.layers:
            why = "its BatchNorm sums up micro-batches, outside of the graph"
        return Compiled(self.k, self.module, refused=why)

    def _fused(self) -> Callable[..., Any]:
        why = None
        if self.deferred and self.deferred.layers:
            why = "its BatchNorm sums up micro-batches"
        elif self.device.type == "cuda" and not self.numbers.channels_last:
            why = "in fp32 images do not lie channels-last (precision tf32 or bf16 has them so)"
        elif self.device.type == "cuda" and not norms.available():
            why = "triton, which makes the kernels, cannot be imported"
        return Fused(self.k, self.module, refused=why)

    # ---- forward

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        """Forward batch t on the weights that the method says; the output without its graph, or the loss at the last
        stage. `share` is that of a micro-batch in its batch: its weight in the gradient."""
        steady = self._full()
        return self._forward(t, x, target, share, steady, self.weights.current())

    def _full(self) -> bool:
        """Whether the next forward is one of steady state, so that its staleness is the formula's."""
        return self.method.full(self.k, self.K, in_flight=len(self.in_flight), forwards=self.weights.forwards)

    def _forward(self, t: int, x: Any, target: Any, share: float, steady: bool, version: Version) -> Any:
        leaves, structure = pytree.tree_flatten(self._entering(x))
        leaves = self.wanting(leaves)
        batch = InFlight(
            leaves,
            structure,
            self._here(target),
            version,
            self.update_index - version.age,
            steady,
            self.random.state,
            share,
            self.weights.remember() if self.keeping else None,
        )
        with self.random.drawing(), torch.set_grad_enabled(not self.weights.replays), self._watched(t, version, leaves):
            output = self._run(t, batch, version)
            root = self._local_loss(t, output, batch.target) if self.head is not None else output
        if not self.weights.replays:
            batch.roots = pytree.tree_leaves(root)
        self._forwarded(t, batch, batch_size(target, x))
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    def _forwarded(self, t: int, batch: InFlight, samples: int) -> None:
        """Batch t is in flight from now on."""
        self.in_flight[t] = batch
        self.full_batch = self.full_batch or samples
        batch.weight = self._weight(samples)
        self.samples += samples
        self.last_batch = t
        if len(self.in_flight) > self.most_held:
            self.most_held = len(self.in_flight)
            assert self.most_held <= self.most_in_flight, "more batches in flight than the lag allows"
        if id(batch.version) != self.newest_used:
            self.newest_used = id(batch.version)  # not the version itself, which would live on
            assert self.weights.versions() <= self.most_versions, "more weight versions than the window allows"

    def _weight(self, samples: int) -> float:
        """Of the gradient of a batch of so many samples in the mean of a window. A micro-batch has its share already,
        and the mean of one gradient needs no weights."""
        if self.weighting == "batches" or self.M == 1 or not self.full_batch:
            return 1.0
        return samples / self.full_batch

    def wanting(self, leaves: list[Any]) -> list[Any]:
        """Leaves of an input, marked where the stage below waits for their gradients."""
        if self.k == 1 or self.method.feedback == "local":
            return leaves
        return [leaf.requires_grad_() if differentiable(leaf) else leaf for leaf in leaves]

    def keep(self, wanted: bool = True) -> None:
        """From now on remember the weights of every forward, so that the batches in flight can be saved."""
        self.keeping = wanted
        if not wanted:
            self.weights.forget()
            for batch in self.in_flight.values():
                batch.kept = None

    @contextmanager
    def _watched(self, t: int, version: Version, inputs: list[Any]) -> Iterator[None]:
        """Around a forward: the first one is measured, micro-batches leave BatchNorm's statistics to the update."""
        with ExitStack() as stack:
            if self.deferred and not self._left_out(t):
                stack.enter_context(self.deferred.collecting())
            if self.held_bytes is None:
                own = [*self.module.parameters(), *self.module.buffers(), *self.parameters.values()]
                saved = Saved([*own, *(version.tensors or {}).values()])
                stack.enter_context(saved.watching())
            yield
        if self.held_bytes is None:
            self.held_bytes = max(saved.bytes, size(inputs))

    def _run(self, t: int, batch: InFlight, version: Version, *, again: bool = False) -> Any:
        """The stage's part of the network on one batch, and at the last stage the loss."""
        leaves = batch.inputs
        if not self.recording or self.writes_input is not False:
            # The module may write its input in place, but a replay, or the forward after a checkpoint, needs it as it
            # was. A recording cannot wait for the first write.
            copy = Tensor.clone if self.recording else lazy_copy
            leaves = [copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)] if self.recording else []
        x = pytree.tree_unflatten(leaves, batch.structure)
        counted = not again and not self._left_out(t)
        before = [b.clone() for b in self.module.buffers()] if counted and self.on_nan == "skip" else []
        seen = dict(self.deferred.seen) if self.deferred else {}
        try:
            with self.numbers.computing():
                output = self._call(version.tensors, (x,), buffers=counted)
        except USERS_CODE as error:
            given = f"{self._batch(t)} of {_shapes(x)}"
            raise UserError(f"stage {self.k} cannot take {given}: {first_line(error)}") from error
        if self.recording:
            written = versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
            if written and self.writes_input is False:
                raise UserError(f"stage {self.k} writes its input in place in some forwards, not in all")
            self.writes_input = written if self.writes_input is None else self.writes_input
        if before and not _finite(output):  # such a batch leaves no trace in BatchNorm's statistics
            for buffer, old in zip(self.module.buffers(), before, strict=True):
                buffer.data.copy_(old)  # its graphs may hold it
            if self.deferred:
                self.deferred.seen = seen
        return self._loss(t, self.numbers.scoring(output), batch.target, again=again) if self.last else output

    def _local_loss(self, t: int, output: Any, target: Any) -> Any:
        """What a stage with a head backwards from: its local loss, or the output that gets a synthetic gradient."""
        assert self.head is not None
        labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
        if not labels and getattr(self.head, "needs_labels", True):
            raise UserError(
                f"{self.method.name} trains every stage on class labels, but the targets of batch {t} are "
                f"{_shapes(target)}: give a tensor of int64 class indices, or use a method with feedback from above"
            )
        if self.method.feedback == "synthesiser":
            self.lessons[t] = output.detach(), target
            return output
        try:
            with self.numbers.computing():
                loss = self.head(output, target, self.loss)
        except USERS_CODE as error:
            given = f"outputs of {_shapes(output)} and targets of {_shapes(target)}"
            raise UserError(
                f"the head of stage {self.k} cannot take {self._batch(t)}, {given}: {first_line(error)}"
            ) from error
        self._sound(t, loss.item())
        return loss

    def _left_out(self, t: int) -> bool:
        """Whether batch t gives no gradient, and leaves no trace in BatchNorm's statistics."""
        return t // self.method.m in self.left_out

    def _batch(self, t: int) -> str:
        """What t is called, where operations index micro-batches."""
        m = self.method.m
        return f"batch {t}" if m == 1 else f"micro-batch {t % m + 1} of {m} of batch {t // m}"

    def _loss(self, t: int, output: Any, target: Any, *, again: bool) -> Tensor:
        assert self.loss is not None
        try:
            loss = self.loss(output, target)
        except USERS_CODE as error:
            given = f"outputs of {_shapes(output)} and targets of {_shapes(target)}"
            raise UserError(f"the loss cannot take {self._batch(t)}, {given}: {first_line(error)}") from error
        if not isinstance(loss, Tensor) or loss.dim():
            told = f"the loss of {self._batch(t)} is {_shapes(loss)}"
            raise UserError(f"{told}: return the mean, a tensor with a single number")
        if torch.is_grad_enabled() and self.parameters and not loss.requires_grad:
            raise UserError(
                f"the loss of {self._batch(t)} has no gradient, so nothing would be trained: do not detach "
                "it, nor what it is computed from"
            )
        if not again:
            self._observe(t, loss, output, target)
        return loss

    def _observe(self, t: int, loss: Tensor, output: Any, target: Any) -> None:
        """Count a training loss, if it can be."""
        value = loss.item()
        if self._sound(t, value):
            self.meter.add(value, output, target)

    def _sound(self, t: int, value: float) -> bool:
        """Whether the loss of batch t is finite; where it is not, either stop or remember to leave the batch out."""
        batch = t // self.method.m
        if math.isfinite(value) or self._left_out(t):
            return math.isfinite(value)
        if self.on_nan == "stop":
            raise NotFinite(
                f"the loss of {self._batch(t)} is {value} (seen at stage {self.k} of {self.K}, after "
                f"{self.update_index} updates): lower the learning rate, or look at this batch",
                [batch],
            )
        self.bad.add(t)
        return False

    # ---- backward

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Backward batch t; `gradients` belong to the leaves of its output (None at the last stage: the loss itself).

        Adds to the open window and returns the gradients of the leaves of the input.
        """
        batch = self.in_flight.pop(t)
        taken, below, incoming = self._differentiate(t, batch, self.weights.returning(batch.version), gradients)
        self.window.add(t, taken, self._level(batch), foreign=[*below, *incoming], weight=batch.weight)
        self.backwards += 1
        return below

    def _level(self, batch: InFlight) -> int | None:
        """Staleness of its gradient, if the stage was full at its forward."""
        return self.update_index - batch.update if batch.steady else None

    def _differentiate(
        self, t: int, batch: InFlight, version: Version, gradients: list[Tensor | None] | None
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor]]:
        """Gradients of batch t for the parameters and for the leaves of its input, and those that they come from."""
        if self.weights.replays:
            with self.random.drawing(replay=batch.random):
                batch.roots = pytree.tree_leaves(self._run(t, batch, version, again=True))
        if gradients is None:
            gradients = self._own_gradients(t, batch)
        pairs = [
            (root, self.corrections.incoming(gradient.to(root.device)))
            for root, gradient in zip(batch.roots, gradients, strict=True)
            if isinstance(root, Tensor) and root.requires_grad and gradient is not None
        ]
        masters = list(self.parameters.values())
        parameters = list({**self.parameters, **(version.tensors or {})}.values())  # a head's have no versions
        wanted = [leaf for leaf in batch.inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = self._gradients(t, version, pairs, [*parameters, *wanted])
        own = self.numbers.summable(found[: len(parameters)], masters)
        taken = self.corrections.gradients(own, masters, parameters)
        to_inputs = iter(found[len(parameters) :])
        below = [next(to_inputs) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in batch.inputs]
        return taken, below, [gradient for _, gradient in pairs]

    def _own_gradients(self, t: int, batch: InFlight) -> list[Tensor | None]:
        """Where a backward starts when nothing comes from above: at a loss, or at a synthetic gradient."""
        if t in self.bad or self._left_out(t):
            self.bad.discard(t)
            self.skipped += 1
            return [None for _ in batch.roots]
        if self.method.feedback == "synthesiser" and not self.last:
            assert self.head is not None
            h, target = self.lessons[t]
            try:
                with torch.no_grad(), self.random.drawing(), self.numbers.computing():
                    return [(self.head(h, target) / len(h)).to(h.dtype)]
            except USERS_CODE as error:
                raise UserError(
                    f"the synthesiser of stage {self.k} cannot take batch {t} of {_shapes(h)}: {first_line(error)}"
                ) from error
        scale = batch.share * (self.method.top if self.last else 1.0)
        return [torch.full_like(root, scale) for root in batch.roots]

    def teach(self, t: int, gradients: list[Tensor | None]) -> None:
        """Train the synthesiser on the gradient that the stage above reports for batch t."""
        h, target = self.lessons.pop(t)
        if self.teacher is None or gradients[0] is None or self._left_out(t):
            return
        assert self.head is not None
        self.teacher.zero_grad()
        with self.random.drawing(), self.numbers.computing():
            lesson = self.head.lesson(h, target, gradients[0].to(h.device))  # type: ignore[operator]
        if math.isfinite(lesson.item()):
            lesson.backward()
            self.teacher.step()
        elif self.on_nan == "stop":
            raise NotFinite(
                f"what batch {t} teaches the synthesiser of stage {self.k} of {self.K} is not finite: "
                "lower the learning rate, or look at this batch",
                [t],
            )

    def _gradients(
        self, t: int, version: Version, pairs: list[tuple[Tensor, Tensor]], targets: list[Tensor]
    ) -> list[Tensor | None]:
        """Gradients of the roots for the targets; None for those that play no part."""
        if not pairs or not targets:
            return [None] * len(targets)
        roots, incoming = zip(*pairs, strict=True)
        hidden = {} if self.backwards else {name: self.parameters[name] for name in version.tensors or {}}
        try:
            with substituted(self.module, version):
                found = torch.autograd.grad(
                    roots, [*targets, *hidden.values()], incoming, allow_unused=True, retain_graph=self.retains or None
                )
        except RuntimeError as error:
            raise UserError(f"stage {self.k} cannot backward {self._batch(t)}: {first_line(error)}") from error
        for name, gradient in zip(hidden, found[len(targets) :], strict=True):
            if gradient is not None:
                raise UserError(
                    f"stage {self.k} reaches {name} other than as a parameter of a module (through a list, say), where "
                    "no version can stand in for it: register it, or use weights='replay' with precision fp32 or tf32"
                )
        return list(found[: len(targets)])

    # ---- update

    def update(self, over: int) -> None:
        """Apply the window: the sum of its gradients divided by `over`, at the learning rate of this update.

        `over` counts gradients; where they are weighted, it is the sum of their weights. A window without gradients
        moves the schedule, not the weights.
        """
        self.staleness.update(self.method.counted(self.window.levels))
        if self.window.levels:
            if self.optimizer and self._usable():
                self._apply(self.window.divisor(over))
                self.weights.changed()
            else:
                self.weights.passed()
        if self.deferred:
            self.deferred.commit()
        if self.scheduler:
            self._advance()
        self.update_index += 1
        self.window.clear()

    def _advance(self) -> None:
        """On to the learning rate of the next update."""
        if getattr(self.optimizer, "_opt_called", False):  # so that torch has nothing to warn of
            self.scheduler.step()  # type: ignore[union-attr]
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            self.scheduler.step()  # type: ignore[union-attr]

    def _apply(self, over: float) -> None:
        assert self.optimizer is not None
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.window.mean(over, clip_norm=self.clip_norm, of=trained)
        self.corrections.step(self.update_index)

    def _usable(self) -> bool:
        """Whether the window's gradients are finite; where they are not, either stop or do without this update."""
        if self.window.finite():
            return True
        if self.on_nan == "stop":
            raise self._not_finite(self.update_index, self.window.batches)
        self.skipped += len({t // self.method.m for t in self.window.batches})
        return False

    def _not_finite(self, update: int, window: Iterable[int]) -> NotFinite:
        batches = sorted({t // self.method.m for t in window})
        return NotFinite(
            f"the gradient of stage {self.k} of {self.K} is not finite in update {update} (batches "
            f"{batches[0]} to {batches[-1]}): lower the learning rate, clip its norm, or look at these batches",
            batches,
        )

    def resume_schedule(self, updates: int) -> None:
        """Go on as if so many updates had been made, at the rate of the next; for a learning-rate schedule that is a
        function of the update (LambdaLR)."""
        self.update_index = updates
        if self.scheduler:
            self.scheduler.last_epoch = updates - 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step()

    def restart(self) -> None:
        """All batches are through; the program starts afresh."""
        self.weights.restart()
        self.lessons.clear()

    def catch_up(self, update_index: int) -> None:
        """Close empty windows until that many are closed: after a drain on aligned windows lower stages are ahead."""
        while self.update_index < update_index:
            self.update(over=self.M)

    # ---- what it tells

    def launch(self) -> None:
        """Have done what was only asked for so far."""

    def pause(self) -> None:
        """A message from another stage is not there yet."""

    def end_turn(self) -> None:
        """This stage has done all operations of its local iteration."""

    def reset(self) -> None:
        """Tensors are about to be exchanged: forget what relies on where they are."""

    def settle(self) -> None:
        """Bring the figures up to date, where a device keeps them; raises NotFinite for what it has noted."""

    def evaluate(self, x: Any) -> Any:
        """The output on the newest weights in evaluation mode; training state stays as it is."""
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            with torch.no_grad(), self.evaluation_random.drawing():
                with self.numbers.computing():
                    output = self.module(pytree.tree_map_only(Tensor, Tensor.clone, self._entering(x)))
                return self.numbers.scoring(output) if self.last else output
        finally:
            for module in training:
                module.training = True

    def report(self) -> Report:
        """Figures since the last report."""
        seen = self.meter.read() if self.last else {"loss": None, "error": None}
        samples, self.samples = self.samples, 0
        self.meter.empty()
        return Report(
            k=self.k,
            t=self.last_batch // self.method.m,  # micro-batches have numbers of their own
            updates=self.update_index,
            samples=samples,
            in_flight=len(self.in_flight),
            versions=self.weights.versions(),
            lr=float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else None,
            loss=seen["loss"],
            error=seen["error"],
            staleness=dict(self.staleness),
            memory=self.memory(),
            skipped=self.skipped,
        )

    def memory(self) -> int:
        """Bytes at the fullest so far: parameters, gradients, optimizer state, versions, what the batches in flight
        hold. Counted from the first batch; temporaries of a single operation are not."""
        own = [*self.module.parameters(), *self.module.buffers(), *self.parameters.values()]
        head = [*self.head.parameters(), *self.head.buffers()] if self.head is not None else []
        optimizers = [optimizer for optimizer in (self.optimizer, self.teacher) if optimizer is not None]
        state = [dict(values) for optimizer in optimizers for values in optimizer.state.values()]
        taught = [p for group in self.teacher.param_groups for p in group["params"]] if self.teacher else []
        kept = size(own, head, state, self.corrections.kept(), list(self.lessons.values())) + size(taught)
        parameters = list(self.parameters.values())
        gradients = size(parameters)
        sets = self.most_versions - 1 + self.weights.copies  # older versions, and what the policy copies
        versions = sets * self.numbers.version_bytes(parameters, gradients)
        return kept + gradients + versions + (self.held_bytes or 0) * self.most_held

    def _entering(self, x: Any) -> Any:
        """An input, on this device; batches in the first stage's type."""
        return self.numbers.entering(self._here(x)) if self.k == 1 else self._here(x)

    def _here(self, content: Any) -> Any:
        if isinstance(content, Tensor):  # by far the most frequent tree
            return content.to(self.device)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), content)


def _checked_optimizer(optimizer: torch.optim.Optimizer, given: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """One that steps the parameters that it was given, or some of them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer(parameters) returned an object of type {type(optimizer).__name__}: return a "
            "torch.optim.Optimizer"
        )
    known = {id(parameter) for parameter in given.values()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            "optimizer(parameters) holds other parameters than those of its stage: make it of its argument "
            "alone, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"optimizer {type(optimizer).__name__} repeats the forward in each step: use a first-order one")
    return optimizer


def _rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer with learning rates as tensors, where it can read them there; schedules go on from the numbers."""
    for group in optimizer.param_groups:
        if device.type == "cuda" and (group.get("fused") or group.get("capturable")):
            group.setdefault("initial_lr", float(group["lr"]))
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
    return optimizer


def _checked_scheduler(scheduler: Any) -> Any:
    if not callable(getattr(scheduler, "step", None)):
        raise UserError(
            f"scheduler(optimizer) returned an object of type {type(scheduler).__name__}: return one of "
            "torch.optim.lr_scheduler"
        )
    if "metrics" in inspect.signature(scheduler.step).parameters:
        name = type(scheduler).__name__
        raise UserError(f"scheduler {name} steps on a metric, which stages cannot share: use one that counts steps")
    return scheduler


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _finite(content: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor))


def _shapes(content: Any) -> str:
    """Shapes and types of the tensors in a pytree, for messages."""
    found = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in pytree.tree_leaves(content)
        if isinstance(leaf, Tensor)
    ]
    return "shape " + ", ".join(found) if found else f"type {type(content).__name__}"
