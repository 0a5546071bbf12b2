"""Run folders for the tests of reports: real ones, with a trace and a diagnosis by their contract."""

from __future__ import annotations

import atexit
import json
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from small_recipe import SMALL

from offbeat.methods import named
from offbeat.ops import Backward, Forward, Update
from offbeat.runs.begin import begin, train_here
from offbeat.runs.build import check
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.timeline import Costs, timeline

NAMES = {Forward: "forward", Backward: "backward", Update: "update"}


def recipe(**given: object) -> Recipe:
    """A network of five units that trains in a moment."""
    return make_recipe(**{**SMALL, "epochs": 3, "method": "adl", "K": 3, "M": 2, **given})


@lru_cache
def _trained(**given: object) -> Path:
    folder = Path(mkdtemp(prefix="offbeat-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train_here(check(recipe(**given))[0], folder / "run", show=False)
    return folder / "run"


def run(path: Path, **given: object) -> Path:
    """A real run in a folder of its own; those of the same recipe are trained once."""
    shutil.copytree(_trained(**given), path)
    return path


def stopped(made: Recipe, out: Path, batches: int) -> None:
    """A run that ends after that many batches, without its last checkpoint."""
    made, _ = check(made)
    run = begin(made, out, show=False)
    steps = run.steps()
    for _ in range(batches):
        next(steps)
    steps.close()
    run.saver.close()
    run.close()


def trace(path: Path, *, K: int = 3, M: int = 2, costs: Costs | None = None) -> None:
    """trace.json of what the clock says, with a send of 0.1 ms behind each forward and backward."""
    costs = costs or Costs([0.010] * K, [0.020] * K, [0.001] * K)
    events: list[dict] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": k, "args": {"name": f"stage {k} of {K}"}}
        for k in range(1, K + 1)
    ]
    for span in timeline(named("adl", M=M), 60, costs):
        kind, t = NAMES[type(span.operation)], getattr(span.operation, "t", 0)
        place = {"ph": "X", "pid": 0, "tid": span.k, "args": {"batch": t}}
        start, end = span.start * 1e6, span.end * 1e6
        events.append({"name": f"{kind} {t}", "cat": kind, "ts": start, "dur": end - start, **place})
        if kind != "update":
            events[-1]["dur"] -= 100
            events.append({"name": f"send {t}", "cat": "send", "ts": end - 100, "dur": 100, **place})
    other = {"K": K, "M": M, "method": "adl", "turns": 60}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    (path / "trace.json").write_text(json.dumps(content))


def diagnosis(path: Path, *, K: int = 3, changes: bool = True) -> None:
    """diagnosis.jsonl of ten updates; without changes of the loss it is one of an earlier version."""
    lines = [
        {
            "stage": k,
            "update": s,
            "batch": 2 * s,
            "epoch": s // 3,
            "gap": 0.1 * (K - k) / (1 + s),
            "norm": 5.0 + k,
            "gradient": 1.0 / (1 + s),
            "cosine": 1 - 0.05 * (K - k),
            "lag": K - k,
            **({"predicted_change": -0.5, "fresh_change": -0.5 + 0.125 * (K - k)} if changes else {}),
        }
        for s in range(10)
        for k in range(1, K + 1)
    ]
    (path / "diagnosis.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def bench(path: Path) -> Path:
    """bench.json as `offbeat bench` writes it."""
    path.mkdir()

    def row(name: str, title: str, family: str, speeds: list[float], **more: object) -> dict:
        return {
            "name": name,
            "title": title,
            "family": family,
            "exact": True,
            "workers": 2,
            "staleness": [],
            "micro_batches": None,
            "sweep": {},
            "samples_per_second": speeds,
            "memory_per_worker": 400_000_000,
            "seconds_per_batch": [32 / speed for speed in speeds],
            "bytes_moved": 25_000_000,
            "note": "as it comes",
            **more,
        }

    rows = [
        row("bp", "back-propagation, one worker", "bp", [100.0, 104.0, 96.0], workers=1, bytes_moved=0, note=""),
        row(
            "torch-1f1b",
            "torch pipelining, 1F1B",
            "torch",
            [150.0, 149.0, 152.0],
            micro_batches=4,
            sweep={"2": 0.25, "4": 0.21},
        ),
        row("ddg", "Offbeat DDG", "offbeat", []),
        row("adl", "Offbeat ADL", "offbeat", [180.0, 185.0, 190.0], exact=False, staleness=[0.5, 0.0]),
    ]
    settings = {
        "model": "resnet20",
        "batch_size": 32,
        "K": 2,
        "M": 4,
        "device": "cpu",
        "cores": 2,
        "load": 0.1,
        "cores_shared": False,
        "cuts": [9],
        "rounds": 3,
        "batches": 8,
        "memory": "the most that a worker held",
    }
    bound = {"seconds_per_batch": [0.16, 0.16, 0.16], "samples_per_second": [200.0] * 3, "meaning": "the slowest stage"}
    content = {
        "settings": settings,
        "rows": rows,
        "bound": bound,
        "left_out": {"fr": "no time"},
        "provenance": {
            "command": ["offbeat", "bench"],
            "commit": "0" * 40,
            "machine": "a machine",
            "versions": {"torch": "2.13.0"},
        },
    }
    (path / "bench.json").write_text(json.dumps(content))
    return path


def scaling(path: Path) -> Path:
    """scaling.json as `offbeat bench scaling` writes it."""
    path.mkdir()

    def counted(K: int) -> dict:
        return {
            "model": "resnet110",
            "batch_size": 32,
            "K": K,
            "staleness": [(K - k) / 2 for k in range(1, K + 1)],
            "memory_counted": [1e8 / K + 1e6 * (K - k) for k in range(1, K + 1)],
        }

    points = [
        {
            "axis": "strong",
            **counted(K),
            "seconds_per_batch": [0.5 / K, 0.6 / K],
            "memory": [3e8 / K] * K,
            "staleness_measured": counted(K)["staleness"],
        }
        for K in (1, 2, 4)
    ]
    links = {"NVLink": 0.001, "10 GbE": 0.02, "Internet, 50 ms": 99}
    rows = [
        {"link": link, "method": method, "K": K, "m": 1, "seconds_per_batch": 0.5, "speedup": K / (1 + K * slow)}
        for method in ("adl", "gpipe")
        for link, slow in links.items()
        for K in (1, 4, 16, 64, 256)
    ]
    content = {
        "settings": {"model": "resnet110", "batch_size": 32, "method": "adl"},
        "points": points,
        "counted": [counted(2**power) for power in range(6)],
        "simulation": {"rows": rows, "meaning": "measured seconds of every unit"},
        "left_out": ["strong: K=8: only 4 cores"],
        "provenance": {"command": ["offbeat", "bench", "scaling"]},
    }
    (path / "scaling.json").write_text(json.dumps(content))
    return path
