"""Recorded stages beside the simulator in trainings that nobody would write down: short batches anywhere, drains,
reports, evaluations, batches left out, states that are saved and loaded into other pipelines. The bits are the same."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from captured import capture
from torch import nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat.engines.streams import Streams
from offbeat.errors import UserError
from offbeat.methods import METHODS, named, with_staleness_warmup

CPU, SIZE = torch.device("cpu"), 5
ALIKE = [name for name in METHODS if not named(name).why_not_capturable()]
QUICK, FOUND = range(12), (100, 153, 349, 2225)  # a few seeds, and those that were wrong once
MORE = [seed for seed in range(len(QUICK), 240) if seed not in FOUND]
CORRECTORS = (
    "sc",
    "lwp",
    "lwp:fraction=0.5+sc:extra=1",
    "lookahead",
    "lookahead+sc",
    "lwp:form=weight",
    "dc",
    "t1:power=1",
    "auto",
)
EVENTS = ("drain", "report", "evaluate", "look", "reload")


@dataclass
class Program:
    """A training, drawn by its seed."""

    seed: int
    method: offbeat.Method = field(init=False)
    K: int = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        M = draw.choice([1, 2, 3, 4, 6])
        self.method = draw.choice(
            [
                offbeat.BP(M=M),
                offbeat.ADL(M=M, weights=draw.choice(["stash", "hybrid", "replay"])),
                offbeat.ADL(M=M, window="aligned"),
                named(draw.choice(ALIKE)),
            ]
        )
        self.K = 1 if self.method.workers > 1 else self._fitting(draw)
        batches, short, often = draw.choice([20, 35, 50]), draw.choice([0.05, 0.3]), draw.choice([0.0, 0.1, 0.2])
        self.sizes = [3 if draw.random() < short else SIZE for _ in range(batches)]
        self.events = [draw.choice(EVENTS) if draw.random() < often else None for _ in range(batches)]
        begin = draw.randrange(batches)
        self.left_out = list(range(begin, min(batches, begin + draw.choice([0, 0, 1, 5]))))
        self.precision = draw.choice(["fp32", "fp32", "bf16"])
        self.fused = draw.random() < 0.7
        self.frozen = draw.choice([(), (), (0,), (1, 2)])
        self.together = draw.choice([None, None, 1, 2, 3])
        self._correct(random.Random(f"correctors {self.seed}"))
        if draw.random() < 0.4 and self.method.workers == 1 and self.method.lag(1, 2):
            phases = draw.choice([1, 3, "bp@2", "adl-1f1b@2+bp@1"] if M > 1 else [4, "bp@3+adl-1f1b@6"])
            self.method = with_staleness_warmup(self.method, phases)

    def _correct(self, draw: random.Random) -> None:
        """Another optimizer and correctors for some methods, drawn apart so that the rest of a seed stays."""
        self.optimizer = draw.choice(["sgd", "sgd", "adamw", "nadam"])
        if draw.random() < 0.5:
            with suppress(UserError):  # gradients that are not late, or weights that it does not work with
                self.method = self.method.corrected(draw.choice(CORRECTORS))
        if any("nesterov" in corrector.needs for corrector in self.method.correctors):
            self.optimizer = draw.choice(["sgd", "nadam"])

    def _optimizer(self, parameters):
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=self.fused)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=1e-3, fused=self.fused, capturable=self.fused)
        return torch.optim.NAdam(parameters, lr=0.01, weight_decay=1e-3)

    def _fitting(self, draw: random.Random) -> int:
        for K in draw.sample([1, 2, 3, 4], 4):
            try:
                self.method.check(K)
            except UserError:
                continue
            return K
        raise AssertionError("every method takes some K")

    def pipeline(self, *, streams: bool) -> offbeat.Pipeline:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for wide in (2, 4, 4)]
        model = nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))
        for number in self.frozen:
            model[number].requires_grad_(False)
        made = offbeat.Pipeline(
            model,
            self.K,
            method=self.method,
            cuts=[1, 2, 3][: self.K - 1],
            loss=nn.functional.cross_entropy,
            engine=Streams(self.K, CPU, together=self.together) if streams else "simulate",
            seed=3,
            clip_norm=1.0,
            optimizer=self._optimizer,
            precision=self.precision,
            left_out=self.left_out,
        )
        if "reload" in self.events:
            made.keep()
        return made

    def run(self, *, streams: bool) -> tuple[list[str], list[object], list[torch.Tensor], object]:
        """Losses, what was told on the way, the model and its staleness."""
        pipe, generator, told = self.pipeline(streams=streams), torch.Generator().manual_seed(self.seed), []
        losses: list[torch.Tensor] = []
        for t, (size, event) in enumerate(zip(self.sizes, self.events, strict=True)):
            x = torch.randn(size, 2, 4, 4, generator=generator)
            losses.append(pipe.step(x, torch.randint(3, (size,), generator=generator)))
            x.fill_(7.0)  # the caller may use its memory again
            if event == "drain":
                pipe.drain()
            elif event == "report":
                synchronous = self.method.phase(t + 1).pipelined  # streams complete its batches sooner
                told += [
                    (one.updates, one.samples, one.versions, None if synchronous else one.in_flight)
                    for one in pipe.reports()
                ]
            elif event == "evaluate":
                told.append(pipe.evaluate([(torch.ones(2, 2, 4, 4), torch.zeros(2, dtype=torch.int64))])["loss"])
            elif event == "look":
                losses[-1].item()
            elif event == "reload" and streams:  # as if it had never been
                losses = [loss.detach().clone() for loss in losses]
                state = pytree.tree_map_only(torch.Tensor, torch.clone, pipe.stage_states())
                pipe.close()
                pipe = self.pipeline(streams=streams)
                pipe.load_stage_states(state, batches=t + 1)
        pipe.drain()
        told += [(one.updates, one.versions) for one in pipe.reports()]
        weights = [tensor.clone() for tensor in pipe.model.state_dict().values()]
        return [loss.item().hex() for loss in losses], told, weights, pipe.staleness


@pytest.mark.parametrize("seed", [*QUICK, *FOUND, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_recorded_stages_give_the_bits_of_simulate_for_random_programs(monkeypatch, seed):
    program = Program(seed)
    here = program.run(streams=False)
    if seed % 2:
        capture(monkeypatch, seed)
    there = program.run(streams=True)
    assert there[:2] == here[:2], program
    assert all(map(torch.equal, here[2], there[2])), program
    assert there[3] == here[3], program
