"""Every public name has types, and a docstring with an example that runs: pytest runs them all as doctests."""

from __future__ import annotations

import doctest
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

import offbeat
from offbeat import callbacks, optim
from offbeat.correctors import Corrector
from offbeat.optim.compensated import CompensatedOptimizer
from offbeat.pipeline.callback import EVENTS

# Without an example, since none runs in one process on a CPU in less than seconds.
NEED_SEVERAL_PROCESSES = {"offbeat.StageLost", "offbeat.CallTimeout", "offbeat.ModelOutdated"}
NEED_A_GPU_OR_A_COMPILER = {"offbeat.NotRecorded", "offbeat.NotFused", "offbeat.NotCompiled"}
NEED_AN_ACCOUNT = {"offbeat.callbacks.WandbLogger"}
# Methods that are called by `fit`, by a stage or by torch, not by users: the example of their class shows their effect.
CALLED_BY_FIT = {*EVENTS, "write", "close", "state_dict", "load_state_dict"}
CALLED_BY_A_STAGE = (Corrector, CompensatedOptimizer)
PROPERTIES = property, functools.cached_property


def classes_and_functions() -> Iterator[tuple[str, object]]:
    for module in (offbeat, callbacks, optim):
        for name in module.__all__:
            found = getattr(module, name)
            if not isinstance(found, str | ModuleType):
                yield f"{module.__name__}.{name}", found


def methods_and_properties() -> Iterator[tuple[str, type, object]]:
    """Of the public classes, as far as Offbeat defines them, without those that users do not call."""
    for where, cls in classes_and_functions():
        if not isinstance(cls, type) or issubclass(cls, CALLED_BY_A_STAGE):
            continue
        for name in dir(cls):
            home = next(each for each in cls.__mro__ if name in vars(each))
            member = vars(home)[name]
            fit_calls = cls.__module__.startswith(("offbeat.callbacks", "offbeat.pipeline.callback")) and (
                name in CALLED_BY_FIT
            )
            if name.startswith("_") or fit_calls or not home.__module__.startswith("offbeat."):
                continue
            if isinstance(member, (FunctionType, *PROPERTIES)):
                yield f"{where}.{name}", home, member


def examples(documented: object) -> str:
    """The source of the examples in a docstring; that of a class may show its properties."""
    found = doctest.DocTestParser().get_examples(documented.__doc__ or "")
    return "".join(example.source for example in found)


def test_every_public_class_and_function_has_an_example():
    lacking = {name for name, found in classes_and_functions() if not examples(found)}
    assert lacking == NEED_SEVERAL_PROCESSES | NEED_A_GPU_OR_A_COMPILER | NEED_AN_ACCOUNT


def test_every_public_method_and_property_has_an_example():
    lacking = [
        name
        for name, home, member in methods_and_properties()
        if not examples(member)
        and not (isinstance(member, PROPERTIES) and f".{name.rpartition('.')[2]}" in examples(home))
    ]
    assert lacking == []


def test_every_public_name_has_a_docstring_and_types():
    methods = [(name, found) for name, _, found in methods_and_properties()]
    for name, found in (*classes_and_functions(), *methods):
        assert inspect.getdoc(found), name
        function = getattr(found, "fget", None) or getattr(found, "func", found)
        if isinstance(function, type):
            if isinstance(vars(function).get("__init__"), FunctionType):
                function = vars(function)["__init__"]
            else:
                continue
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, name
        untyped = [each for each in list(signature.parameters.values()) if each.annotation is each.empty]
        assert [each.name for each in untyped] in ([], ["self"]), name
