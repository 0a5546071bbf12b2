"""Auxiliary networks of stages that get no gradient from above: local losses, and synthesisers of gradients."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.core.precision import raised

Loss = Callable[[Any, Any], Tensor]


class Classifier(nn.Module):
    """The loss of a classifier on the stage's output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(self.net(z), target)


class FixedClassifier(nn.Module):
    """The loss of a random linear classifier that is not trained; `signs`: feedback through a matrix S with its signs.

    The scores are z W^T in value; with signs their gradient flows through z S^T alone.
    """

    W: Tensor
    S: Tensor

    def __init__(self, shape: tuple[int, ...], classes: int, *, signs: bool) -> None:
        super().__init__()
        features = int(torch.Size(shape).numel())
        self.register_buffer("W", torch.empty(classes, features).uniform_(-1, 1) / features**0.5)
        self.register_buffer("S", torch.rand(classes, features) / features**0.5 * self.W.sign() if signs else None)

    def forward(self, z: Tensor, target: Tensor, loss: Loss) -> Tensor:
        z = z.flatten(1)
        if self.S is None:
            return loss(functional.linear(z, self.W), target)
        through = functional.linear(z, self.S)
        return loss(through + functional.linear(z.detach(), self.W - self.S), target)


class LocalErrors(nn.Module):
    """pred * CE(net(z), y) + sim * MSE(S(project(z)), S(y))."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, pred: float, sim: float, most: int) -> None:
        super().__init__()
        self.classes, self.pred, self.sim = classes, pred, sim
        C = shape[0]
        if pred:
            sides = pooled_sides(shape, most)
            last = nn.Linear(C * prod(sides), classes)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.net = nn.Sequential(*([nn.AdaptiveAvgPool2d(sides), nn.Flatten()] if sides else []), last)
        if sim:
            self.project = nn.Linear(C, C, bias=False) if len(shape) == 1 else nn.Conv2d(C, C, 3, padding=1, bias=False)

    def forward(self, z: Tensor, target: Tensor, loss: Loss) -> Tensor:
        total = z.new_zeros(())
        if self.pred:
            total = total + self.pred * loss(self.net(z), target)
        if self.sim:
            labels = functional.one_hot(target, self.classes).to(z.dtype)
            projected = self.project(z)
            with torch.autocast(z.device.type, enabled=False):
                difference = functional.mse_loss(similarity(raised(projected)), similarity(raised(labels)).detach())
            total = total + self.sim * difference
        return total


def pooled_sides(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Sides of the largest map in the proportions of the image with at most `most` features; none for vectors.

    >>> pooled_sides((128, 8, 8), 2048), pooled_sides((128, 16, 4), 2048), pooled_sides((16, 8, 8), 2048)
    ((4, 4), (8, 2), (8, 8))
    """
    longest = max(shape[1:], default=0)
    for side in range(longest, 0, -1):
        sides = tuple(-(-length * side // longest) for length in shape[1:])  # rounded up: no side is lost
        if side == 1 or shape[0] * prod(sides) <= most:
            return sides
    return ()


def similarity(x: Tensor) -> Tensor:
    """Adjusted cosine similarities of the samples of a batch; images by the standard deviations of their channels."""
    if x.dim() == 4:
        x = x.flatten(2).std(dim=2) if x.shape[1] > 3 and x.shape[2] > 1 else x.flatten(1)
    centred = x - x.mean(dim=1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    # A sample whose features are all alike (dead channels) has similarity 0 to all others. Its length counts as 1:
    # divided by 1e-8 its gradient would dominate the batch, and the gradient of a root at 0 is NaN.
    unit = centred / (length + 1e-8).masked_fill(length == 0, 1)
    return (unit @ unit.T).clamp(-1, 1)


class Synthesiser(nn.Module):
    """A network that predicts the gradient of h; an embedding of the labels, if given, is added to its first layer."""

    def __init__(self, first: nn.Module, rest: nn.Module, embedding: nn.Module | None) -> None:
        super().__init__()
        self.first, self.rest, self.embedding = first, rest, embedding

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        z = self.first(h)
        if self.embedding is not None and labels is not None:
            added = self.embedding(labels)
            z = z + added.reshape(*added.shape, *([1] * (z.dim() - 2)))
        return self.rest(z)


class Synthesised(nn.Module):
    """Predicts b times the gradient of the mean loss, for each of a batch of b outputs."""

    def __init__(self, net: nn.Module, classes: int | None) -> None:
        super().__init__()
        self.net, self.classes = net, classes
        self.needs_labels = classes is not None

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        labels = None if self.classes is None else functional.one_hot(target, self.classes).to(h.dtype)
        return self.net(h, labels)

    def lesson(self, h: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
        """Squared distance from the reported gradient: mean over the batch, sum over features."""
        return (raised(self(h, target)) - len(h) * raised(gradient)).square().sum() / len(h)
