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
        str, typer.Option(help="Such as bp,ddg,adl; with settings bp:M=2,gpipe:m=8,adl:M=4,corrector=sc.")
    ],
    data: options.Data,
    stages: options.Stages,
    schedule: options.Schedule,
    M: Annotated[int, typer.Option("-M", help="Gradients per update, for late methods that take M.")] = 4,
    match: Annotated[
        str, typer.Option(help="batch: the same batch size for all; effective: as many samples per update.")
    ] = ("batch"),
    seeds: Annotated[int, typer.Option(help="Seeds per method.")] = 3,
    jobs: Annotated[int, typer.Option(help="Parallel runs, where one process simulates all stages.")] = 1,
    side_by_side: Annotated[int, typer.Option(help="Runs that take turns in this process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs. (default runs/compare-DATA-MODEL-K-M)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the table as JSON.")] = False,
) -> None:
    """Train with several methods under one recipe and print one table. Continues where it was stopped."""
    from offbeat.studies import compare as comparing

    comparison, folder = comparing.compare(
        methods=methods,
        match=match,
        seeds=seeds,
        M=M,
        chosen=options.chosen(data, stages, schedule),
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
