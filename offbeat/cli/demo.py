"""offbeat demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. (default runs/demo)")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs per run.")] = 8,
) -> None:
    """Compare back-propagation in one process with ADL in two, on handwritten digits, in about a minute."""
    from offbeat.studies.demo import show

    show(out, epochs)
