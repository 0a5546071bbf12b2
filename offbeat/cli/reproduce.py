"""offbeat reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import options
from offbeat.cli.app import app
from offbeat.cli.options import spread


@app.command()
@spread
def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="Table to run: cifar10-table, ablation, curves, imagenet-table, gpt-staleness or small-gpt-staleness."
        ),
    ],
    running: options.Running,
    only: Annotated[
        str | None, typer.Option(help="Rows by name or prefix, such as resnet56 or a,b; * matches anything.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Only rows of this method; with other settings, as in adl:M=2,corrector=sc.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs; milestones scale with it. (default: the table's, 300, 90 or 10)"),
    ] = None,
    batch_per_update: Annotated[
        int | None, typer.Option(help="Samples per update of all rows, which each splits into M batches.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds per row.")] = 3,
    first_seed: Annotated[
        int, typer.Option(help="The first of them: several commands, each with its folder, can share a row.")
    ] = 0,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Time limit in minutes; the same command continues later. (default: none)")
    ] = None,
    side_by_side: Annotated[int, typer.Option(help="Number of runs that take turns in this process.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder or archive of the data, or a text file. "
            "(default OFFBEAT_DATA_DIR; text: OFFBEAT_TEXT, or the Python source of torch)"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs. (default runs/TABLE)")] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="List the rows without training.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything without training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and no progress.")] = False,
) -> None:
    """Reproduce the experiments of the paper, the most informative rows first, and print both results."""
    from offbeat.studies import reproduce as reproducing

    request = reproducing.ReproductionRequest(
        table=table,
        only=only,
        method=method,
        epochs=epochs,
        batch_per_update=batch_per_update,
        seeds=seeds,
        first_seed=first_seed,
        minutes=budget_minutes,
        together=side_by_side,
        data=data,
        out=out,
        running=options.chosen(running),
    )
    if list_rows:
        reproducing.show_rows(request, as_json=as_json)
    elif dry_run:
        reproducing.show_ready(request, as_json=as_json)
    else:
        made, folder = reproducing.reproduce(request, show=not as_json)
        reproducing.show(made, folder, as_json=as_json)
        if made.count("failed"):
            raise typer.Exit(1)
