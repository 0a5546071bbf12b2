"""The references' network in the engine: what is common to the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import serial
import torch
from torch import Tensor, nn

import offbeat


class Layer(nn.Module):
    def __init__(self, W: Tensor, b: Tensor) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(W.clone()), nn.Parameter(b.clone())

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z @ self.W + self.b)


def pipeline(
    K: int,
    method: offbeat.Method,
    loss: Callable = serial.mean_square,
    sample: Tensor | None = None,
    optimizer: Callable | None = None,
    **sgd: Any,
) -> offbeat.Pipeline:
    settings = {"lr": serial.LR, "momentum": serial.MOMENTUM, "weight_decay": serial.DECAY} | sgd
    return offbeat.Pipeline(
        [Layer(*theta) for theta in serial.network(K)],
        method=method,
        loss=loss,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, **settings)),
        sample=sample,
    )


def trained(pipe: offbeat.Pipeline, batches: serial.Batches) -> list[list[Tensor]]:
    """The parameters of every stage after all batches and the drain."""
    for x, y in batches:
        pipe.step(x, y)
    return [[p.detach().clone() for p in (layer.W, layer.b)] for layer in layers(pipe.drain())]


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def agree(found: Iterable[Tensor], expected: Iterable[Tensor], case: str) -> None:
    """Within 1e-12, tensor by tensor."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda difference: f"{case}: {difference}")
