"""Errors of the library name arguments of Python; the command line prints them as its options.

batch_size=0: use an integer of at least 1          --batch-size 0: use an integer of at least 1
device='cuda' without a GPU                         --device cuda without a GPU
give another folder as out=                         give another folder as --out
m=0 micro-batches                                   --method gpipe:m=0 micro-batches
recompute (default False)                           recompute (default no)
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer

from offbeat.errors import Interrupted, UserError
from offbeat.methods import settings_of
from offbeat.runs import launch
from offbeat.settings import shown, split

VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([^()]*\)|\[[^\[\]]*\]|[-+\w](?:[-+.\w]*\w)?"""
ARGUMENT = re.compile(rf"(?<![\w.:,/='\"-])([A-Za-z]\w*)=({VALUE})?(?![\w=])")
VALUE_OF_A_SETTING = re.compile(rf"\((default|given:) ({VALUE})\)")
RUNNING: ContextVar[typer.Context | None] = ContextVar("RUNNING", default=None)  # the command that runs
ELSEWHERE = {  # arguments whose options have another name
    "recipe": "config",
    "methods": "method",
    "minutes": "budget_minutes",
    "together": "side_by_side",
    "profile_file": "profile",
    "pinned": "pin",
    "by": "partition",
}


@contextmanager
def errors_in_options(context: typer.Context) -> Iterator[None]:
    """Around a command. A worker leaves its errors to its launcher as they are."""
    before = RUNNING.set(context)
    try:
        yield
    except (UserError, Interrupted) as error:
        if error.args and not launch.is_worker():
            error.args = (in_options(str(error), context), *error.args[1:])
        raise
    finally:
        RUNNING.reset(before)


def in_options_of_this_command(text: str) -> str:
    """The text in the options of the command that runs, if one does."""
    context = RUNNING.get()
    return text if context is None else in_options(text, context)


def in_options(text: str, context: typer.Context) -> str:
    """The text with every argument that the command has an option for written as that option."""
    parameters = {parameter.name: parameter for parameter in context.command.params}

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        parameter = parameters.get(name) or parameters.get(ELSEWHERE.get(name, name))
        if _is_setting(name, context) and (parameter is None or context.params.get(name) is None):
            return f"--method {_method(context)}:{name}={_text(value)}" if value else f"{name} of --method"
        if parameter is None and name == "resume" and value:  # of a run that another command has started
            return f"offbeat train --resume {shlex.quote(_text(value))}"
        if parameter is None or parameter.param_type_name != "option":
            return found[0]
        longest = max(parameter.opts, key=len)
        if value in ("True", "False"):
            return longest if value == "True" else max(parameter.secondary_opts, key=len, default=f"no {longest}")
        return f"{longest} {shlex.quote(_text(value))}" if value else longest

    text = VALUE_OF_A_SETTING.sub(lambda found: f"({found[1]} {_in_a_method(found[2])})", text)
    return ARGUMENT.sub(option, text).replace("math.inf", "inf")


def _method(context: typer.Context) -> str:
    """The name of the method that the command trains by; empty where it takes none, or several."""
    given = context.params.get("method")
    if "method" not in context.params or not isinstance(given, str | None):
        return ""
    return split(given)[0] if given else "adl"


def _is_setting(name: str, context: typer.Context) -> bool:
    """Whether it is a setting of the method that has no option of its own, or was given in --method."""
    try:
        method = _method(context)
        if not method or name not in settings_of(method):
            return False
        given = split(context.params["method"] or method)[1]
    except UserError:
        return False
    return name in given or name not in context.params


def _in_a_method(value: str) -> str:
    """A value of Python as the text of a method has it."""
    try:
        return shown(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _text(value: str) -> str:
    """A value of Python as an option takes it."""
    try:
        literal: Any = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    if isinstance(literal, tuple | list):
        return ",".join("..." if item is ... else str(item) for item in literal)
    return shown(literal)
