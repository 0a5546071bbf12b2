"""What checkpoints cost: ResNet-56 in two stages, stretches of 200 batches with one checkpoint and with none, in turn.

The checkpoint lies in the middle of its stretch, so that all it sets off ends there too. Each round has one stretch of
either kind, in changing order, and gives one ratio; the machine's other work is in both. `pause` is how long the stages
stood still for a checkpoint, as the run itself tells it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core import begin, everywhere
from start import say
from torch import nn
from torture import as_workers, write

import offbeat
from offbeat import models
from offbeat.runs.recipe import make_recipe
from offbeat.runs.saving import Saver
from offbeat.studies.bench.timing import sgd, spread

K, M, BATCH_SIZE, EVERY = 2, 4, 16, 200
WANTED = 1.02


def worker(options: argparse.Namespace) -> None:
    rank = begin()
    model = models.build("resnet56")
    x, y = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(10, (BATCH_SIZE,))
    loss = nn.functional.cross_entropy
    pipe = offbeat.Pipeline(model, K, method=offbeat.ADL(M=M), loss=loss, optimizer=sgd, sample=x)
    recipe = make_recipe(
        model="resnet56", data="synthetic", K=K, M=M, batch_size=BATCH_SIZE, checkpoint_every=f"{EVERY}b"
    )
    place: list[Any] = [None]
    temporary = tempfile.TemporaryDirectory(prefix="torture-overhead-") if rank == 0 else None
    if temporary:
        place[0] = temporary.name
    dist.broadcast_object_list(place)
    notes: list[dict[str, Any]] = []
    saver = Saver(recipe, 10**6, pipe, Path(place[0]), lambda kind, **values: notes.append({"kind": kind, **values}))

    def stretch(batches: int, saving: bool) -> tuple[float, float]:
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(batches):
            if saving:
                saver.before(pipe.batches)
            pipe.step(x, y)
            if saving:
                if saver.due(pipe.batches):
                    saver.save({})
                saver.collect()
        wall, cpu = time.perf_counter() - began, time.process_time() - busy
        return max(everywhere(wall)), sum(everywhere(cpu))

    stretch(EVERY // 2, False)
    found: list[dict[str, Any]] = []
    for number in range(options.rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        taken = {saving: stretch(EVERY, saving) for saving in order}
        found.append({"without": taken[False], "with": taken[True]})
        if rank == 0:
            say(
                f"round {number + 1} of {options.rounds}: {taken[False][0]:.1f} s without, {taken[True][0]:.1f} with, "
                f"ratio {taken[True][0] / taken[False][0]:.3f}; pause {1000 * notes[-1].get('pause', 0):.0f} ms, "
                f"{notes[-1].get('bytes', 0) / 1e6:.1f} MB"
            )
    saver.close()
    if rank == 0:
        summary(options, found, notes)
    pipe.close()
    dist.barrier()
    if temporary:
        temporary.cleanup()
    dist.destroy_process_group()


def summary(options: argparse.Namespace, found: list[dict[str, Any]], notes: list[dict[str, Any]]) -> None:
    rows = {
        "wall": spread([each["with"][0] / each["without"][0] for each in found]),
        "processor": spread([each["with"][1] / each["without"][1] for each in found]),
        "pause_share": spread([note["pause"] / each["without"][0] for note, each in zip(notes, found, strict=True)]),
    }
    for name, (middle, least, most) in rows.items():
        print(f"{name:12s} {middle:.4f} ({least:.4f}, {most:.4f})")
    write(
        options.out,
        {
            "settings": {
                "model": "resnet56",
                "K": K,
                "M": M,
                "batch_size": BATCH_SIZE,
                "every": EVERY,
                "rounds": options.rounds,
            },
            "wanted": f"wall below {WANTED}",
            "good": rows["wall"][0] < WANTED,
            "ratios": rows,
            "stretches": found,
            "checkpoints": notes,
        },
    )


def run(options: argparse.Namespace) -> bool:
    if options.worker:
        worker(options)
        return True
    return as_workers(options, K)
