"""offbeat report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, comparisons, reproductions or benchmarks, or folders that hold several of them.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Write every chart into this folder too, as SVG and PNG.")
    ] = None,
) -> None:
    """Show runs in one HTML file: curves, errors, staleness, timelines, memory, partition."""
    from offbeat.report.draw import require

    require("altair", "vl_convert", "jinja2")
    from offbeat.report.page import write_report

    drawn = write_report(folders, out, pictures)
    print(f"{out}: {drawn} charts, {out.stat().st_size:,} bytes" + (f"; each in {pictures}" if pictures else ""))
