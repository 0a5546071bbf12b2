"""Sizes of tensors while a forward runs on a sample: integers that remember the operation that they come from.

A size that reaches a recorded operation is written into the program as a reference, not as a number, so that the
program works for other batch sizes. A comparison between sizes decides which path the forward takes: it is recorded as
a check, and a batch for which it has another result is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from offbeat.errors import UserError
from offbeat.partitioning.program import Ref

ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

Record = Callable[[Any, tuple[Any, ...], Any], Any]  # function, arguments, result -> the result as it is to be used


class TracedSize(int):
    """An integer computed from sizes of tensors."""

    ref: Ref
    record: Record

    @classmethod
    def of(cls, value: int, ref: Ref, record: Record) -> TracedSize:
        made = cls(value)
        made.ref, made.record = ref, record
        return made

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __neg__(self) -> Any:
        return self.record(operator.neg, (self,), -int(self))

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


def check_comparison(name: str, a: Any, b: Any, expected: bool) -> None:
    """Refuse a batch whose sizes take another path through the model's forward than those of the sample."""
    if getattr(operator, name)(a, b) != expected:
        found = f"{a} {SYMBOLS[name]} {b} is {not expected}"
        raise UserError(
            f"this batch takes another path through the model's forward than the sample ({found}): "
            "partition the model with a sample of this size"
        )


def _arithmetic(name: str) -> None:
    function = getattr(operator, name)

    def forward(self: TracedSize, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return getattr(int, f"__{name}__")(self, other)
        return self.record(function, (self, other), function(int(self), int(other)))

    def reflected(self: TracedSize, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return getattr(int, f"__r{name}__")(self, other)
        return self.record(function, (other, self), function(int(other), int(self)))

    setattr(TracedSize, f"__{name}__", forward)
    setattr(TracedSize, f"__r{name}__", reflected)


def _comparison(name: str) -> None:
    function = getattr(operator, name)

    def compare(self: TracedSize, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return getattr(int, f"__{name}__")(self, other)
        outcome = function(int(self), int(other))
        self.record(check_comparison, (name, self, other, outcome), None)
        return outcome

    setattr(TracedSize, f"__{name}__", compare)


for _name in ARITHMETIC:
    _arithmetic(_name)
for _name in COMPARISONS:
    _comparison(_name)
