"""Time a batch of several methods on K processes, one pinned core a stage, in one run and on the same cuts.

    python benchmarks/methods.py [--model resnet110] [--batch-size 32] [-K 4] [--methods bp,ddg,...] [--out FILE]

Every round times each method in turn after a warm-up in which its stages find their distance; the baseline is a
hand-written SGD loop in one process on one core, while the other cores are idle. What is compared are medians over the
rounds; each ratio is taken within its round.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from core import everywhere
from start import in_processes, origin, settings_of, write_record
from torch import nn

import offbeat
from offbeat import models
from offbeat.methods import named
from offbeat.studies.bench.timing import ratio, sgd, timed
from offbeat.timeline import balanced, speed_up

DEFAULT = "ddg,ddg:barrier=0,fr,gpipe,dsp,adl,adl-1f1b"


def parsed(text: str) -> offbeat.Method:
    """A method from 'gpipe:m=8' and the like."""
    name, *settings = text.split(":")
    pairs = (setting.partition("=") for setting in settings)
    return named(name, **{key: bool(int(value)) if key == "barrier" else int(value) for key, _, value in pairs})


def worker(options: argparse.Namespace) -> None:
    rank, K = int(os.environ["RANK"]), options.K
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = models.describe(options.model).shape
    model = models.build(options.model, shape=shape, classes=10)
    x, y = torch.randn(options.batch_size, *shape), torch.randint(10, (options.batch_size,))
    loss = nn.functional.cross_entropy
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())

    def bp() -> None:
        optimizer.zero_grad()
        loss(plain(x), y).backward()
        optimizer.step()

    names = options.methods.split(",")
    cuts, units = options.cuts, options.units
    pipes: dict[str, offbeat.Pipeline] = {}
    for name in names:
        pipes[name] = offbeat.Pipeline(
            copy.deepcopy(model), K, method=parsed(name), loss=loss, optimizer=sgd, sample=x, cuts=cuts, units=units
        )
        cuts, units = pipes[name].cuts, pipes[name].units
    times: dict[str, list[float]] = {name: [] for name in ("one core", *names)}
    for number in range(options.rounds):
        for name, pipe in pipes.items():
            dist.barrier()
            times[name].append(max(everywhere(timed(lambda: pipe.step(x, y), 2 * K, options.timed)[0])))  # noqa: B023
        dist.barrier()
        if rank == 0:
            times["one core"].append(timed(bp, 1, max(2, options.timed // 2))[0])
            print(
                f"round {number + 1}/{options.rounds}: "
                + ", ".join(f"{name} {1000 * values[-1]:.0f} ms" for name, values in times.items()),
                flush=True,
            )
        dist.barrier()
    if rank == 0:
        summary(options, times, pipes)
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def summary(options: argparse.Namespace, times: dict[str, list[float]], pipes: dict[str, offbeat.Pipeline]) -> None:
    rows: dict[str, Any] = {}
    for name, pipe in pipes.items():
        middle, least, most = ratio(times, "one core", name)
        rows[name] = {
            "speedup": middle,
            "least": least,
            "most": most,
            "law": speed_up(pipe.method, balanced(options.K)),
            "staleness": [pipe.method.staleness(k, options.K) for k in range(1, options.K + 1)],
        }
        print(f"  {name:16s} {middle:5.2f} times one core ({least:.2f}, {most:.2f}), law {rows[name]['law']:.2f}")
    order = sorted(rows, key=lambda name: rows[name]["speedup"])
    print("slowest to fastest: " + " < ".join(order))
    first = next(iter(pipes.values()))
    write_record(
        options.out,
        {
            "settings": settings_of(options),
            "cuts": first.cuts,
            "units": first.units,
            "rows": rows,
            "order": order,
            "seconds_a_batch": times,
            "median_seconds": {name: median(values) for name, values in times.items()},
            "provenance": origin(),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("-K", type=int, default=4)
    parser.add_argument("--methods", default=DEFAULT)
    parser.add_argument("--cuts", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--units", choices=["blocks", "layers"])
    parser.add_argument("--timed", type=int, default=8, help="batches timed in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    sys.exit(in_processes(options.K, sys.argv[1:]))


if __name__ == "__main__":
    main()
