"""offbeat models."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offbeat.cli.app import app


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the networks with their parameters, forward FLOPs per sample and largest K."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from offbeat import models as zoo

    described = [zoo.describe(name) for name in zoo.names()]
    if as_json:
        print(json.dumps([asdict(entry) for entry in described]))
        return
    table = Table("model", "input", "classes", box=None)
    for column in ("parameters", "FLOPs", "largest K"):
        table.add_column(column, justify="right")
    for entry in described:
        sizes = "x".join(map(str, entry.shape))
        counts = (f"{count:,}" for count in (entry.parameters, entry.flops, entry.units))
        table.add_row(entry.name, sizes, str(entry.classes), *counts)
    Console().print(table)
