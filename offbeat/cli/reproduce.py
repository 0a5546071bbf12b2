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
    table: Annotated[str, typer.Argument(help="cifar10-table, ablation, curves or imagenet-table.")],
    running: options.Running,
    only: Annotated[
        str | None, typer.Option(help="Names of rows, or how they begin: resnet56, or a,b; * matches anything.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Rows of this method alone; with other settings, as in adl:M=2,corrector=sc.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Milestones stay in proportion. (default the paper's, 300 or 90)")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per row.")] = 3,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command continues. (default no limit)")
    ] = None,
    side_by_side: Annotated[int, typer.Option(help="Runs that take turns in this process.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Folder or archive that holds the data.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; it can be moved. (default runs/TABLE)")] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Show the rows, run nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the table as JSON.")] = False,
) -> None:
    """Repeat the paper's experiments, the most valuable rows first, and print its values beside ours."""
    from offbeat.studies import reproduce as reproducing

    request = reproducing.ReproductionRequest(
        table=table,
        only=only,
        method=method,
        epochs=epochs,
        seeds=seeds,
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
