"""offbeat methods."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from offbeat.cli.app import app


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method to show in detail.")] = None,
    K: Annotated[int | None, typer.Option("-K", help="Number of stages in the timeline. (default 3)")] = None,
    M: Annotated[int | None, typer.Option("-M", help="Gradients accumulated per update in the timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the training methods: locks, lag, weights, staleness, ideal speed-up; or show one with its timeline."""
    from offbeat.describe import print_methods, show_methods
    from offbeat.methods import add_packages

    found = show_methods(name, K=K, M=M)
    for entry, reason in add_packages().items() if name is None else ():
        print(f"offbeat: method {entry} {reason}: update or uninstall the package", file=sys.stderr)
    if as_json:
        print(json.dumps(found))
    else:
        print_methods(found)
