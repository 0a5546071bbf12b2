"""What a slow link costs: K=3 processes whose stages sleep instead of compute, links that hold every message back.

A stage sleeps 33 ms in the forward and 67 ms in the backward of a batch, a micro-batch its share. The links are those
of the engine; the sender writes the time into the message, and the receiver has it only 20 ms after that (the clock is
one for all processes of a machine). Each round times every method without and with the delay, on the same pipeline.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from core import everywhere
from start import say
from torch import Tensor, nn
from torture import as_workers, write

import offbeat
from offbeat.core.links import Link, Message
from offbeat.methods import named
from offbeat.studies.bench.timing import timed
from offbeat.timeline import Costs, period

K, LATENCY = 3, 0.020
FORWARD, BACKWARD = 0.033, 0.067
SAMPLES, WARM_UP, TIMED = 8, 16, 40
METHODS = {"adl": {"M": 4}, "adl-1f1b": {"M": 4}, "gpipe": {"m": 4}}
WANTED = 0.95


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD * len(x) / SAMPLES)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        time.sleep(BACKWARD * len(gradient) / SAMPLES)
        return gradient


class Sleeper(nn.Module):
    """A stage: next to no computation, and a sleep."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.linear(x))


class Delayed:
    """One end of a link; what it receives is there only `delay` seconds after it was sent."""

    delay = 0.0  # of all links of this process

    def __init__(self, link: Link) -> None:
        self.link = link

    def send(self, message: Message) -> None:
        self.link.send(Message(message.t, [time.monotonic(), message.content], message.kind))

    def receive(self) -> Message:
        message = self.link.receive()
        sent, content = message.content
        time.sleep(max(0.0, sent + Delayed.delay - time.monotonic()))
        return Message(message.t, content, message.kind)


def delay(pipe: offbeat.Pipeline) -> None:
    """Put the delay around the links of a pipeline to other processes."""
    links = pipe.workers[0].links
    for name in ("inputs", "outputs", "gradients", "feedback"):
        link = getattr(links, name)
        if link is not None and not (name == "inputs" and pipe.first):  # there the batches enter
            setattr(links, name, Delayed(link))


def predicted(name: str) -> tuple[float, float]:
    """Seconds a batch by the clock, without and with the latency. A message of a micro-batch is under way as long as
    that of a whole batch, where the clock takes a share."""
    method = named(name, **METHODS[name])
    late = [LATENCY * method.m] * (K - 1)
    return (
        period(method, Costs([FORWARD] * K, [BACKWARD] * K)),
        period(method, Costs([FORWARD] * K, [BACKWARD] * K, up=late, down=late)),
    )


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    x, y = torch.randn(SAMPLES, 4), torch.randint(2, (SAMPLES,))
    pipes = {}
    for name, settings in METHODS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(Sleeper() for _ in range(K - 1)), Sleeper(2))
        pipes[name] = offbeat.Pipeline(
            model,
            K,
            method=named(name, **settings),
            loss=nn.functional.cross_entropy,
            cuts=[1, 2],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )
        delay(pipes[name])
    times: dict[str, list[list[float]]] = {name: [] for name in pipes}
    for number in range(options.rounds):
        for name, pipe in pipes.items():
            found = []
            for Delayed.delay in (0.0, LATENCY) if number % 2 == 0 else (LATENCY, 0.0):
                dist.barrier()
                found.append(max(everywhere(timed(lambda: pipe.step(x, y), WARM_UP, TIMED)[0])))  # noqa: B023
            times[name].append(found if number % 2 == 0 else found[::-1])
            if first:
                at_once, late = times[name][-1]
                say(
                    f"round {number + 1} of {options.rounds}: {name} {1000 * at_once:.1f} ms a batch, with the delay "
                    f"{1000 * late:.1f}"
                )
    if first:
        summary(options, times)
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def summary(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    rows = {}
    for name, pairs in times.items():
        ratios = [at_once / late for at_once, late in pairs]
        clock = predicted(name)
        rows[name] = {
            "throughput_kept": [median(ratios), min(ratios), max(ratios)],
            "clock": clock[0] / clock[1],
            "clock_seconds": clock,
            "seconds_a_batch": pairs,
        }
        print(
            f"{name:10s} keeps {median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) of its throughput; by the "
            f"clock {clock[0] / clock[1]:.3f}"
        )
    write(
        options.out,
        {
            "settings": {
                "K": K,
                "latency": LATENCY,
                "forward": FORWARD,
                "backward": BACKWARD,
                "methods": METHODS,
                "rounds": options.rounds,
                "timed": TIMED,
                "warm_up": WARM_UP,
            },
            "wanted": f"adl keeps more than {WANTED}",
            "good": rows["adl"]["throughput_kept"][0] > WANTED,
            "rows": rows,
        },
    )


def run(options: argparse.Namespace) -> bool:
    if options.worker:
        worker(options)
        return True
    return as_workers(options, K)
