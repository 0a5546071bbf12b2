"""offbeat checkpoint ls, show, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import Application, app

checkpoints = Application(help="Inspect the checkpoints of a run.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")


@checkpoints.command("ls")
def checkpoint_ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first."""
    from offbeat.checkpoint.show import show_list

    show_list(folder, as_json=as_json)


@checkpoints.command("show")
def checkpoint_show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run (its newest checkpoint).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the contents of a checkpoint per stage."""
    from offbeat.checkpoint.show import show_one

    show_one(folder, as_json=as_json)


@checkpoints.command("verify")
def checkpoint_verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run (all its checkpoints).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify the size and the SHA-256 of every file."""
    from offbeat.checkpoint.show import show_verified

    show_verified(folder, as_json=as_json)
