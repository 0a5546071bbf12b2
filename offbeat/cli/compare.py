"""offbeat compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.app import app
from offbeat.cli.options import spread


@app.command()
@spread
def compare(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to compare, such as bp,ddg,adl; with settings: bp:M=2,gpipe:m=8,adl:M=4,corrector=sc."
        ),
    ],
    data: options.Data,
    stages: options.Stages,
    optimization: options.OptimizationOptions,
    M: Annotated[
        int, typer.Option("-M", help="Gradients accumulated per update, for methods with late gradients that take M.")
    ] = 4,
    match: Annotated[
        str | None,
        typer.Option(
            help="What all methods have in common: batch (samples per batch) or effective (samples per update). "
            "(default batch; with --batch-per-update effective)"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds per method.")] = 3,
    jobs: Annotated[int, typer.Option(help="Number of runs in parallel processes, with --engine simulate.")] = 1,
    side_by_side: Annotated[int, typer.Option(help="Number of runs that take turns in this process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs. (default runs/compare-DATA-MODEL-K-M)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and no progress.")] = False,
) -> None:
    """Train several methods with the same recipe and print a table. If interrupted, the same command continues."""
    from offbeat.studies import compare as comparing

    comparison, folder = comparing.compare(
        methods=methods,
        match=match,
        seeds=seeds,
        M=M,
        chosen=options.chosen(data, stages, optimization),
        out=out,
        jobs=jobs,
        show=not as_json,
        together=side_by_side,
    )
    if as_json:
        print(json.dumps(comparison.as_dict()))
    else:
        comparing.show_comparison(comparison, folder)
    if not any(row.errors for row in comparison.rows):
        raise typer.Exit(1)
