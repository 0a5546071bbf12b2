"""Time a batch on one GPU: back-propagation eager and recorded, ADL on K streams, like against like, in one run.

    python benchmarks/gpu.py [--models resnet56,resnet110] [--batch-sizes 32] [-K 8] [-M 4] [--precision bf16]
                             [--compile|--fuse] [--tune] [--rounds 5] [--turns 200] [--device cuda] [--out FILE]
    python benchmarks/gpu.py --host [-K 8,14,28] [-M 1] [--schedule] [--rounds 20] [--turns 50]

Every round times each row in turn, after a warm-up in which its stages fill and record; what is compared are medians,
each ratio taken within its round. `host` is the share of the time that the host needs to ask for the work, while
nothing holds it up: where it is near 1, the host is the bottleneck. The batch lies on the device; no data is read.
"BP, recorded" does one batch after the other; "at once" those of a window, in K stages, which gives the same bits.
`held` are the bytes of the device that a row keeps; `rings` the slots and versions of its stages beside those that the
method needs at least.

With --host it prints the time that the host needs per turn, without a GPU: recorded work is emulated as in the tests,
and once all of it is recorded nothing is computed, so that only the bookkeeping is left (and four small copies of the
batch). It is the processor time of the fastest round. With --schedule the learning rates are on the device, and change
at every update. To compare two commits, alternate between them: the time depends
on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from start import origin, settings_of, write_record
from timed_pipeline import TimedPipeline, held
from torch import nn

import offbeat
from offbeat import models
from offbeat.engines import Engine
from offbeat.engines.streams import Streams
from offbeat.graphs import join as joining
from offbeat.graphs import recorder


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)


def rates_on_device(parameters: Any) -> torch.optim.Optimizer:
    """With learning rates as on a GPU."""
    made = sgd(parameters)
    for group in made.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], torch.tensor(group["lr"])
    return made


def decreasing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s / 1000))


class GpuRow(TimedPipeline):
    """A pipeline of one row, and the memory that it holds."""

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        model: str,
        b: int,
        K: int,
        *,
        engine: Engine | str,
        exact: bool = False,
    ) -> None:
        recorded, device = isinstance(engine, Streams), torch.device(options.device)
        before = held(device)
        torch.manual_seed(0)
        method = offbeat.BP(M=options.M) if exact else offbeat.ADL(M=options.M, weights=options.weights)
        shape = models.describe(model).shape
        x, y = torch.randn(b, *shape, device=device), torch.randint(10, (b,), device=device)
        pipe = offbeat.Pipeline(
            models.build(model, shape=shape, classes=10),
            K,
            method=method,
            loss=nn.functional.cross_entropy,
            optimizer=sgd,
            sample=x,
            device=device,
            engine=engine,
            precision=options.precision,
            compile=options.compile and recorded,
            fuse=options.fuse and recorded,
        )
        super().__init__(name, pipe, (x, y))
        self.held = held(device) - before

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "held": self.held}


def measured(options: argparse.Namespace, model: str, b: int) -> dict[str, Any]:
    """The rows of one model and batch size, in rounds."""
    device = torch.device(options.device)
    made = [
        GpuRow("BP, eager", options, model, b, 1, engine="simulate", exact=True),
        GpuRow("BP, recorded", options, model, b, 1, engine=Streams(1, device, together=1), exact=True),
    ]
    if 8 in options.K:
        made.append(GpuRow("BP, K=8, at once", options, model, b, 8, engine=Streams(8, device), exact=True))
    made += [GpuRow(f"ADL, K={K}", options, model, b, K, engine=Streams(K, device)) for K in options.K]
    for _ in range(options.rounds):
        for row in made:
            row.measure(options.turns)
            print(f"{model} {row.name}: {row.figures['ms'][-1]:.3f} ms", file=sys.stderr, flush=True)
    bp = made[1].figures["ms"]  # one batch after the other
    for row in made:
        ratios = [one / other for one, other in zip(bp, row.figures["ms"], strict=True)]
        print(
            f"{model:10} b={b:<4} {row.name:14} {median(row.figures['ms']):8.3f} ms "
            f"({min(row.figures['ms']):.3f}-{max(row.figures['ms']):.3f})  host {median(row.figures['host']):.2f}  "
            f"{median(ratios):.2f}x recorded BP",
            flush=True,
        )
    found = {"model": model, "batch_size": b, "rows": [row.as_dict() for row in made]}
    del made
    gc.collect()
    return found


def host_microseconds(K: int, M: int, *, rounds: int, turns: int, schedule: bool = False) -> float:
    """Processor time of the host per turn of ADL, in microseconds, while nothing that is launched computes."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import pytest
    from captured import capture

    computes = True
    with pytest.MonkeyPatch.context() as patch:
        capture(patch)
        piece = recorder.Recorded.__call__  # as emulated

        def launcher(nodes: joining.Nodes) -> Callable[[], None]:
            work: list[Any] = [graph for graph, _ in nodes]
            return lambda: [one.repeat() for one in work] and None if computes else None

        patch.setattr(recorder.Recorded, "__call__", lambda self: piece(self) if computes else None)
        patch.setattr(joining, "join", launcher)
        pipe = offbeat.Pipeline(
            [nn.Linear(2, 2) for _ in range(K)],
            method=offbeat.ADL(M=M),
            loss=nn.functional.cross_entropy,
            optimizer=rates_on_device if schedule else sgd,
            scheduler=decreasing if schedule else None,
            engine=Streams(K, torch.device("cpu")),
        )
        x, y = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)

        def run(n: int) -> float:
            began = time.thread_time()
            for _ in range(n):
                pipe._local.step([(x, y)])
            return (time.thread_time() - began) / n

        run(2 * K + 4 * M)  # all operations have been recorded
        computes = False
        run(12 * (2 * K + M))  # and all ticks joined
        return 1e6 * min(run(turns) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet56")
    parser.add_argument("--batch-sizes", default="32")
    parser.add_argument("-K", default="8", help="such as 2,4,8")
    parser.add_argument("-M", type=int, default=4)
    parser.add_argument("--weights", default="stash")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--tune", action="store_true", help="let cuDNN time its algorithms, for all rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--host", action="store_true", help="only the time of the host per turn, without a GPU")
    parser.add_argument("--schedule", action="store_true", help="with --host: a learning rate that changes")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.host:
        torch.set_num_threads(1)
        for K in map(int, options.K.split(",")):
            spent = host_microseconds(
                K, options.M, rounds=options.rounds, turns=options.turns, schedule=options.schedule
            )
            print(f"ADL K={K} M={options.M}: {spent:.0f} microseconds of the host per turn", flush=True)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu tries the benchmark, its times mean nothing")
    torch.backends.cudnn.benchmark = options.tune
    options.K = [int(K) for K in options.K.split(",")]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    models_and_sizes = [(m, int(b)) for m in options.models.split(",") for b in options.batch_sizes.split(",")]
    made = origin(on_gpu=options.device == "cuda")
    whole: dict[str, Any] = {"settings": settings_of(options), "found": [], "provenance": made}
    for model, b in models_and_sizes:
        whole["found"].append(measured(options, model, b))
        write_record(options.out, whole)  # what is measured is not lost if the next one takes too long


if __name__ == "__main__":
    main()
