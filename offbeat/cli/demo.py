"""offbeat demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. (default runs/demo)")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of each run.")] = 8,
) -> None:
    """Back-propagation on one process next to ADL on two, on real handwritten digits, in about a minute."""
    from offbeat.studies.demo import show

    show(out, epochs)
