"""offbeat checkpoint ls, show, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app

checkpoints = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True, add_completion=False)
app.add_typer(checkpoints, name="checkpoint")


@checkpoints.command("ls")
def checkpoint_ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List them, the oldest first."""
    from offbeat.checkpoint.show import show_list

    show_list(folder, as_json=as_json)


@checkpoints.command("show")
def checkpoint_show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run for its newest.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What one holds, stage by stage."""
    from offbeat.checkpoint.show import show_one

    show_one(folder, as_json=as_json)


@checkpoints.command("verify")
def checkpoint_verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run for all of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Read every byte and compare it with what was written."""
    from offbeat.checkpoint.show import show_verified

    show_verified(folder, as_json=as_json)
