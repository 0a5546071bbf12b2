"""The command line, a file per command: reads options, calls one function, prints results and errors.

May import everything.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from offbeat.cli.app import app
from offbeat.cli.wording import in_options_of_this_command
from offbeat.errors import (
    Interrupted,
    LateGradients,
    NotCompiled,
    NotFused,
    NotRecorded,
    ScheduleLength,
    Unbalanced,
    UserError,
    shortened,
)
from offbeat.runs import launch

INTERRUPTED = 130

# In the order of the help.
for _name in (
    "train",
    "compare",
    "reproduce",
    "bench",
    "plan",
    "models",
    "methods",
    "demo",
    "report",
    "checkpoint",
    "export",
):
    importlib.import_module(f"offbeat.cli.{_name}")


def main() -> NoReturn:
    """The console command. Exit codes: 0 success, 1 all runs failed, 2 an error in one line, 130 stopped by Ctrl-C."""
    if launch.is_worker() or os.environ.get(launch.LAUNCHER) == str(os.getppid()):  # the latter: a run of a comparison
        launch.die_with_parent()
    warnings.showwarning = brief(warnings.showwarning)
    try:
        code = app(standalone_mode=False, prog_name="offbeat")
        if code == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise Interrupted("stopped by Ctrl-C")
        leave(code if isinstance(code, int) else 0)
    except UserError as error:
        fail(error, str(error), 2)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C
        fail(Interrupted(str(error)), str(error) or "stopped by Ctrl-C", INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "format_message"):
            if launch.is_worker():
                launch.leave_error(error)
            raise
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "offbeat"
        message = error.format_message().rstrip(".") or "no command was given"
        fail(error, f"{message}; see '{where} --help'", 2)


def brief(show: Callable[..., None]) -> Callable[..., None]:
    """Print warnings of Offbeat in one line, and each reason once for all stages; show others as before."""
    printed: set[tuple[type[Warning], str]] = set()

    def warn(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, LateGradients | NotCompiled | NotFused | NotRecorded | ScheduleLength | Unbalanced):
            line = in_options_of_this_command(" ".join(str(message).split()))
            reason = category, line.partition(": ")[2] or line
            if reason not in printed:
                first = " (shown for the first such stage)" * line.startswith("stage ")
                print(f"offbeat: {line}{first}", file=sys.stderr)
            printed.add(reason)
        else:
            show(message, category, *place, **more)

    return warn


def fail(error: BaseException, line: str, code: int) -> NoReturn:
    """Print an error in one line and exit; a worker process leaves the error to its launcher instead."""
    if launch.is_worker():
        launch.leave_error(error)
    else:
        print("offbeat: " + " ".join(shortened(line).split()), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit. A member of a process group exits at once, without waiting for its communication threads."""
    if launch.joined_group():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        from offbeat import __version__

        print(__version__)
        raise typer.Exit
