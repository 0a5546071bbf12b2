"""What the engine costs, as ratios measured in one run (absolute times on a shared machine mean little).

    make bench
    python benchmarks/core.py [--model resnet56] [--batch-size 64] [-K 2] [-M 4] [--cuts 12] [--rounds 5] [--minutes 8]
                              [--out FILE]

Every round times each of these in turn, a few batches each, one pinned core a stage:

    pipeline    ADL on K processes
    bound       the same stages computing at the same time on fixed messages, nothing sent: the slowest one
    bp          a hand-written SGD loop in one process on one core
    bp-cores    the same loop on K cores
    simulate    our simulator at K=1 on one core

After --minutes no round is begun that would not end in time; the record is written from those that were (at least one).
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from start import in_processes, origin, settings_of, write_record
from torch import nn

import offbeat
from offbeat import models
from offbeat.studies.bench.contenders import without_messages
from offbeat.studies.bench.timing import pin, ratio, sgd, timed
from offbeat.studies.plan import Measured, make_plan

TIMED = 8  # batches


def worker(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    options.timed = -(-options.timed // options.M) * options.M  # whole windows: as many updates in every stage
    rank, K = int(os.environ["RANK"]), options.K

    def say(line: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - begun:4.0f} s] {line}", flush=True)

    all_cores = sorted(os.sched_getaffinity(0))
    mine = {all_cores[rank % len(all_cores)]}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = tuple(options.shape) if options.shape else models.describe(options.model).shape
    model = models.build(options.model, shape=shape, classes=10)
    x, y = torch.randn(options.batch_size, *shape), torch.randint(10, (options.batch_size,))
    planned: list[Any] = [None]
    if rank == 0 and options.plan:  # before it is pinned: planning runs all stages at once, on cores of their own
        say(f"profiling {options.model}")
        measured = Measured.of(options.model, model, x, options.batch_size)
        say(f"cutting {len(measured.profile.units)} units into {K} stages")
        plan, _ = make_plan(measured, offbeat.ADL(M=options.M), K)
        planned[0] = plan.as_dict()
        say(
            f"planned: cuts {plan.cuts}, balance {plan.balance:.3f}, {plan.predicted_speedup:.2f} times; "
            + "; ".join(plan.notes)
        )
    dist.broadcast_object_list(planned)
    pin(mine)
    cuts, units = (planned[0]["cuts"], "layers") if planned[0] else (options.cuts, None)
    loss = nn.functional.cross_entropy
    plain, alone = copy.deepcopy(model), copy.deepcopy(model)

    pipe = offbeat.Pipeline(
        model, K, method=offbeat.ADL(M=options.M), loss=loss, optimizer=sgd, sample=x, cuts=cuts, units=units
    )
    say("filling the pipeline")
    for _ in range(4 * K):
        pipe.step(x, y)
    bound = without_messages(pipe, rank, lambda: pipe.step(x, y))
    optimizer = sgd(plain.parameters())
    one = offbeat.Pipeline(alone, 1, method="bp", loss=loss, optimizer=sgd, engine="simulate")

    def bp() -> None:
        optimizer.zero_grad()
        loss(plain(x), y).backward()
        optimizer.step()

    times: dict[str, list[float]] = {name: [] for name in ("pipeline", "bound", "bp", "bp-cores", "simulate")}
    busy: dict[str, list[float]] = {"pipeline": [], "bound": []}
    stages: list[list[float]] = []
    for number in range(options.rounds):
        before = time.monotonic()
        for name, work in (("pipeline", lambda: pipe.step(x, y)), ("bound", bound)):
            dist.barrier()
            wall, cpu = timed(work, 2 * K, options.timed)
            found = everywhere(wall)
            times[name].append(max(found))
            busy[name].append(sum(everywhere(cpu)))
        stages.append(found)
        for name, work in (("bp", bp), ("simulate", lambda: one.step(x, y)), ("bp-cores", bp)):
            dist.barrier()
            if rank == 0:
                if name == "bp-cores":
                    torch.set_num_threads(K)
                    pin(set(all_cores[:K]))
                times[name].append(timed(work, 2, max(2, 2 * options.timed // K))[0])
                torch.set_num_threads(1)
                pin(mine)
            dist.barrier()
        say(
            f"round {number + 1} of {options.rounds}: "
            + ", ".join(f"{name} {1000 * values[-1]:.0f} ms" for name, values in times.items() if values)
        )
        now = time.monotonic()
        late = [options.minutes is not None and now - begun + (now - before) > 60 * options.minutes]
        dist.broadcast_object_list(late)  # the first process decides for all
        if late[0]:
            say(f"no time for another round in {options.minutes:g} minutes")
            break
    if rank == 0:
        summary(options, times, busy, stages, pipe, planned[0])
    pipe.close()
    dist.destroy_process_group()


def begin() -> int:
    """In a worker: one thread on a core of its own, in the group of all; its rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pin({dist.get_rank()})
    torch.manual_seed(0)
    return dist.get_rank()


def everywhere(seconds: float) -> list[float]:
    """The figure of every process."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([seconds], dtype=torch.float64))
    return [value.item() for value in found]


def summary(
    options: argparse.Namespace,
    times: dict[str, list[float]],
    busy: dict[str, list[float]],
    stages: list[list[float]],
    pipe: offbeat.Pipeline,
    planned: dict[str, Any] | None,
) -> None:
    K, rounds = options.K, len(stages)
    balance = [sum(row) / len(row) / max(row) for row in stages]
    ratios = {
        "pipeline_over_bound": ratio(times, "pipeline", "bound"),
        "simulator_over_loop": ratio(times, "simulate", "bp"),
        "speedup_over_one_core": ratio(times, "bp", "pipeline"),
        "speedup_over_all_cores": ratio(times, "bp-cores", "pipeline"),
        "speedup_of_the_cut": ratio(times, "bp", "bound"),
        "balance": (median(balance), min(balance), max(balance)),
        "work_over_bound": ratio(busy, "pipeline", "bound"),
    }
    meaning = {
        "pipeline_over_bound": f"pipeline, K={K} / slowest stage without communication",
        "simulator_over_loop": "simulator, K=1 / hand-written loop",
        "speedup_over_one_core": "speed-up of the pipeline over BP on one core",
        "speedup_over_all_cores": f"speed-up of the pipeline over BP on {K} cores",
        "speedup_of_the_cut": "speed-up that the cut allows (BP on one core / bound)",
        "balance": "balance of the cut (mean / slowest stage)",
        "work_over_bound": "processor time of all stages / without communication",
    }
    if planned:
        foretold = planned["predicted_speedup"]
        middle, least, most = ratios["speedup_over_one_core"]
        ratios["planned_over_measured"] = foretold / middle, foretold / most, foretold / least
        meaning["planned_over_measured"] = "planned speed-up / measured"
    print(
        f"\n{options.model}, b={options.batch_size}, K={K}, M={options.M}, cuts {pipe.cuts}; median (least, most) of "
        f"{rounds} rounds"
    )
    for name, (middle, least, most) in ratios.items():
        print(f"  {meaning[name]:58s} {middle:6.3f}  ({least:.3f}, {most:.3f})")
    write_record(
        options.out,
        {
            "settings": settings_of(options),
            "cuts": pipe.cuts,
            "rounds": rounds,
            "ratios": ratios,
            "seconds_a_batch": times,
            "planned": planned,
            "provenance": origin(),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("-K", type=int, default=2)
    parser.add_argument("-M", type=int, default=4)
    parser.add_argument("--plan", action="store_true", help="cut by the plan, inside blocks, and record its prediction")
    parser.add_argument("--shape", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--timed", type=int, default=TIMED, help="batches timed in each round")
    parser.add_argument("--cuts", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, help="begin no round that would end after so long")
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    sys.exit(in_processes(options.K, sys.argv[1:]))


if __name__ == "__main__":
    main()
