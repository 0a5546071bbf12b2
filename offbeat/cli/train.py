"""offbeat train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli import options
from offbeat.cli.app import app
from offbeat.cli.options import spread
from offbeat.errors import UserError
from offbeat.runs import launch
from offbeat.runs.execute import execute, free_folder, going_on
from offbeat.runs.group import from_first
from offbeat.runs.recipe import changed, complete, load, settings


@app.command()
@spread
def train(
    data: options.Data,
    method: options.OneMethod,
    stages: options.Stages,
    schedule: options.Schedule,
    saved: options.Saving,
    looking: options.Looking,
    seed: Annotated[int | None, typer.Option(help="(default 0)")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder from its newest checkpoint; other options change it."),
    ] = None,
    silence: Annotated[
        float | None, typer.Option(help="Seconds of silence after which a stage counts as lost. (default 30)")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Most restarts of the K processes after failures.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="config.json of a run to repeat; other options change it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. (default runs/DATA-MODEL-METHOD-K-M-SEED)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the result as JSON.")] = False,
) -> None:
    """Train a network; the defaults are the paper's recipe."""
    chosen = options.chosen(data, method, stages, schedule, saved, looking)
    if seed is not None:
        chosen["seed"] = seed
    if silence is not None:
        if not silence > 0:
            raise UserError(f"--silence {silence:g}: use a number of seconds above 0, or inf")
        os.environ["OFFBEAT_SILENCE"] = str(silence)
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: use a whole number from 0 up")
    if resume is not None:
        if config is not None or out is not None:
            raise UserError("--resume names the run folder: leave out --config and --out")
        agreed = from_first(lambda: going_on(resume, chosen).as_dict())
        recipe, out = complete(**settings(agreed, resume / "config.json")), resume
    else:
        recipe = complete(**changed(load(config) if config else {}, chosen))
    result = execute(
        recipe,
        out or free_folder(recipe),
        dry_run=dry_run,
        show=not as_json,
        resumed=resume is not None,
        max_restarts=max_restarts,
    )
    if result is None or launch.is_worker():
        return  # another process says it
    if as_json:
        print(json.dumps(result))
    else:
        report_result(result, dry_run=dry_run)


def report_result(result: dict[str, Any], *, dry_run: bool) -> None:
    if dry_run:
        recipe = result["recipe"]
        M = recipe["settings"]["M"]
        how = f"{recipe['engine']}, {recipe['precision']}{', compiled' * recipe['compile']}{', fused' * recipe['fuse']}"
        print(
            f"ready: {recipe['model']} on {recipe['data']}, {recipe['method']} K={recipe['K']} M={M} "
            f"({how}), cuts {list(recipe['cuts'])}, {result['batches_an_epoch']} batches an epoch, "
            f"lr {recipe['lr']:g}; nothing was trained"
        )
        return
    print(
        f"test error {result['error']:.2f}%  {result['samples_per_second']:,.0f} samples/s  "
        f"staleness {' '.join(f'{level:.2f}' for level in result['staleness'])}  in {result['out']}"
    )
