"""Runs with replicas whose final weights must not depend on the engine.

As a script under torchrun it trains every case that fits the number of processes and writes the final weights:

    torchrun --nproc-per-node 4 tests/replica_cases.py OUT plain recorded resumed
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cases import fingerprint
from torch import Tensor, nn

import offbeat
from offbeat.engines.processes import Processes
from offbeat.methods import METHODS

Batches = list[tuple[Tensor, Tensor]]


class Sometimes(nn.Module):
    """A layer that is used only where the first value of a batch is positive: else its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) if x[0, 0] > 0 else x


def layers(dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


def branching() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 6)), nn.Sequential(Sometimes(), nn.Tanh()), nn.Linear(6, 4)
    )


def images(n: int, *, sizes: tuple[int, ...] = (5,), seed: int = 7) -> Batches:
    g = torch.Generator().manual_seed(seed)
    made = itertools.islice(itertools.cycle(sizes), n)
    return [(torch.randn(b, 3, 4, 4, generator=g), torch.randint(4, (b,), generator=g)) for b in made]


def with_nan(n: int) -> Batches:
    """A loss that is not finite in one replica alone, and at once in both."""
    found = images(n)
    for x, _ in (found[t] for t in (5, 10, 11) if t < n):
        x[0] = torch.nan
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


@dataclass(frozen=True)
class Case:
    method: offbeat.Method | str
    K: int = 2
    R: int = 2
    model: Callable[[], nn.Module] = layers
    batches: Callable[[int], Batches] = images
    N: int = 9  # batches of each replica
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shares(self) -> list[Batches]:
        """The batches of every replica, as fit gives them."""
        given = self.batches(self.N * self.R)
        return [given[replica :: self.R] for replica in range(self.R)]


TRAINED = {name: make() for name, make in METHODS.items()}
TRAINED = {name: method for name, method in TRAINED.items() if not method.why_no_replicas()}
CASES = {f"method-{name}": Case(method) for name, method in TRAINED.items() if not (method.limit and method.limit(2))}
ADL = offbeat.ADL(M=2)
CASES |= {
    "uneven": Case(ADL, batches=lambda n: images(n, sizes=(5, 3, 4)), options=(("weighting", "samples"),)),
    "uneven-gpipe": Case(
        offbeat.GPipe(m=2), batches=lambda n: images(n, sizes=(5, 3, 4)), options=(("weighting", "samples"),)
    ),
    "unused": Case(ADL, model=branching),
    "clipped": Case(offbeat.ADL(M=3, corrector="sc"), N=11, options=(("clip_norm", 0.1),)),
    "skipped": Case(offbeat.ADL(M=1), batches=with_nan, options=(("on_nan", "skip"),)),
    "recomputed": Case(offbeat.ADL(M=2, recompute=True)),
    "int8-messages": Case(ADL, options=(("messages", "int8"),)),
    "left-out": Case(ADL, options=(("left_out", (2, 3)),)),
    "warmed-up": Case(ADL, options=(("staleness_warmup", 2),)),
    "under-way": Case(offbeat.TwoBW(M=3), N=11),  # sums are under way for a whole window
    "under-way-clipped": Case(
        offbeat.TwoBW(M=3), N=11, options=(("clip_norm", 0.1), ("clip_over", "model"), ("weighting", "samples"))
    ),
    "three": Case(ADL, K=1, R=3),
    "three-2bw": Case(offbeat.TwoBW(M=2), K=1, R=3),
    "adaptive": Case(offbeat.ADL(M=1, corrector="dc:2:adaptive=yes+lookahead")),
    "three-adaptive": Case(offbeat.TwoBW(M=2, corrector="dc:2:adaptive=yes"), K=1, R=3),
    "three-bp": Case(offbeat.BP(M=2), K=1, R=3, batches=lambda n: images(n, sizes=(5, 3))),
}


# The same arithmetic as torch's DistributedDataParallel, without random numbers
EXACT = Case(
    offbeat.BP(), model=lambda: layers(dropout=0.0).double(), batches=lambda n: [(x.double(), y) for x, y in images(n)]
)
RECORDED = (
    "method-adl",
    "method-2bw",
    "method-gpipe",
    "method-fr",
    "uneven",
    "clipped",
    "skipped",
    "recomputed",
    "under-way",
    "three",
    "three-2bw",
)
RESUMED = ("clipped", "int8-messages", "adaptive", "three-2bw", "three-adaptive")  # from a checkpoint
WAYS = {"plain": tuple(CASES), "recorded": RECORDED, "resumed": RESUMED}


def pipeline(case: Case, **options: Any) -> offbeat.Pipeline:
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # in several processes the weights of the first must win
    return offbeat.Pipeline(
        case.model(),
        case.K,
        method=case.method,
        replicas=case.R,
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        cuts=[1, 2][: case.K - 1],
        sample=case.batches(1)[0][0],
        seed=3,
        **{"scheduler": decaying, **dict(case.options), **options},
    )


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))


def at(pipe: offbeat.Pipeline, case: Case, t: int) -> tuple[Any, ...]:
    """What this process gives to step t."""
    batches = [share[t] for share in case.shares]
    if not pipe.first:
        return ()
    return (
        tuple(map(list, zip(*batches, strict=True)))
        if pipe.engine.leads and not pipe.engine.waits
        else batches[pipe.replica]
    )


def train(case: Case, *, engine: Callable[[], Any] = lambda: None, folder: str | None = None) -> dict[str, Any]:
    """Train a case by step(), with a drain and an evaluation; with a folder, a new pipeline continues from there."""
    pipe = pipeline(case, engine=engine())
    losses = []
    for t in range(case.N):
        if t == 4:
            pipe.drain()
        if t == 7 and folder:
            pipe.save(folder)
            pipe.close()
            pipe = pipeline(case, engine=engine())
            pipe.load(folder)
        loss = pipe.step(*at(pipe, case, t))
        losses.append(None if loss is None else float(loss))
    middle = pipe.evaluate(images(2, seed=1) if pipe.leads else None)
    pipe.drain()
    state, buffers = pipe.model.state_dict(), dict(pipe.model.named_buffers())
    result = {
        "weights": fingerprint({name: tensor for name, tensor in state.items() if name not in buffers}),
        "buffers": fingerprint(buffers),
        "evaluate": middle,
        "staleness": [dict(stage) for stage in pipe.staleness],
        "losses": losses,
        "replica": pipe.replica,
    }
    pipe.close()
    return json.loads(json.dumps(result))


def distributed_data_parallel(out: str) -> None:
    """The same training by torch: BP on the whole model, in as many processes as there are replicas."""
    case, rank = EXACT, torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(case.model())
    optimizer = sgd(model.parameters())
    for x, y in case.shares[rank]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{out}/ddp.pt")


def main(out: str, *ways: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "ddp" in ways:
        distributed_data_parallel(out)
        return torch.distributed.destroy_process_group()
    results: dict[str, dict[str, dict]] = {how: {} for how in ways}
    for how, (name, case) in itertools.product(ways, CASES.items()):
        if size == case.K * case.R and name in WAYS[how]:
            engine = partial(Processes, case.K, replicas=case.R, recorded=how == "recorded")
            folder = f"{out}/{name}" if how == "resumed" else None
            results[how][name] = train(case, engine=engine, folder=folder)
    with open(f"{out}/{size}-{rank}.json", "w") as file:
        json.dump(results, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
