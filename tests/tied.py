"""A small network with tied weights, and what each of K processes trains of it; see pipeline/test_tied.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat

WORDS, WIDTH, LR = 9, 6, 0.2


class Tied(nn.Module):
    """One table is the embedding, a projection in the middle, and the output layer."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.scores = nn.Linear(WIDTH, WORDS)
        self.scores.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for n, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if n == 1:
                x = x + torch.softmax(nn.functional.linear(x, self.embedding.weight), dim=-1) @ self.embedding.weight
        return self.scores(x)


def network(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def batches(n: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    text = [torch.randint(WORDS, (rows, 6), generator=generator) for _ in range(n)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in text]


def loss(scores: Tensor, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=1e-3)


def pipeline(model: nn.Module, K: int, method: offbeat.Method | str, **options: Any) -> offbeat.Pipeline:
    cuts = {1: [], 2: ["blocks.1"], 3: ["blocks.1", "blocks.3"], 4: ["blocks.1", "blocks.2", "blocks.3"]}[K]
    settings = {"loss": loss, "optimizer": sgd, "cuts": cuts, "seed": 3, **options}
    return offbeat.Pipeline(model, K, method=method, **settings)


def scored(model: nn.Module, x: Any, y: Any) -> Tensor:
    return loss(model(x), y)


def adl(model: nn.Module, parts: list[nn.Module], M: int, data: list, scored: Any = scored) -> dict[str, Tensor]:
    """ADL as a serial computation: stage k forwards batch t on its version max(0, t - 2(K-k)) // M, and update s of the
    stage is the mean gradient of batches sM to sM+M-1. A tied parameter has the versions of the first stage that uses
    it, in all of its uses: so the gradient of a batch is that of the unsplit model on one set of weights.

    Only `parts` is the engine's: which stage has which parameter."""
    K, named = len(parts), dict(model.named_parameters())
    first = {id(p): name for name, p in named.items()}
    every = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    stage_of = {every[name]: k for k, part in enumerate(parts, start=1) for name, _ in part.named_parameters()}
    versions = {name: [p.detach().clone()] for name, p in named.items()}
    momentum: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for t, (x, y) in enumerate(data):
        for name, p in named.items():
            p.data = versions[name][max(0, t - 2 * (K - stage_of[name])) // M]
        gradients = torch.autograd.grad(scored(model, x, y), list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            sums[name] = gradient if t % M == 0 else sums[name] + gradient
            if t % M == M - 1 or t == len(data) - 1:
                step = sums[name] / (t % M + 1) + 1e-3 * versions[name][-1]
                momentum[name] = 0.9 * momentum[name] + step if name in momentum else step
                versions[name].append(versions[name][-1] - LR * momentum[name])
    return {name: each[-1] for name, each in versions.items()}


def trained(method: str, K: int, seed: int = 0, **options: Any) -> dict[str, str]:
    """Digests of all tensors after some batches and an evaluation, by name; the first process's weights count."""
    pipe = pipeline(network(seed), K, method, **options)
    data = batches(11)
    for t, (x, y) in enumerate(data):
        pipe.step(x, y)
        if t == 6:
            score = pipe.evaluate(data[:2])["loss"]
    state = {name: tensor.clone() for name, tensor in pipe.drain().state_dict().items()}
    pipe.close()
    found = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}
    return {**found, "evaluated": float(score).hex()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, K, *methods = sys.argv[1:]
    rank = int(os.environ["RANK"])
    results = {
        f"{method} {way}": trained(method, int(K), seed=rank, tied=way, engine="processes")
        for method in methods
        for way in ("shared", "copies")
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
