"""offbeat export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app
from offbeat.errors import UserError

SUFFIX = ".safetensors"


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or one checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The file to write, whose name ends in .safetensors.")] = Path(
        f"model{SUFFIX}"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the newest model of a run as safetensors, with the parameter names of the unsplit network."""
    from offbeat.checkpoint.export import export as write

    if out.suffix.lower() != SUFFIX:
        raise UserError(f"{out}: the model is written as safetensors, use a name such as {out.with_suffix(SUFFIX)}")
    written = write(run, out)
    if as_json:
        print(json.dumps(written))
        return
    for note in written["notes"]:
        print(note, file=sys.stderr)
    print(f"{written['tensors']} tensors, {written['bytes']:,} bytes from {written['source']} in {written['out']}")
