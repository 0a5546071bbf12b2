"""The application that commands add themselves to."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="offbeat",
    help="Train deep networks whose modules never wait for each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
