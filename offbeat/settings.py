"""The settings of a method: names, types and defaults, from the signature of its function.

adl:M=4,corrector=sc        a method with settings, as text
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat.correctors import CORRECTORS, CorrectorLike
from offbeat.correctors.registry import settings_of as settings_of_corrector
from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Recompute, StalenessWarmup

LARGEST = 2**31  # value of an integer
WORDS = {"yes": True, "true": True, "no": False, "false": False}
_CALLABLE = get_origin(Callable[[], None])
OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:function


@dataclass(frozen=True)
class Setting:
    """One setting; `kinds` are the alternatives of its type annotation."""

    name: str
    kinds: tuple[Any, ...]
    default: Any
    allowed: str  # allowed values, in words, as the text of a method has them
    values: str  # the same as Python has them

    @property
    def choices(self) -> list[str]:
        """The values of a setting that is a Literal."""
        return [str(choice) for kind in self.kinds if get_origin(kind) is Literal for choice in get_args(kind)]

    def read(self, text: str) -> Any:
        """Parse the text of a value.

        >>> from offbeat.methods import settings_of
        >>> settings_of("ddg")["barrier"].read("no"), settings_of("fdg")["beta"].read("0.5")
        (False, 0.5)
        """
        for kind in self.kinds:
            try:
                return _read(kind, text.strip())
            except (ValueError, KeyError):
                continue
        if self.choices:
            raise unknown(self.name, text, self.choices)
        raise UserError(f"'{self.name}={text}': use {self.allowed}")

    def check(self, value: Any) -> None:
        """Raise UserError for a value of another type than the declared one."""
        if any(_fits(kind, value) for kind in self.kinds):
            return
        if self.choices:
            raise unknown(self.name, str(value), self.choices)
        if float in self.kinds and type(value) in (int, float):
            raise UserError(f"{self.name}={value}: use a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{self.name}={value}: use an integer of at most {LARGEST}")
        raise UserError(f"{self.name}={value!r}: use {self.values}")

    def value(self, value: Any) -> Any:
        """The argument of the method's function: a function that was given as text is imported."""
        if isinstance(value, str) and any(get_origin(kind) is _CALLABLE for kind in self.kinds):
            module, _, name = value.partition(":")
            try:
                return getattr(importlib.import_module(module), name)
            except Exception as error:
                raise UserError(
                    f"{self.name}={value!r} cannot be imported ({first_line(error)}): use {self.values}"
                ) from error
        return value

    def __str__(self) -> str:
        """With the default, as in the text of a method."""
        return f"{self.name}={shown(self.default)}"


@cache
def declared(make: Callable[..., Any]) -> dict[str, Setting]:
    """The settings of the function of a method.

    >>> from offbeat.methods import FDG
    >>> [str(setting) for setting in declared(FDG).values()]
    ['beta=1', 'weights=stash', 'recompute=no', 'corrector=none']
    """
    hints = get_type_hints(getattr(make, "func", make))  # a partial has none of its own
    found = {}
    for name, parameter in inspect.signature(make).parameters.items():
        hint = hints.get(name, type(parameter.default))
        found[name] = Setting(name, _kinds(hint), parameter.default, _allowed(hint, TEXT), _allowed(hint, PYTHON))
    return found


def split(text: str) -> tuple[str, dict[str, str]]:
    """Split the text of a method into its name and the texts of its settings; a colon may replace a comma.

    A colon after a corrector starts a setting of the corrector, if it has one of that name.

    >>> split("adl:M=4,corrector=dc:0.1"), split("adl:M=2:corrector=sc"), split("bp")
    (('adl', {'M': '4', 'corrector': 'dc:0.1'}), ('adl', {'M': '2', 'corrector': 'sc'}), ('bp', {}))
    >>> split("adl:corrector=lwp:fraction=0.5+sc:extra=1:M=2")
    ('adl', {'corrector': 'lwp:fraction=0.5+sc:extra=1', 'M': '2'})
    """
    name, colon, rest = text.partition(":")
    found: dict[str, str] = {}
    last = ""
    pieces = re.split(r"(,|:(?=\s*\w+\s*=))", rest) if colon else []
    for separator, part in zip([",", *pieces[1::2]], pieces[::2], strict=False):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if separator == ":" and last == "corrector" and _of_corrector(found[last], setting):
            found[last] += f":{part.strip()}"
            continue
        if not equals or not value or setting in found:
            raise UserError(f"{text!r}: give each setting once and with a value, as in adl:M=4,corrector=sc")
        found[setting] = value
        last = setting
    return name.strip(), found


def _of_corrector(text: str, setting: str) -> bool:
    """Whether the last corrector in the text has that setting."""
    name = text.rpartition("+")[2].partition(":")[0].strip()
    return name in CORRECTORS and setting in settings_of_corrector(CORRECTORS[name])


def split_list(text: str) -> list[str]:
    """Split a list of methods with settings: a part that is only a setting belongs to the method before it.

    >>> split_list("bp, adl:M=2,corrector=sc, gpipe:m=8")
    ['bp', 'adl:M=2,corrector=sc', 'gpipe:m=8']
    """
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if found and re.match(r"\w+\s*=", part):
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return found


def listed(settings: Mapping[str, Setting]) -> str:
    """All settings with their defaults, for an error."""
    if not settings:
        return "it has no settings"
    return "its settings are " + ", ".join(f"{name} (default {it.default!r})" for name, it in settings.items())


def shown(value: Any) -> str:
    """A value as written on the command line.

    >>> shown(True), shown(None), shown(0.5), shown("stash"), shown([1, 2])
    ('yes', 'none', '0.5', 'stash', '1+2')
    """
    if isinstance(value, list | tuple) and all(type(part) is int for part in value):
        return "+".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, in the order in which text is parsed: str last."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(sorted(kinds, key=lambda kind: (kind is str, kind is not NoneType)))


def _read(kind: Any, text: str) -> Any:
    """The text as a value of that kind; raises ValueError or KeyError."""
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is bool:
        return WORDS[text.lower()]
    if kind is NoneType:
        return {"none": None}[text.lower()]
    if kind in (int, float, str):
        return kind(text)
    if kind == Sequence[int]:
        return [int(part) for part in text.split("+")]
    if get_origin(kind) is _CALLABLE and OBJECT.fullmatch(text):
        return text
    raise ValueError(text)


def _fits(kind: Any, value: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if kind == Sequence[int]:
        return isinstance(value, list | tuple) and all(type(part) is int and abs(part) <= LARGEST for part in value)
    if origin is _CALLABLE:
        return callable(value) or (isinstance(value, str) and bool(OBJECT.fullmatch(value)))
    known = origin or kind
    return isinstance(value, known) if isinstance(known, type) else True


# How kinds of values are written: in the text of a method, and in Python.
TEXT = {
    CorrectorLike: "correctors such as sc or lwp+sc, or none",
    StalenessWarmup: "a number of updates, methods with numbers of updates such as bp@200+adl-1f1b@300, or none",
    Recompute: "yes, no or numbers of stages such as 1+2",
    bool: "yes or no",
    int: "an integer",
    float: "a number",
    str: "text",
    NoneType: "none",
    _CALLABLE: "a function as package.module:name",
}
PYTHON = TEXT | {
    CorrectorLike: "text such as 'sc' or 'lwp+sc', correctors, or None",
    StalenessWarmup: "a number of updates, text such as 'bp@200+adl-1f1b@300', a list of (method, updates), or None",
    Recompute: "True, False or a list of stage numbers such as [1, 2]",
    bool: "True or False",
    NoneType: "None",
    _CALLABLE: "a function, 'package.module:name'",
}


def _allowed(hint: Any, words: Mapping[Any, str]) -> str:
    """The allowed values, in these words."""
    if hint in words:
        return words[hint]
    found = []
    for kind in reversed(_kinds(hint)):
        if get_origin(kind) is Literal:
            *others, last = map(str, get_args(kind))
            found.append(f"{', '.join(others)} or {last}" if others else last)
        else:
            found.append(words.get(get_origin(kind) or kind, str(getattr(kind, "__name__", kind))))
    return " or ".join(found)
