"""Who called: the line of a script that called the package, or the function of the package that called another.

Warnings (`errors.warn_caller`), errors about calls that differ between processes (`engines/calls.py`) and collectives
(`engines/processes.py`) read Python's call stack here.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

PACKAGE = "offbeat"
INSIDE = (PACKAGE, "torch", "contextlib")  # packages between the line of a script and what it calls


class Function(NamedTuple):
    """A function on the call stack. Not its frame: that would keep the values in it alive."""

    module: str
    name: str

    def is_of(self, *names: str) -> bool:
        """Whether it belongs to one of these packages or modules."""
        return any(self.module == name or self.module.startswith(f"{name}.") for name in names)


def calling_frame(*inside: str) -> tuple[FrameType | None, list[Function]]:
    """The innermost frame outside of these packages and modules, and the functions between it and this one, the
    innermost first. None where all are inside: at the end of the interpreter.

    >>> frame, between = calling_frame(*INSIDE)
    >>> frame and frame.f_globals["__name__"], between  # this example is run in the namespace of the module
    ('doctest', [Function(module='offbeat.call_stack', name='<module>')])
    """
    frame: FrameType | None = sys._getframe(1)
    between: list[Function] = []
    while frame is not None:
        function = Function(frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        if not function.is_of(*inside):
            break
        between.append(function)
        frame = frame.f_back
    return frame, between


def calling_function() -> str:
    """The function that calls the one that calls this.

    >>> def communicates():
    ...     return calling_function()
    >>> def caller():
    ...     return communicates()
    >>> caller().rpartition(".")[2]
    'caller'
    """
    frame = sys._getframe(2)
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
