"""The stage: everything that changes while a network trains, and the three operations that change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.batch_guard import BatchGuard, OnNan
from offbeat.core.clipping import ClipOver, Clipping
from offbeat.core.feedback import Feedback, head_parameters, make_head
from offbeat.core.in_flight import InFlight, OutputEdge
from offbeat.core.launcher import Immediate, Launcher
from offbeat.core.memory import size
from offbeat.core.metrics import batch_size
from offbeat.core.optimization import EagerOptimization, MakeOptimizer, MakeScheduler, Optimization
from offbeat.core.precision import FULL, PrecisionPolicy
from offbeat.core.stage_network import Loss, StageNetwork, requires_gradients
from offbeat.core.stage_report import Report, StageFigures, Staleness
from offbeat.core.weights import Version, WeightPolicy, WeightSources, make_policy
from offbeat.core.window import BatchWeights, GradientWindow, Weighting
from offbeat.method import Method
from offbeat.seeds import derive

CPU = torch.device("cpu")


class Stage:
    """Stage k of K: forward, backward, update.

    network       the stage's part of the model: how it is called and differentiated
    feedback      where a backward starts when no gradient comes from above: losses, heads, synthesisers
    optimization  optimizer, schedule and correctors
    weights       which parameters forwards and backwards use
    window        the gradients that the next update will apply
    guard         batches whose gradients are not used
    launcher      how tensor work gets to the device: at once, or recorded (graphs/recorded_stage.py)
    parameters    those that are trained, by name, with those of a head
    in_flight     batches between forward and backward
    update_index  s: windows closed
    late          whether the method has late gradients, in this stage or in another
    under_way     the window of an update whose sum over the replicas is under way, if another one is open (see Worker)
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
        output: tuple[tuple[int, ...], int] | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        clip_over: ClipOver = "stage",
        device: torch.device | None = None,
        seed: int = 0,
        on_nan: OnNan = "stop",
        left_out: Iterable[int] = (),
        precision: PrecisionPolicy = FULL,
        compile: bool = False,
        fuse: bool = False,
        weighting: Weighting = "batches",
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """module: the stage's part of the model, under the names of the whole; loss: for the last stage, and for all
        that learn from a local loss; output: the shape of one sample's output and the number of classes, for stages
        with a head; replica: of several, has a random stream of its own. See Pipeline for the others."""
        device = device or CPU
        loss = None if loss is None else precision.in_full(loss)
        self.k, self.K, self.method = k, K, method
        own_batches = replica if replicas > 1 else None
        self.guard = BatchGuard(k, K, method.m, on_nan=on_nan, left_out=left_out, replica=own_batches)
        own: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        head = None
        if method.head and k < K:
            head = make_head(method, k, output=output, like=module, device=device, seed=seed)
        together = head if method.head_lr is None else None  # else it has an optimizer of its own
        self.parameters = own if together is None else own | head_parameters(together, _tensor_names(module))
        self.optimization: Optimization = EagerOptimization(
            method,
            k,
            K,
            parameters=self.parameters,
            optimizer=optimizer,
            scheduler=scheduler,
            clipping=Clipping(k, K, norm=clip_norm, over=clip_over, synchronous=method.synchronous(K)),
            device=device,
            guard=self.guard,
        )
        self.in_flight: dict[int, InFlight] = {}
        self.weights = self._make_weights(own, precision)
        self.network = StageNetwork(
            k,
            K,
            module,
            method=method,
            parameters=self.parameters,
            weights=self.weights,
            guard=self.guard,
            loss=loss,
            device=device,
            precision=precision,
            seed=derive(seed, "replica", replica) if replica else seed,
            compile=compile,
            fuse=fuse,
        )
        self.feedback = Feedback(method, self.network, self.guard, head=head, loss=loss)
        self.batch_weights = BatchWeights(weighting, method.M * replicas)
        self.window = GradientWindow(self.parameters)
        self.launcher: Launcher = Immediate()
        self.figures = StageFigures(most_in_flight=method.held(k, K), most_versions=method.versions(k, K))
        self.staleness = Staleness()
        self.update_index = 0
        self.late = not method.synchronous(K)
        self.under_way: GradientWindow | None = None
        self.keeping = False  # whether the weights of every forward are kept, for a checkpoint

    def _make_weights(self, own: dict[str, Tensor], precision: PrecisionPolicy) -> WeightPolicy:
        """The policy for the parameters of the module; those of a head have no versions."""
        method, corrections, in_flight = self.method, self.optimization.corrections, self.in_flight
        sources = WeightSources(
            own,
            corrections.forward_weights(own),
            corrections.backward_weights(own),
            method.forward_version if method.forward == "before" else None,
            precision,
        )
        return make_policy(
            method.weights,
            sources,
            lag=method.lag(self.k, self.K),
            replays=method.replays(self.k, self.K),
            in_flight=lambda: [batch.version for batch in in_flight.values()],
        )

    # ---- forward

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        """Forward batch t on the weights that the method gives; returns the output without its graph, or the loss at
        the last stage. The backward returns the gradients of those tensors of x that require them. `share` is that of a
        micro-batch in its batch: its weight in the gradient."""
        steady = self.full()
        return self.forward_on(self.weights.current(), t, x, target, share=share, steady=steady)

    def full(self) -> bool:
        """Whether the next forward is one of steady state, so that its staleness is the formula's."""
        return self.method.full(self.k, self.K, in_flight=len(self.in_flight), forwards=self.weights.forwards)

    def forward_on(self, version: Version, t: int, x: Any, target: Any, *, share: float, steady: bool) -> Any:
        """Forward batch t on that version."""
        network, random = self.network, self.network.random
        leaves, structure = pytree.tree_flatten(network.entering(x))
        batch = InFlight(
            leaves,
            structure,
            network.to_device(target),
            version,
            self.update_index - version.age,
            steady,
            random.state,
            share,
            self.weights.remember() if self.keeping else None,
        )
        replays = self.weights.replays
        # With recompute the graph is dropped below. Without autograd, torch may choose other kernels, with other bits.
        graph = not self.weights.replays_on_current
        with random.drawing(), torch.set_grad_enabled(graph), network.measured(t, version, batch):
            output = network.forward(t, batch, version, self._observe)
            root = self.feedback.root(t, output, batch.target, updates=self.update_index)
        if not replays:
            batch.roots = network.roots(root)
        if self.enter(t, batch, batch_size(target, x)):
            assert self.weights.versions() <= self.figures.most_versions, "more weight versions than the window allows"
        return network.outgoing(t, batch, version, output)

    def _observe(self, t: int, loss: Tensor, output: Any, target: Any) -> None:
        """Count a training loss, if it is finite."""
        value = loss.item()
        if self.guard.accepts_loss(t, value, updates=self.update_index):
            self.figures.meter.add(value, output, target)

    def enter(self, t: int, batch: InFlight, samples: int) -> bool:
        """Batch t is in flight from now on; whether no earlier forward used its version."""
        self.in_flight[t] = batch
        batch.version.batches += 1
        batch.weight = self.batch_weights.enter(samples, batch.share)
        return self.figures.forwarded(t, samples, in_flight=len(self.in_flight), version=id(batch.version))

    def leave(self, t: int) -> InFlight:
        """Batch t, which is no longer in flight."""
        batch = self.in_flight.pop(t)
        batch.version.batches -= 1
        return batch

    def keep(self, wanted: bool = True) -> None:
        """From now on keep the weights of every forward, so that the batches in flight can be saved."""
        self.keeping = wanted
        if not wanted:
            self.weights.forget()
            for batch in self.in_flight.values():
                batch.kept = None

    # ---- backward

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Backward batch t; `gradients` belong to the leaves of its output (None at the last stage: the loss itself).

        Adds to the open window and returns the gradients of the leaves of the input.
        """
        batch = self.leave(t)
        taken, below, incoming = self.differentiate(t, batch, self.weights.returning(batch.version), gradients)
        self.window.add(
            t, taken, self.level(batch), foreign=[*below, *incoming], weight=batch.weight, share=batch.share
        )
        self.figures.backwards += 1
        return below

    def level(self, batch: InFlight) -> int | None:
        """Staleness of its gradient, if the stage was full at its forward."""
        updates = self.update_index + (self.under_way is not None)
        return updates - batch.update if batch.steady else None

    def differentiate(
        self,
        t: int,
        batch: InFlight,
        version: Version,
        gradients: list[Tensor | None] | None,
        *,
        retain_graph: bool = False,
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor]]:
        """Gradients of batch t for the parameters and for the leaves of its input, and those that they come from."""
        network, corrections = self.network, self.optimization.corrections
        if self.weights.replays:
            with torch.enable_grad(), network.random.drawing(replay=batch.random):
                batch.roots = pytree.tree_leaves(network.repeat(t, batch, version))
        if gradients is None:
            gradients = self.feedback.gradients(t, batch)
        pairs = [
            (root.edge if isinstance(root, OutputEdge) else root, corrections.incoming(gradient.to(root.device)))
            for root, gradient in zip(batch.roots, gradients, strict=True)
            if gradient is not None and (isinstance(root, OutputEdge) or requires_gradients(root))
        ]
        masters = list(self.parameters.values())
        parameters = list({**self.parameters, **(version.tensors or {})}.values())  # a head's have no versions
        wanted = [leaf for leaf in batch.inputs if requires_gradients(leaf)]
        first = not self.figures.backwards
        found = network.gradients(t, version, pairs, [*parameters, *wanted], check=first, retain_graph=retain_graph)
        own = network.precision.summable(found[: len(parameters)], masters)
        taken = corrections.gradients(own, masters, parameters)
        to_inputs = iter(found[len(parameters) :])
        below = [next(to_inputs) if requires_gradients(leaf) else None for leaf in batch.inputs]
        return taken, below, [gradient for _, gradient in pairs]

    def teach(self, t: int, gradients: list[Tensor | None]) -> None:
        """Train the synthesiser on the gradient that the stage above sends for batch t."""
        self.feedback.teach(t, gradients)

    # ---- update

    def open_next_window(self) -> bool:
        """Open the next window while an update is under way, where a backward can do without it; whether it can."""
        if self.under_way is not None:
            return True
        if not self.weights.keeps or self.window.fixed or self.optimization.corrections.active:
            return False
        self.under_way, self.window = self.window, GradientWindow(self.parameters)
        return True

    @contextmanager
    def window_under_way(self) -> Iterator[None]:
        """Around the rest of an update that is under way: its window, while the gradients of the open one wait."""
        if self.under_way is None:
            yield
            return
        opened, gradients = self.window, self.window.gradients()
        opened.restore({})  # or the sum would be written into their memory
        self.window, self.under_way = self.under_way, None
        try:
            yield
        finally:
            self.window = opened
            opened.restore(gradients)

    def update(self, over: int) -> None:
        """Apply the window: the sum of its gradients divided by `over`, at the learning rate of this update.

        `over` counts gradients; where they are weighted, it is the sum of their weights. A window without gradients
        advances the schedule and leaves the weights as they are.
        """
        for level in self.method.counted(self.window.levels):
            self.staleness[level] += 1
        if self.window.filled():
            if self.optimization.apply(self.window, over, self.update_index):
                self.weights.changed()
            else:
                self.weights.passed()
        if self.network.deferred:
            self.network.deferred.commit()
        self.optimization.advance()
        self.update_index += 1
        self.late_updates += self.late
        self.window.clear()

    @property
    def late_updates(self) -> int:
        """Updates so far with late gradients, also those of other methods before this one (see `StageContext`)."""
        return self.optimization.corrections.place.late_updates

    @late_updates.setter
    def late_updates(self, updates: int) -> None:
        self.optimization.corrections.place.late_updates = updates

    def resume_schedule(self, updates: int) -> None:
        """Continue as if that many updates had been made, at the learning rate of the next."""
        self.update_index = updates
        self.optimization.resume_schedule(updates)

    def advance_schedule(self, updates: int) -> None:
        """Continue as if that many updates had been made: of a new stage, with any schedule that counts steps."""
        self.update_index = updates
        for _ in range(updates):
            self.optimization.advance()

    def restart(self) -> None:
        """All batches are done; the program starts again."""
        self.weights.restart()
        self.feedback.lessons.clear()
        self.launcher.restart()

    def catch_up(self, update_index: int) -> None:
        """Close empty windows until that many are closed: after a drain on aligned windows lower stages are ahead."""
        while self.update_index < update_index:
            self.update(over=self.method.M)

    # ---- figures

    def evaluate(self, x: Any) -> Any:
        """The output on the newest weights in evaluation mode; training state stays as it is."""
        return self.network.evaluate(x)

    def report(self) -> Report:
        """Figures since the last report."""
        optimizer = self.optimization.optimizer
        samples, loss, error = self.figures.take()
        return Report(
            k=self.k,
            t=self.figures.last_batch // self.method.m,  # operations index micro-batches
            updates=self.update_index,
            samples=samples,
            in_flight=len(self.in_flight),
            versions=self.weights.versions(),
            lr=float(optimizer.param_groups[0]["lr"]) if optimizer else None,
            loss=loss if self.network.last else None,
            error=error if self.network.last else None,
            staleness=dict(self.staleness),
            memory=self.memory(),
            skipped=self.guard.skipped,
        )

    def memory(self) -> int:
        """Bytes at the fullest so far: parameters, gradients, optimizer state, versions, and what the batches in flight
        hold: their graphs, or their inputs and one graph if forwards are repeated. Counted from the first batch;
        temporaries of a single operation are not."""
        network, feedback = self.network, self.feedback
        own = [*network.module.parameters(), *network.module.buffers(), *self.parameters.values()]
        head = [] if feedback.head is None else [*feedback.head.parameters(), *feedback.head.buffers()]
        optimizers = [made for made in (self.optimization.optimizer, feedback.teacher) if made is not None]
        state = [dict(values) for optimizer in optimizers for values in optimizer.state.values()]
        corrections, lessons = self.optimization.corrections.kept(), list(feedback.lessons.values())
        kept = size(own, head, state, corrections, lessons) + size(feedback.taught())
        parameters = list(self.parameters.values())
        gradients = size(parameters)
        sets = self.figures.most_versions - 1 + self.weights.copies  # older versions, and what the policy copies
        versions = sets * network.precision.version_bytes(parameters, gradients)
        batch = network.batch_bytes or 0
        batches = batch * self.figures.most_held + max(0, (network.graph_bytes or 0) - batch)
        return kept + gradients + versions + batches + self.launcher.reserved()


def _tensor_names(module: nn.Module) -> list[str]:
    return [*dict(module.named_parameters()), *dict(module.named_buffers())]
