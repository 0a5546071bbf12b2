"""A stage's part of the network: how it is called on a version of the weights, and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from offbeat.core.batch_guard import BatchGuard
from offbeat.core.compiled import Compiled
from offbeat.core.deferred_statistics import DeferredStatistics
from offbeat.core.descriptions import USER_CODE_ERRORS, batch_name, shapes
from offbeat.core.fused import Fused
from offbeat.core.in_flight import InFlight, edge_of
from offbeat.core.layout import as_leaf
from offbeat.core.lazy_copy import lazy_copy
from offbeat.core.memory import TensorSizes
from offbeat.core.precision import PrecisionPolicy
from offbeat.core.random_stream import RandomStream
from offbeat.core.weights import Version, WeightPolicy, call, substituted
from offbeat.errors import UserError, first_line
from offbeat.kernels import batch_norm
from offbeat.method import Method

Loss = Callable[[Any, Any], Tensor]
STATISTICS_NOT_READ = (_BatchNorm.forward, nn.SyncBatchNorm.forward, _InstanceNorm.forward)
ObserveLoss = Callable[[int, Tensor, Any, Any], None]  # batch, its loss, outputs and targets


class StageNetwork:
    """The module of stage k, with the loss at the last stage.

    parameters           those that are trained, by name
    sends_gradients      whether the stage below gets gradients of the input
    gets_gradients       whether the stage above sends gradients of the output
    differentiable       leaves of the output that require gradients, where forwards keep no graph; None: not known yet
    random               the stream that dropout and the like draw from
    deferred             BatchNorm statistics of micro-batches
    call                 the module, compiled or fused where that is wanted
    recording            whether its work is being recorded, on inputs in a fixed place
    batch_bytes          bytes that one batch in flight holds; None before the first forward
    graph_bytes          the same with the graph of its repeated forward, which one at a time has; None before the first
    written              names of the buffers that forwards compute with and write; None before the first forward
    """

    def __init__(
        self,
        k: int,
        K: int,
        module: nn.Module,
        *,
        method: Method,
        parameters: Mapping[str, Tensor],
        weights: WeightPolicy,
        guard: BatchGuard,
        loss: Loss | None,
        device: torch.device,
        precision: PrecisionPolicy,
        seed: int,
        compile: bool,
        fuse: bool,
    ) -> None:
        self.k, self.K, self.m, self.module, self.parameters = k, K, method.m, module, parameters
        self.weights, self.guard, self.loss, self.device, self.precision = weights, guard, loss, device, precision
        self.last = k == K
        local = method.feedback == "local"
        self.sends_gradients, self.gets_gradients = k > 1 and not local, k < K and not local
        self.differentiable: list[bool] | None = None
        self.deferred = DeferredStatistics(module) if method.m > 1 else None
        self.call = self._compiled() if compile else self._fused() if fuse else partial(call, module)
        self.random = RandomStream(device, seed, "stage", k)
        self.evaluation_random = RandomStream(device, seed, "evaluation", k)
        self.recording = False
        self.batch_bytes: int | None = None
        self.graph_bytes: int | None = None
        self.written: list[str] | None = None

    def _compiled(self) -> Callable[..., Any]:
        reason = None
        if self.weights.forgets:
            reason = (
                "hybrid weights need the activations of the forward, some of which a compiled backward computes again"
            )
        elif self.deferred and self.deferred.layers:
            reason = "its BatchNorm sums up micro-batches, outside of the graph"
        return Compiled(self.k, self.module, refused=reason)

    def _fused(self) -> Callable[..., Any]:
        reason = None
        if self.deferred and self.deferred.layers:
            reason = "its BatchNorm sums up micro-batches"
        elif self.device.type == "cuda" and not self.precision.channels_last:
            reason = "in fp32 images are not channels-last (precision tf32 or bf16 makes them so)"
        elif self.device.type == "cuda" and not batch_norm.available():
            reason = "triton, which makes the kernels, cannot be imported"
        return Fused(self.k, self.module, refused=reason)

    # ---- inputs

    def to_device(self, content: Any) -> Any:
        if isinstance(content, Tensor):  # by far the most frequent tree
            return self._moved(content)
        return pytree.tree_map_only(Tensor, self._moved, content)

    def _moved(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device)
        return moved if moved is tensor else as_leaf(moved)

    def entering(self, x: Any) -> Any:
        """An input, on this device; batches of the first stage in the type that it computes in."""
        return self.precision.entering(self.to_device(x)) if self.k == 1 else self.to_device(x)

    # ---- outputs

    def outgoing(self, t: int, batch: InFlight, version: Version, output: Any) -> Any:
        """The output of a forward as the next stage gets it: without its graph; a tensor requires gradients where it
        does in the unsplit model, and the next stage sends back the gradients of those alone."""
        if not self.gets_gradients:
            return pytree.tree_map_only(Tensor, Tensor.detach, output)
        if not self.weights.replays_on_current:
            return pytree.tree_map_only(Tensor, as_leaf, output)
        leaves, structure = pytree.tree_flatten(output)
        if self.differentiable is None or len(self.differentiable) != len(leaves):
            self.differentiable = self._differentiable(t, batch, version, leaves)
        marked = zip(leaves, self.differentiable, strict=True)
        sent = [leaf.detach().requires_grad_(wanted) if isinstance(leaf, Tensor) else leaf for leaf, wanted in marked]
        return pytree.tree_unflatten(sent, structure)

    def _differentiable(self, t: int, batch: InFlight, version: Version, output: list[Any]) -> list[bool]:
        """Which leaves of the output require gradients: a single tensor if anything does that it may depend on; several
        as the same forward with a graph, which is dropped, has them."""
        if sum(map(differentiable, output)) < 2:
            inputs = [leaf for leaf in batch.inputs if requires_gradients(leaf)]
            return [differentiable(leaf) and bool(self.parameters or inputs) for leaf in output]
        unmeasured = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), unmeasured, self.random.drawing(replay=batch.random):
            leaves = pytree.tree_leaves(self.repeat(t, batch, version))
        return [requires_gradients(leaf) for leaf in leaves]

    def roots(self, root: Any) -> list[Any]:
        """What the backward of a batch starts from, for its leaves."""
        leaves = pytree.tree_leaves(root)
        return [edge_of(leaf) for leaf in leaves] if self.gets_gradients else leaves

    # ---- calling

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around work that is being recorded, which reads its inputs from the same memory in every repetition."""
        before, self.recording = self.recording, True
        try:
            yield
        finally:
            self.recording = before

    @contextmanager
    def measured(self, t: int, version: Version, batch: InFlight) -> Iterator[None]:
        """Around a forward: the first one is measured, and micro-batches leave BatchNorm's statistics to the update."""
        with ExitStack() as stack:
            if self.deferred and not self.guard.leaves_out(t):
                stack.enter_context(self.deferred.collecting())
            sizes = self._sizes(batch, version) if self.batch_bytes is None else None
            if sizes and not self.weights.replays:
                stack.enter_context(sizes.saving())
            yield
        if sizes:
            sizes.add(batch.buffers)
            self.batch_bytes = sizes.bytes

    def _sizes(self, batch: InFlight, version: Version) -> TensorSizes:
        """Those of a batch; what it shares with others does not count."""
        own = [*self.module.parameters(), *self.module.buffers(), *self.parameters.values()]
        sizes = TensorSizes([*own, *(version.tensors or {}).values()])
        sizes.add(batch.inputs, batch.target)
        return sizes

    def forward(self, t: int, batch: InFlight, version: Version, observe: ObserveLoss) -> Any:
        """The output of the module on one batch, or at the last stage the loss, which is given to `observe`."""
        counted = not self.guard.leaves_out(t)
        before = self._maybe_written()
        numbers = [buffer._version for buffer in before.values()]
        kept = before if self.written is None or not before else self.written
        batch.buffers = {name: before[name].clone() for name in kept}
        output = self._run(t, batch, version, counted=counted, observe=observe)
        if counted and (before or not self.recording):
            now = dict(self.module.named_buffers())
            for (name, buffer), number in zip(before.items(), numbers, strict=True):
                if now.get(name) is buffer and buffer._version == number:
                    if self.written is None:
                        del batch.buffers[name]
                elif name not in batch.buffers:
                    raise UserError(
                        f"stage {self.k} writes buffer {name} in {batch_name(t, self.m)} and did not in the first: "
                        f"batches in flight cannot be recomputed; leave stage {self.k} out of recompute"
                    )
            self.written = self.written or list(batch.buffers)
        return output

    def _maybe_written(self) -> dict[str, Tensor]:
        """The buffers whose values of now are needed if this forward is repeated, for its backward or from a state: all
        that it may compute with, until it is known which ones it writes. A recorded forward keeps none for a state."""
        if self.weights.recomputes:
            return self._readable()
        if self.weights.replays_on_current or self.recording:
            return {}
        if self.written is None:
            return self._readable()
        own = dict(self.module.named_buffers()) if self.written else {}
        return {name: own[name] for name in self.written}

    def _readable(self) -> dict[str, Tensor]:
        """The buffers that forwards may compute with, by name: BatchNorm in training writes its own, and reads none."""
        norms = (layer for layer in self.module.modules() if type(layer).forward in STATISTICS_NOT_READ)
        statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        return {name: buffer for name, buffer in self.module.named_buffers() if id(buffer) not in statistics}

    def repeat(self, t: int, batch: InFlight, version: Version) -> Any:
        """The same once more, without a trace in buffers or figures."""
        if batch.buffers:
            overwritten = {name: buffer.clone() for name, buffer in batch.buffers.items()}
            version = Version({**(version.tensors or {}), **overwritten})
        if self.graph_bytes is not None or not self.weights.replays:
            return self._run(t, batch, version, counted=False, observe=None)
        sizes = self._sizes(batch, version)
        sizes.add(batch.buffers)
        with sizes.saving():
            output = self._run(t, batch, version, counted=False, observe=None)
        self.graph_bytes = sizes.bytes
        return output

    def _run(self, t: int, batch: InFlight, version: Version, *, counted: bool, observe: ObserveLoss | None) -> Any:
        leaves = batch.inputs
        # The module may write its input in place, but a replay, or the forward after a checkpoint, needs it as it was.
        # A recording cannot wait for the first write, and is not faster without its copy (docs/LOG.md).
        copy = Tensor.clone if self.recording else lazy_copy
        leaves = [copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        x = pytree.tree_unflatten(leaves, batch.structure)
        before = [b.clone() for b in self.module.buffers()] if counted and self.guard.on_nan == "skip" else []
        collected = dict(self.deferred.collected) if self.deferred else {}
        try:
            with self.precision.computing():
                output = self.call(version.tensors, (x,), buffers=counted)
        except USER_CODE_ERRORS as error:
            given = f"{batch_name(t, self.m)} of {shapes(x)}"
            raise UserError(f"stage {self.k} cannot take {given}: {first_line(error)}") from error
        if before and not _finite(output):  # such a batch leaves no trace in BatchNorm's statistics
            for buffer, old in zip(self.module.buffers(), before, strict=True):
                buffer.data.copy_(old)  # its graphs may hold it
            if self.deferred:
                self.deferred.collected = collected
        return self._loss(t, self.precision.scoring(output), batch.target, observe) if self.last else output

    def _loss(self, t: int, output: Any, target: Any, observe: ObserveLoss | None) -> Tensor:
        assert self.loss is not None
        try:
            loss = self.loss(output, target)
        except UserError:
            raise
        except USER_CODE_ERRORS as error:
            given = f"outputs of {shapes(output)} and targets of {shapes(target)}"
            raise UserError(f"the loss cannot take {batch_name(t, self.m)}, {given}: {first_line(error)}") from error
        if not isinstance(loss, Tensor) or loss.dim():
            raise UserError(
                f"the loss of {batch_name(t, self.m)} is {shapes(loss)}: return the mean, a tensor with a single number"
            )
        if torch.is_grad_enabled() and self.parameters and not loss.requires_grad:
            raise UserError(
                f"the loss of {batch_name(t, self.m)} has no gradient, so nothing would be trained: do not detach "
                "it, nor what it is computed from"
            )
        if observe is not None:
            observe(t, loss, output, target)
        return loss

    # ---- differentiating

    def gradients(
        self,
        t: int,
        version: Version,
        pairs: Sequence[tuple[Tensor | GradientEdge, Tensor]],
        targets: list[Tensor],
        *,
        check: bool = False,
        retain_graph: bool = False,
    ) -> list[Tensor | None]:
        """Gradients of the roots for the targets; None for those that play no part.

        `check` raises where the module reaches a parameter that the version should have replaced.
        """
        if not pairs or not targets:
            return [None] * len(targets)
        roots, incoming = zip(*pairs, strict=True)
        replaced = {name: self.parameters[name] for name in version.tensors or {}} if check else {}
        try:
            with substituted(self.module, version):
                found = torch.autograd.grad(
                    roots,
                    [*targets, *replaced.values()],
                    incoming,
                    allow_unused=True,
                    retain_graph=retain_graph or None,
                )
        except RuntimeError as error:
            raise UserError(f"stage {self.k} cannot backward {batch_name(t, self.m)}: {first_line(error)}") from error
        for name, gradient in zip(replaced, found[len(targets) :], strict=True):
            if gradient is not None:
                raise UserError(
                    f"stage {self.k} uses {name} not only as a parameter of a module (but also from a list, for "
                    "example), so that versions of the weights do not apply there: register it, or use "
                    "weights='replay' with precision fp32 or tf32"
                )
        return list(found[: len(targets)])

    # ---- evaluating

    def evaluate(self, x: Any) -> Any:
        """The output on the newest weights in evaluation mode; training state stays as it is."""
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            with torch.no_grad(), self.evaluation_random.drawing():
                with self.precision.computing():
                    output = self.module(pytree.tree_map_only(Tensor, Tensor.clone, self.entering(x)))
                return self.precision.scoring(output) if self.last else output
        finally:
            for module in training:
                module.training = True


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def requires_gradients(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _finite(content: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor))
