"""Two processes that train for long, with checkpoints: does their memory grow?

The resident memory of each worker is read from outside every few seconds. A straight line is laid through what comes
after the warm-up, the first third (allocators and caches fill): its slope in MB an hour, with its standard error and
what it came to over the time looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from start import say
from torture import write
from torture_kills import Command, processes, wait_for

K = 2
RECIPE = shlex.split(
    f"--model resnet8 --data synthetic --samples 2048 --batch-size 32 --epochs 100000 --method adl -M 2 -K {K} "
    "--engine processes --threads-per-stage 1 --checkpoint-every 100b --json"
)
GROWTH = 0.02  # of what a worker holds, over the time looked at: less counts as flat


def resident(pid: int) -> float:
    """MB."""
    pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(seconds: list[float], values: list[float]) -> dict[str, float]:
    """MB an hour by least squares, its standard error, and the growth over the whole time in MB."""
    x, y = np.array(seconds) / 3600, np.array(values)
    design = np.stack([x, np.ones_like(x)], axis=1)
    (rate, start), *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ [rate, start]
    spread = float(np.sqrt(residual @ residual / max(1, len(x) - 2) / ((x - x.mean()) ** 2).sum()))
    return {
        "mb_an_hour": float(rate),
        "standard_error": spread,
        "growth": float(rate * (x[-1] - x[0])),
        "first": float(y[0]),
        "last": float(y[-1]),
        "most": float(y.max()),
    }


def run(options: argparse.Namespace) -> bool:
    place = Path(tempfile.mkdtemp(prefix="torture-soak-"))
    folder = place / "run"
    command = Command(place, "soak", *RECIPE, "--out", str(folder))
    if not wait_for(lambda: (folder / "checkpoints").exists() or command.over, 120, 0.1) or command.over:
        raise SystemExit(f"the run did not begin: {command.errors.read_text()}")
    workers = {int(rank) + 1: pid for pid, rank in processes(folder).items() if rank}
    times: list[float] = []
    found: dict[int, list[float]] = {k: [] for k in sorted(workers)}
    begun = time.monotonic()
    while time.monotonic() - begun < 60 * options.minutes and not command.over:
        try:
            now = {k: resident(pid) for k, pid in workers.items()}
        except OSError:  # a worker is gone
            break
        times.append(round(time.monotonic() - begun, 2))
        for k, value in now.items():
            found[k].append(value)
        if len(times) % 6 == 1:
            say(
                f"{times[-1] / 60:.1f} of {options.minutes:g} minutes: "
                + ", ".join(f"stage {k} {values[-1]:.1f} MB" for k, values in found.items())
            )
        time.sleep(max(0.0, options.every - (time.monotonic() - begun) % options.every))
    survived = not command.over
    if survived:
        os.kill(command.process.pid, signal.SIGINT)
    code = command.end()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = max((line["batch"] for line in lines if line["kind"] == "train"), default=0)
    checkpoints = sum(line["kind"] == "checkpoint" for line in lines)
    return told(
        options,
        times,
        found,
        {"survived": survived, "exit_code": code, "batches": batches, "checkpoints": checkpoints},
        place,
    )


def told(
    options: argparse.Namespace, times: list[float], found: dict[int, list[float]], facts: dict[str, Any], place: Path
) -> bool:
    warm = len(times) // 3
    rows = {f"stage {k}": slope(times[warm:], values[warm:]) for k, values in found.items()}
    flat = all(row["growth"] < GROWTH * row["first"] for row in rows.values())
    good = bool(flat and facts["survived"] and facts["exit_code"] == 130)
    for name, row in rows.items():
        print(
            f"{name}: {row['mb_an_hour']:+.2f} MB an hour (standard error {row['standard_error']:.2f}), "
            f"{row['first']:.1f} MB after the warm-up, {row['last']:.1f} at the end"
        )
    print(
        f"{facts['batches']} batches, {facts['checkpoints']} checkpoints in {times[-1] / 60:.1f} minutes; exit code "
        f"{facts['exit_code']} after Ctrl-C"
    )
    write(
        options.out,
        {
            "settings": {"minutes": options.minutes, "every": options.every, "recipe": RECIPE, "warm_up": times[warm]},
            "wanted": f"growth after the warm-up below {GROWTH:.0%} of what each process holds",
            "good": good,
            **facts,
            "rows": rows,
            "seconds": times,
            "resident_mb": {f"stage {k}": values for k, values in found.items()},
        },
    )
    if good:
        shutil.rmtree(place)
    return good
