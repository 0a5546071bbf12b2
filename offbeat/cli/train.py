"""offbeat train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli import options
from offbeat.cli.app import app
from offbeat.cli.options import spread
from offbeat.methods import AUTO
from offbeat.runs import launch
from offbeat.runs import train as training
from offbeat.runs.recipe import configured
from offbeat.runs.task import task_of_result


@app.command()
@spread
def train(
    data: options.Data,
    method: options.OneMethod,
    stages: options.Stages,
    optimization: options.OptimizationOptions,
    saved: options.Saving,
    diagnosis: options.DiagnosisOptions,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Copies of all K stages, each with its own share of the batches: one update is the mean of "
            "replicas * M gradients, in K * replicas processes. (default 1)",
            rich_help_panel="Parallelism",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. (default 0)")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the run in this folder from its newest checkpoint; other options change its recipe."),
    ] = None,
    silence: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a message after which a stage counts as lost. (default OFFBEAT_SILENCE, or 30)"
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a process waits for others before all of them stop. (default: without limit)"),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="Maximum number of restarts of the worker processes after a failure.")
    ] = 0,
    config: Annotated[
        Path | None, typer.Option(help="config.json of a run to repeat; other options change its recipe.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. (default runs/DATA-MODEL-METHOD-K-M-SEED)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything without training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Train a network. The defaults are the recipe of the paper."""
    chosen = options.chosen(data, method, stages, optimization, saved, diagnosis)
    chosen |= {name: value for name, value in (("seed", seed), ("replicas", replicas)) if value is not None}
    recipe = configured(config, chosen) if config is not None or resume is None else None
    if recipe is not None and chosen.get("method") == AUTO:
        size = f"{recipe.batch_size} samples per batch"
        size += f", staleness warm-up {recipe.staleness_warmup}" if recipe.staleness_warmup else ""
        print(f"offbeat: method auto: {recipe.method}, M={recipe.M}, {size}", file=sys.stderr)
    where: dict[str, Any] = {
        "out": out,
        "resume": resume,
        "max_restarts": max_restarts,
        "silence": silence,
        "timeout": timeout,
    }
    changes = chosen if resume is not None else {}
    if dry_run:
        ready = training.check_run(recipe, **where, **changes)
        print(json.dumps(ready) if as_json else ready_line(ready))
        return
    result = training.train(recipe, show=not as_json, **where, **changes)
    if result is not None and not launch.is_worker():  # the launcher prints the result of its workers
        print(json.dumps(result) if as_json else result_line(result))


def ready_line(ready: training.Ready) -> str:
    recipe = ready["recipe"]
    how = f"{recipe['engine']}, {recipe['precision']}{', compiled' * recipe['compile']}{', fused' * recipe['fuse']}"
    replicas = f" replicas={recipe['replicas']}" if recipe["replicas"] > 1 else ""
    return (
        f"ready: {recipe['model']} on {recipe['data']}, {recipe['method']} K={recipe['K']}{replicas} "
        f"M={recipe['settings']['M']} "
        f"({how}), cuts {list(recipe['cuts'])}, {ready['batches_an_epoch']} batches per epoch, "
        f"lr {recipe['lr']:g}; nothing was trained"
    )


def result_line(result: training.Result) -> str:
    staleness = " ".join(f"{level:.2f}" for level in result["staleness"])
    task = task_of_result(result)
    metric = f"{task.metric} {task.shown(result[task.key])}"  # type: ignore[literal-required]
    return f"{metric}  {task.speed(result):,.0f} {task.speed_unit}  staleness {staleness}  in {result['out']}"
