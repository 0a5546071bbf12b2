"""A training method: the few answers that tell one asynchronous method from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import UserError, unknown
from offbeat.ops import Program, Window, fill_drain, lagged, locked

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
    barrier   whether all stages wait for each other after every local iteration
    m         micro-batches that a batch is split into; more than one means fill and drain within each batch
    recompute whether a backward of a micro-batch repeats its forward, to hold inputs instead of graphs
    """

    name: str
    lag: Callable[[int, int], int]
    M: int = 1
    window: Window = "count"
    weights: Weights = "stash"
    barrier: bool = False
    m: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for letter, number, meaning in (("M", self.M, "gradients an update"), ("m", self.m, "micro-batches")):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(f"{letter} = {number!r} {meaning}: use a whole number from 1 up")
        for kind, value, allowed in (("weights", self.weights, Weights), ("window", self.window, Window)):
            if value not in get_args(allowed):
                raise unknown(kind, str(value), get_args(allowed))

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program:
        """The operations of stage k of K, one local iteration at a time."""
        if self.m > 1:
            return fill_drain(batches, m=self.m)
        program = lagged(batches, lag=self.lag(k, K), M=self.M, window=self.window)
        return locked(program) if self.barrier else program

    def replays(self, k: int, K: int) -> bool:
        """Whether a backward of stage k repeats its forward first."""
        return self.recompute or (self.weights == "replay" and self.lag(k, K) > 0)
