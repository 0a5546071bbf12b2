"""What compressed messages cost in accuracy: short runs of ADL that differ in nothing else, on a CPU.

    python benchmarks/messages.py [--seeds 3] [--out docs/results/messages-2cores.json]

Each run is in one process (engine simulate); the bits are those of K processes. "int8, no feedback" drops what rounding
leaves out of gradients instead of adding it to the next message. The record is written after every run, and the same
command continues it.
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
from start import origin, write_record

import offbeat
from offbeat.core import compression
from offbeat.runs.recipe import make_recipe

NO_FEEDBACK = "int8, no feedback"
FORMATS = ("exact", "bf16", "int8", NO_FEEDBACK)
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": "digits",
        "model": "resnet8",
        "K": 4,
        "units": "layers",
        "epochs": 12,
        "batch_size": 16,
        "warmup": 1.0,
    },
    "text": {
        "data": "text",
        "model": "gpt:layers=6,width=64,heads=2,context=64",
        "K": 4,
        "samples": 3072,
        "epochs": 1,
        "batch_size": 16,
    },
}
M = 2


class WithoutFeedback(compression.Compression):
    """int8 messages whose rounding errors are dropped."""

    def _gradient(self, place: int, gradient: torch.Tensor) -> Any:
        return compression.encoded(gradient, self.messages)


def run(task: str, messages: str, seed: int) -> dict[str, float]:
    """The test metrics after the last epoch, and the training loss."""
    from offbeat.pipeline import assembly

    recipe = make_recipe(
        **TASKS[task],
        method="adl",
        settings={"M": M},
        engine="simulate",
        seed=seed,
        messages=messages.partition(",")[0],
        threads_per_stage=1,
    )
    before = assembly.Compression
    assembly.Compression = WithoutFeedback if messages == NO_FEEDBACK else before  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            offbeat.train(recipe, out=out)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    finally:
        assembly.Compression = before  # type: ignore[misc]
    last = [line for line in lines if line["kind"] == "epoch"][-1]
    return {name: value for name, value in last.items() if name.startswith(("test_", "train_"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(options.out) if options.out else None
    record: dict[str, Any] = {"settings": {"tasks": TASKS, "M": M}, "runs": [], "provenance": origin()}
    if path is not None and path.exists():
        before = json.loads(path.read_text())
        if before["settings"] != record["settings"]:
            sys.exit(f"{path} has other settings: use another --out")
        record = before
    for seed in range(options.seeds):
        for task in options.tasks.split(","):
            for messages in FORMATS:
                key = {"task": task, "messages": messages, "seed": seed}
                if any(key.items() <= one.items() for one in record["runs"]):
                    continue
                began = time.monotonic()
                record["runs"].append({**key, **run(task, messages, seed)})
                print({**record["runs"][-1], "seconds": round(time.monotonic() - began)}, flush=True)
                write_record(path, record)


if __name__ == "__main__":
    main()
