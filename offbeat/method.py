"""A training method: the few answers that tell one asynchronous method from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import UserError, unknown
from offbeat.ops import Program, Window, lagged

Weights = Literal["stash", "hybrid", "replay"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a stage does, as plain data; every engine and every picture reads this and nothing else.

    name      as on the command line
    lag       (k, K) -> batches between the forward and the backward of one local iteration of stage k of K
    M         gradients whose mean makes one update
    window    when an update is due: after M real gradients ("count") or by the forward index ("aligned")
    weights   what a backward uses when an update came after its forward: the parameters of its forward ("stash"),
              stored activations with current parameters ("hybrid"), or a forward repeated with current ones ("replay")
    """

    name: str
    lag: Callable[[int, int], int]
    M: int = 1
    window: Window = "count"
    weights: Weights = "stash"

    def __post_init__(self) -> None:
        if isinstance(self.M, bool) or not isinstance(self.M, int) or self.M < 1:
            raise UserError(f"M = {self.M!r} gradients an update: use a whole number from 1 up")
        for kind, value, allowed in (("weights", self.weights, Weights), ("window", self.window, Window)):
            if value not in get_args(allowed):
                raise unknown(kind, str(value), get_args(allowed))

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program:
        """The operations of stage k of K, one local iteration at a time."""
        return lagged(batches, lag=self.lag(k, K), M=self.M, window=self.window)
