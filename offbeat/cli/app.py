"""The application that commands add themselves to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from offbeat.cli.wording import errors_in_options


class Command(TyperCommand):
    """A command whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        with errors_in_options(ctx):
            return super().invoke(ctx)


class Group(TyperGroup):
    """Commands that share a name; it may be a command itself, whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        with errors_in_options(ctx):
            return super().invoke(ctx)


class Application(typer.Typer):
    """A Typer of such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, add_completion=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, cls=Command, **settings)


app = Application(
    name="offbeat",
    help="Train deep networks whose stages never wait for each other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
