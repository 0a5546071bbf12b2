"""How stale the gradients of a stage are, and what that costs its updates, measured while it trains.

Every N updates, for the first batch t of an update's window, at its backward:

    gap       || w - w' ||      w  the weights now;  w' those that forwarded batch t
    norm      || w ||
    gradient  || g' ||          g' the late gradient: what the backward of batch t gives (from stashed weights, old
                                activations or a replay, as the method has it), before any corrector
    cosine    <g', g> / (|| g' || || g ||)      g the fresh gradient
    lag       updates between the forward and now

and when the update is made, for all batches of its window:

    predicted_change    <G', d>     d  the step: the weights after the update minus those before it
                                    G' the gradient that the update uses: the window's mean, with correctors, before
                                       its norm is clipped
    fresh_change        <G, d>      G  the mean of the fresh gradients, with the same weights in the mean

Both are first-order changes of the loss of these batches, negative where it decreases: the one that the stage's late
gradients predict for its step, and the one that the same step makes at the present weights. They are equal without
staleness. fresh_change / predicted_change is the share of the predicted decrease that a stage gets; where it is
negative, the step increases the loss. A single update may predict an increase (momentum, weight decay), so that shares
are those of sums over updates, from the first late one on (see runs/record.py). A replay on the present weights has a
share of 1.

The fresh gradient is what a stage can know alone: that of its own function at the present weights, for the input that
it was given then and the same gradient from above. (Where all stages were at their present weights, input and incoming
gradient would be others too; that part of the staleness no stage can see.) At the last stage it is that of the loss.

Norms and products are over all parameters of the stage, summed in float64; w, w', g' and g are as forwards use them
(in bfloat16 if so), d is that of the parameters themselves. Measuring repeats forward and backward of each batch of the
window, and of its first batch twice, on copies: neither BatchNorm's statistics nor random numbers nor anything else of
training notices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.in_flight import InFlight
from offbeat.core.weights import Version, at_once
from offbeat.core.worker import Worker
from offbeat.errors import UserError
from offbeat.method import Method

FIGURES = ("gap", "norm", "gradient", "cosine", "predicted_change", "fresh_change")
Gradients = list[Tensor | None]


def check(every: int, method: Method) -> None:
    """Refuse what cannot be measured."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError(f"diagnose={every!r} updates: use a whole number from 1 up")
    if method.head is not None:
        raise UserError(
            f"diagnose with {method.name}, whose stages learn from heads of their own and have no late "
            "gradients: leave it out"
        )


@dataclass(frozen=True)
class Given:
    """What a forward used: its weights, and its input where the stage may have changed it in place."""

    version: Version
    x: Any = None


@dataclass
class MeasuredWindow:
    """A window whose update will be measured.

    facts    what its line has besides the figures
    figures  those of its first batch
    fresh    the sum of the fresh gradients so far, in float64; None if that of some batch is not known
    """

    facts: dict[str, int]
    figures: Tensor
    fresh: list[Tensor] | None

    def add(self, gradients: Gradients, weight: float) -> None:
        """Add the fresh gradients of a batch that has this weight in the window's mean."""
        if self.fresh is None:
            return
        for total, gradient in zip(self.fresh, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=weight)


class Diagnosis:
    """Gives a stage's operations to the executor of its worker, and measures late gradients every `every` updates."""

    def __init__(self, worker: Worker, every: int) -> None:
        check(every, worker.method)
        self.stage, self.executor, self.every, self.turn = worker.stage, worker.executor, every, worker.newest
        self.given: dict[int, Given] = {}  # of the batches in flight
        self.window: MeasuredWindow | None = None  # the open window, if it is measured
        self.lasting: tuple[int, Version] | None = None  # a copy of the weights, and of which update
        self.measured: list[tuple[dict[str, int], Tensor]] = []  # figures stay on the device until they are read
        self.restored: list[dict[str, Any]] = []  # measured by an earlier process

    # ---- the stage's operations

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        stage = self.stage
        mine = pytree.tree_map_only(Tensor, Tensor.clone, x) if stage.k == 1 else None
        output = self.executor.forward(t, x, target, share)
        self.given[t] = Given(self._used(stage.in_flight[t]), mine)
        return output

    def backward(self, t: int, gradients: Gradients | None) -> Gradients:
        given = self.given.pop(t, None)
        if self._due(t):
            with self._at_once():
                self._measure(t, given, gradients)
        return self.executor.backward(t, gradients)

    def update(self, over: int) -> None:
        window, self.window = self.window, None
        if window is None:
            self.executor.update(over)
        else:
            self.measured.append((window.facts, torch.cat([window.figures, self._update_measured(window, over)])))

    def teach(self, t: int, gradients: Gradients) -> None:
        self.executor.teach(t, gradients)

    # ---- what a forward used

    def _used(self, batch: InFlight) -> Version:
        """A lasting version; one that the policy would change or forget is copied, once an update."""
        weights = self.stage.weights
        if weights.forgets:
            self.stage.launcher.flush()  # what is copied must be there
            return weights.remember() or batch.version
        if weights.replays and batch.version is getattr(weights, "own", None):
            self.stage.launcher.flush()
            if self.lasting is None or self.lasting[0] != self.stage.update_index:
                self.lasting = self.stage.update_index, self._present()
            return self.lasting[1]
        return batch.version

    def open_window(self) -> dict[str, Any] | None:
        """The open window as a tree of tensors and plain values, if it is measured."""
        return None if self.window is None else dict(vars(self.window))

    def take_up(self, lines: list[dict[str, Any]], window: dict[str, Any] | None) -> None:
        """Continue with a restored stage: what an earlier process has not reported yet, its open window and its batches
        in flight.

        A replay's are not measured: what forwarded them was not saved.
        """
        device = self.stage.network.device
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), window)
        self.window = None if moved is None else MeasuredWindow(**moved)
        self.restored = list(lines)
        self.given = {
            t: Given(batch.kept or batch.version)
            for t, batch in self.stage.in_flight.items()
            if not (self.stage.weights.replays_on_current and self.stage.method.lag(self.stage.k, self.stage.K))
        }

    def _present(self) -> Version:
        sources = self.stage.weights.sources
        return Version(sources.named(sources.copies()))

    # ---- measuring

    def _due(self, t: int) -> bool:
        """Whether batch t gives a gradient to a window that is measured."""
        stage = self.stage
        begins = not stage.window.levels and (stage.update_index + 1) % self.every == 0
        used = not stage.guard.excludes(t) and bool(stage.parameters)
        return used and (begins or self.window is not None)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Everything queued is done now, and so is what the weights need meanwhile."""
        weights = self.stage.weights
        self.stage.launcher.flush()
        before, weights.do = weights.do, at_once
        try:
            yield
        finally:
            weights.do = before

    def _measure(self, t: int, given: Given | None, gradients: Gradients | None) -> None:
        if given is None:  # forwarded before the diagnosis began
            if self.window is not None:
                self.window.fresh = None
            return
        batch, now = self.stage.in_flight[t], self._present()
        fresh = self._gradients(t, now, self._roots(t, batch, given, now), batch, gradients)
        if self.window is None:
            stale = self._stale(t, batch, given, gradients)
            self.window = self._begin_window(t, batch, now, given, stale=stale, fresh=fresh)
        if self.window is not None:
            self.window.add(fresh, batch.weight)

    def _begin_window(
        self, t: int, batch: InFlight, now: Version, given: Given, *, stale: Gradients, fresh: Gradients
    ) -> MeasuredWindow | None:
        stage = self.stage
        assert now.tensors is not None
        then = list((given.version.tensors or stage.parameters).values())
        pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(now.tensors.values(), then, strict=True)]
        both = [(a.double(), b.double()) for a, b in zip(stale, fresh, strict=True) if a is not None and b is not None]
        if not both:
            return None  # nothing came from above
        zero = self._zero()
        gap = sum(((a - b).square().sum() for a, b in pairs), zero).sqrt()
        norm = sum((a.square().sum() for a, _ in pairs), zero).sqrt()
        lengths = [sum((g.square().sum() for g in each), zero).sqrt() for each in zip(*both, strict=True)]
        product = sum(((a * b).sum() for a, b in both), zero)
        facts = {
            "stage": stage.k,
            "update": stage.update_index,
            "batch": t // stage.method.m,
            "lag": stage.update_index - batch.update,
            "turn": self.turn(),
        }
        figures = torch.stack([gap, norm, lengths[0], product / (lengths[0] * lengths[1])])
        sums = [torch.zeros_like(p, dtype=torch.float64, requires_grad=False) for p in stage.parameters.values()]
        return MeasuredWindow(facts, figures, sums)

    def _update_measured(self, window: MeasuredWindow, over: int) -> Tensor:
        """Make the update; the changes of the loss that the late and the fresh gradients predict for its step."""
        stage = self.stage
        if window.fresh is None:
            self.executor.update(over)
            return torch.full((2,), math.nan, dtype=torch.float64, device=stage.network.device)
        stage.launcher.flush()
        divisor = stage.window.divisor(over)
        late = {name: gradient.to(torch.float64, copy=True) for name, gradient in stage.window.gradients().items()}
        before = [parameter.detach().clone() for parameter in stage.parameters.values()]
        self.executor.update(over)
        stage.launcher.flush()
        predicted = fresh = self._zero()
        for (name, parameter), old, new in zip(stage.parameters.items(), before, window.fresh, strict=True):
            step = (parameter.detach().double() - old.double()).flatten()
            fresh = fresh + (new.flatten() * step).sum()
            if name in late:
                predicted = predicted + (late[name].flatten() * step).sum()
        return torch.stack([predicted, fresh]) / divisor

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.stage.network.device)

    def _stale(self, t: int, batch: InFlight, given: Given, gradients: Gradients | None) -> Gradients:
        """The gradient as the method takes it, by a graph that is made again."""
        weights = self.stage.weights
        if weights.replays:
            version = weights.returning(batch.version)
            return self._gradients(t, version, self._roots(t, batch, given, version), batch, gradients)
        with weights.again(given.version) as version:
            roots = self._roots(t, batch, given, version)
        return self._gradients(t, weights.returning(version), roots, batch, gradients)

    def _roots(self, t: int, batch: InFlight, given: Given, version: Version) -> list[Any]:
        """The forward again, on a copy of its input, with the random numbers of then."""
        network = self.stage.network
        leaves = batch.inputs if given.x is None else pytree.tree_leaves(network.entering(given.x))
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        again = replace(batch, inputs=copies, roots=[])
        with torch.enable_grad(), network.random.drawing(replay=batch.random):
            return pytree.tree_leaves(network.repeat(t, again, version))

    def _gradients(
        self, t: int, version: Version, roots: list[Any], batch: InFlight, gradients: Gradients | None
    ) -> Gradients:
        stage = self.stage
        if gradients is None:
            gradients = [torch.full_like(root, batch.share * stage.method.top) for root in roots]
        pairs = [
            (root, stage.optimization.corrections.incoming(gradient.to(root.device)))
            for root, gradient in zip(roots, gradients, strict=True)
            if isinstance(root, Tensor) and root.requires_grad and gradient is not None
        ]
        targets = list((version.tensors or stage.parameters).values())
        return stage.network.gradients(t, version, pairs, targets, check=not stage.figures.backwards)

    # ---- reports

    def lines(self) -> list[dict[str, Any]]:
        """What was measured and not taken yet."""
        return self.restored + [
            {**facts, **dict(zip(FIGURES, map(_told, figures.tolist()), strict=True))}
            for facts, figures in self.measured
        ]

    def take(self) -> list[dict[str, Any]]:
        """The lines, which are then forgotten."""
        found = self.lines()
        self.restored, self.measured = [], []
        return found


def _told(figure: float) -> float | None:
    """A figure as JSON can have it; None where there is none, such as the angle to a gradient of zeros."""
    return figure if math.isfinite(figure) else None
