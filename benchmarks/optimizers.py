"""Time a turn of the GPT of `reproduce gpt-staleness` with different optimizers and correctors, on one GPU.

    python benchmarks/optimizers.py [-K 12] [-M 4] [--rows adamw,adamw+lwp,muon,rotated-adam] [--rounds 5]
                                    [--turns 200] [--device cuda] [--out FILE]

A row is an optimizer, or an optimizer and correctors (`muon+auto`). Every round times each row in turn; medians are
compared, each ratio taken within its round: an optimizer with AdamW, both without correctors, and an optimizer with
correctors with the same one without. The stages are recorded (engine `streams`) and have the lag of 1F1B. Aim: at most
1.15 times.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from start import origin, settings_of, write_record
from timed_pipeline import TimedPipeline

from offbeat import models
from offbeat.engines.streams import Streams
from offbeat.runs import build
from offbeat.runs.epochs import Epochs
from offbeat.runs.tables.gpt import GPTSetting

BASE = "adamw"
AIM = 1.15  # times the turn of the row with which a row is compared, at most


def timed(row: str, options: argparse.Namespace) -> TimedPipeline:
    """The pipeline of a row, as `reproduce` makes it, on random tokens."""
    optimizer, _, corrector = row.partition("+")
    setting = GPTSetting(**({"model": options.model} if options.model else {}))
    recipe = setting.recipe(
        optimizer, "adl-1f1b", K=options.K, M=options.M, corrector=corrector or None, device=options.device
    )
    known = build.Facts(models.find(recipe.model).shape or (), 256, setting.batch * setting.updates)
    recipe = replace(recipe, **build.choose_cuts(recipe, known))
    engine = Streams(recipe.K, torch.device(recipe.device))
    epochs = Epochs(samples=known.samples, batch_size=recipe.batch_size)
    x = models.random_batch(recipe.batch_size, known.shape, known.classes).to(recipe.device)
    return TimedPipeline(row, build.make_pipeline(recipe, known, epochs, engine), (x, x))


def compared_with(row: str) -> str:
    """The row with which a row is compared.

    >>> compared_with("muon"), compared_with("muon+auto")
    ('adamw', 'muon')
    """
    optimizer, _, corrector = row.partition("+")
    return optimizer if corrector else BASE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-K", type=int, default=12)
    parser.add_argument("-M", type=int, default=4)
    parser.add_argument("--rows", default="adamw,adamw+lwp,adamw+auto,nadam,muon,muon+auto,rotated-adam")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=200, help="per round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="another GPT, such as gpt:layers=4,width=64,heads=4,context=32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.rows.split(",")
    if missing := {compared_with(row) for row in names} - {*names}:
        sys.exit(f"--rows {options.rows}: add {', '.join(sorted(missing))}, with which others are compared")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu tries the benchmark, its times mean nothing")
    rows = {name: timed(name, options) for name in names}
    for _ in range(options.rounds):
        for name, row in rows.items():
            row.measure(options.turns)
            print(f"{name}: {row.figures['ms'][-1]:.3f} ms per turn", file=sys.stderr, flush=True)
    for name, row in rows.items():
        ms, base = row.figures["ms"], rows[compared_with(name)]
        ratios = [one / other for one, other in zip(ms, base.figures["ms"], strict=True)]
        print(f"{name:14} {median(ms):8.3f} ms per turn, {median(ratios):.2f} times {base.name}", flush=True)
    made = origin(on_gpu=options.device == "cuda")
    timed_rows = [row.as_dict() for row in rows.values()]
    write_record(options.out, {"settings": settings_of(options), "rows": timed_rows, "provenance": made})


if __name__ == "__main__":
    main()
