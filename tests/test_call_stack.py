"""The line of a script that called the package, whatever frames of torch and contextlib are between them."""

from __future__ import annotations

import _thread
import gc
import inspect
import warnings
import weakref
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

import pytest

import offbeat
from offbeat.call_stack import calling_frame

CODE = """
from contextlib import contextmanager
import torch
from offbeat.engines.calls import current_call
from offbeat.errors import warn_caller

def warned():
    warn_caller("late")
    return current_call()

def plain():
    return warned()

@torch.no_grad()
def decorated():
    return warned()

class Made:
    def __init__(self):
        self.call = warned()

@contextmanager
def entered():
    yield warned()

def put_into(queue):
    queue.put(warned())
"""


@pytest.fixture(scope="module")
def inside() -> ModuleType:
    """A module of the package."""
    made = ModuleType("offbeat.inside")
    exec(compile(CODE, str(Path(offbeat.__file__).with_name("inside.py")), "exec"), made.__dict__)
    return made


def line() -> int:
    """The line that calls this."""
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize("name", ["plain", "decorated", "Pipeline", "entered"])
def test_warnings_and_errors_about_calls_name_the_same_line_of_the_script(inside, name):
    with warnings.catch_warnings(record=True, action="always") as found:
        if name == "Pipeline":
            call, here = inside.Made().call, line()
        elif name == "entered":
            context = inside.entered()
            call, here = context.__enter__(), line()
        else:
            call, here = getattr(inside, name)(), line()
    assert (call.name, call.file, call.line) == (name, __file__, here)
    assert [(each.filename, each.lineno, str(each.message)) for each in found] == [(__file__, here, "late")]


def test_a_function_of_the_package_that_no_script_calls_has_no_call(inside):
    """As when the interpreter ends, or in a thread: there the last call of the script is the one to be named."""
    found: SimpleQueue = SimpleQueue()
    with warnings.catch_warnings(record=True, action="always") as warned:
        _thread.start_new_thread(inside.put_into, (found,))
        assert found.get(timeout=60) is None
    assert [Path(each.filename).name for each in warned] == ["inside.py"]


def test_looking_at_the_stack_keeps_no_value_of_its_functions_alive(inside):
    class Value:
        pass

    def looks() -> weakref.ref:
        value = Value()
        inside.plain()
        return weakref.ref(value)

    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            assert looks()() is None
    finally:
        gc.enable()


def test_a_frame_outside_of_all_packages_is_that_of_the_caller():
    frame, between = calling_frame("offbeat")
    assert frame is inspect.currentframe()
    assert between == []
    frame, between = calling_frame(__name__)
    assert frame.f_globals["__name__"] != __name__
    assert between == [(__name__, inspect.currentframe().f_code.co_name)]
