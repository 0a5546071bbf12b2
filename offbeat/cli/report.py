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
            help="Folders of runs, comparisons, reproductions or benchmarks, or folders that contain such folders.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Also write every chart to this folder, as SVG and PNG.")
    ] = None,
) -> None:
    """Write an HTML report of runs: curves, errors, staleness, timelines, memory, partition."""
    from offbeat.report.draw import require_charts

    require_charts("jinja2")
    from offbeat.report.formatting import counted
    from offbeat.report.page import write_report

    drawn = write_report(folders, out, pictures)
    print(
        f"{out}: {counted(drawn, 'chart')}, {out.stat().st_size:,} bytes"
        + (f"; each in {pictures}" if pictures else "")
    )
