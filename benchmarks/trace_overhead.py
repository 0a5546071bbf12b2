"""What a trace costs: ResNet-20 in two stages, stretches of batches that are recorded and that are not, in turn.

    python benchmarks/trace_overhead.py [--rounds 8] [--turns 60] [--batch-size 16] [--out FILE]

Each round has one stretch of either kind, in changing order, and gives one ratio; the machine's other work is in both.
The stretch that is recorded holds all that a recording costs: noting, bringing it together, and writing the file. The
wall time is that of the slower stage, the processor time that of both with all their threads. On a busy machine either
differs by more than what is looked for; `account` does not: the processor time of the recording's own parts (beginning,
handing over and writing as it happens, noting by what a message costs more through a link that is noted), as a share of
that of the stretch that is not recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core import begin, everywhere
from start import in_processes, origin, settings_of, write_record
from torch import nn

import offbeat
from offbeat import models
from offbeat.core.links import Link, Message
from offbeat.core.links.local import Entrance
from offbeat.observe.tracing import EventRecorder, HostWatch, TracedLink, Tracing
from offbeat.studies.bench.timing import sgd, spread

K, M = 2, 4
WANTED = 1.02
AFTER = 2  # turns in which the first process hears of the others and writes
MADE = origin()  # of what was there at the beginning


def noting(messages: int = 20_000) -> float:
    """Processor seconds that one event costs: what a link that is noted takes longer, for a send and a receive."""

    def taken(link: Link) -> float:
        began = time.thread_time()
        for number in range(messages):
            link.send(Message(number))
            link.receive()
        return (time.thread_time() - began) / messages / 2

    return max(0.0, taken(TracedLink(Entrance(), EventRecorder(HostWatch()))) - taken(Entrance()))


def accounted(spent: list[float], name: str) -> None:
    """Have a part of every recording add the processor time that it takes."""
    part = getattr(Tracing, name)

    def timed(self: Tracing, **options: Any) -> None:
        began = time.thread_time()
        part(self, **options)
        spent[0] += time.thread_time() - began

    setattr(Tracing, name, timed)


def worker(options: argparse.Namespace) -> None:
    rank = begin()
    x, y = torch.randn(options.batch_size, 3, 32, 32), torch.randint(10, (options.batch_size,))
    pipe = offbeat.Pipeline(
        models.build("resnet20"), K, method=offbeat.ADL(M=M), loss=nn.functional.cross_entropy, optimizer=sgd, sample=x
    )
    folder = tempfile.TemporaryDirectory(prefix="trace-overhead-")
    file = Path(folder.name) / "trace.json"

    def steps(count: int) -> None:
        for _ in range(count):
            pipe.step(x, y)

    spent = [0.0]
    for part in ("_begin", "_hand_over", "_collect"):
        accounted(spent, part)

    def stretch(traced: bool) -> tuple[float, float, float]:
        spent[0] = 0.0
        before = pipe.batches
        if traced:
            pipe.trace(options.turns, file)
            start = pipe.tracing.start
        else:
            start = before + 2 * (K - 1) + 2 * M
        steps(start - before)
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        steps(options.turns + AFTER)
        wall, cpu = time.perf_counter() - began, time.process_time() - busy
        while max(everywhere(float(pipe.tracing is not None))):
            steps(1)
        return max(everywhere(wall)), sum(everywhere(cpu)), sum(everywhere(spent[0]))

    steps(20)
    found: list[dict[str, Any]] = []
    for number in range(options.rounds):
        taken = {traced: stretch(traced) for traced in ((False, True) if number % 2 == 0 else (True, False))}
        found.append({"without": taken[False], "with": taken[True]})
        if rank == 0:
            (wall, cpu, _), (wall_too, cpu_too, _) = taken[False], taken[True]
            print(
                f"round {number + 1} of {options.rounds}: wall {wall:.2f} s without, ratio {wall_too / wall:.4f}; "
                f"processor {cpu:.2f} s without, ratio {cpu_too / cpu:.4f}",
                flush=True,
            )
    if rank == 0:
        summary(options, found, json.loads(file.read_text()))
    pipe.close()
    dist.barrier()
    folder.cleanup()
    dist.destroy_process_group()


def summary(options: argparse.Namespace, found: list[dict[str, Any]], trace: dict[str, Any]) -> None:
    events = sum(event["ph"] == "X" for event in trace["traceEvents"])
    each = noting()
    rows = {
        "wall": spread([one["with"][0] / one["without"][0] for one in found]),
        "processor": spread([one["with"][1] / one["without"][1] for one in found]),
        "account": spread([(each * events + one["with"][2]) / one["without"][1] for one in found]),
    }
    for name, (middle, least, most) in rows.items():
        print(f"{name:10s} {middle:.5f} ({least:.5f}, {most:.5f})")
    write_record(
        options.out,
        {
            "settings": {"model": "resnet20", "K": K, "M": M, **settings_of(options)},
            "wanted": f"wall below {WANTED}",
            "good": rows["wall"][0] < WANTED,
            "ratios": rows,
            "events_a_batch": events / options.turns,
            "seconds_an_event": each,
            "stretches": found,
            "provenance": MADE,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
    else:
        sys.exit(in_processes(K, sys.argv[1:]))


if __name__ == "__main__":
    main()
