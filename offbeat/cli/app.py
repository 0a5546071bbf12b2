"""The application that commands add themselves to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from offbeat.cli.wording import errors_in_options
from offbeat.errors import UserError


class _OwnErrors:
    """A command, or commands that share a name, whose errors name options; an empty path is one of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        refuse_empty_paths(ctx, given)
        return left

    def invoke(self, ctx: Any) -> Any:
        with errors_in_options(ctx):
            return super().invoke(ctx)  # type: ignore[misc]


class Command(_OwnErrors, TyperCommand):
    """A command."""


class Group(_OwnErrors, TyperGroup):
    """Commands that share a name; it may be a command itself."""


def refuse_empty_paths(ctx: Any, given: Sequence[str]) -> None:
    """Raise UserError for an empty text as a path, such as of a variable that is not set: it would be this folder."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name)
        if Path() not in (value if isinstance(value, list) else [value]):
            continue
        if parameter.param_type_name == "argument":
            name, empty = parameter.metavar or parameter.name.upper(), "" in given
        else:
            name = max(parameter.opts, key=len)
            empty = any((option, "") in pairwise(given) or f"{option}=" in given for option in parameter.opts)
        if empty:
            raise UserError(f"{name} '': give the name of a file or folder, or . for this one")


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
