"""A training method: the few answers that tell one asynchronous method from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from offbeat.correctors import Corrections, Corrector, Place, correctors
from offbeat.errors import UserError, unknown
from offbeat.ops import Program, Window, fill_drain, lagged, locked, taught
from offbeat.theory import mean_staleness, versions_held

Weights = Literal["stash", "hybrid", "replay"]
ForwardWeights = Literal["newest", "before"]
Feedback = Literal["above", "local", "synthesiser"]
Head = Callable[[tuple[int, ...], int], Any]  # (shape of one sample's output, classes) -> nn.Module
LESSON = 2  # ticks until the stage above has reported the gradient of what was sent up


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a stage does, as plain data; every engine and every picture reads this and nothing else.

    name       as on the command line
    title      in words;  reference: where it was published
    locks      that remain: "forward", "backward", "update"

    In which order?
    lag        (k, K) -> batches between the forward and the backward of one local iteration of stage k of K
    M          gradients whose mean makes one update
    window     when an update is due: after M real gradients ("count") or by the forward index ("aligned")
    barrier    whether all stages wait for each other after the forward of every local iteration
    m          micro-batches that a batch is split into; more than one means fill and drain within each batch
    order      (k, K, batches) -> program, for a method with an order of its own
    limit      K -> why the method cannot have that many stages, or None

    With which weights?
    forward    the newest, or those of the window before
    weights    what a backward uses when an update came after its forward: the parameters of its forward ("stash"),
               stored activations with current parameters ("hybrid"), or a forward repeated with current ones ("replay")
    recompute  whether a backward of a micro-batch repeats its forward, to hold inputs instead of graphs

    Where does the gradient come from?
    feedback   the stage above, a local loss, or a synthesiser that the stage above teaches
    head       builds the auxiliary network of a stage below the last, for the latter two
    head_lr    its own Adam's rate; None: it is trained with the stage, by the stage's optimizer
    top        factor of the real loss at the last stage

    What is done against its age?
    correctors see offbeat.correctors

    workers    copies of the model that compute at the same time (data parallel)
    """

    name: str
    lag: Callable[[int, int], int]
    title: str = ""
    reference: str = ""
    locks: tuple[str, ...] = ()
    M: int = 1
    window: Window = "count"
    barrier: bool = False
    m: int = 1
    order: Callable[[int, int, Iterable[int]], Program] | None = None
    limit: Callable[[int], str | None] | None = None
    forward: ForwardWeights = "newest"
    weights: Weights = "stash"
    recompute: bool = False
    feedback: Feedback = "above"
    head: Head | None = None
    head_lr: float | None = None
    top: float = 1.0
    correctors: tuple[Corrector, ...] = ()
    workers: int = 1

    def __post_init__(self) -> None:
        for letter, number, meaning in (
            ("M", self.M, "gradients an update"), ("m", self.m, "micro-batches"), ("N", self.workers, "workers"),
        ):  # fmt: skip
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(f"{letter} = {number!r} {meaning}: use a whole number from 1 up")
        for kind, value, allowed in (("weights", self.weights, Weights), ("window", self.window, Window)):
            if value not in get_args(allowed):
                raise unknown(kind, str(value), get_args(allowed))
        self._check_declaration()
        for corrector in self.correctors:
            self._check(corrector)

    def _check_declaration(self) -> None:
        """Refuse answers that no engine could carry out together."""
        late = self.lag(1, 2) > 0
        for wrong, reason in (
            (self.feedback != "above" and self.head is None, f"feedback {self.feedback} needs a head"),
            (self.feedback == "above" and self.head is not None, 'a head needs feedback "local" or "synthesiser"'),
            (self.head is not None and (late or self.m > 1), "a stage with a head has no lag and no micro-batches"),
            (self.m > 1 and (late or self.M > 1), "micro-batches make one update a batch, without a lag"),
        ):
            if wrong:
                raise UserError(f"method {self.name}: {reason}")

    def _check(self, corrector: Corrector) -> None:
        if self.feedback != "above" or self.m > 1:
            raise UserError(f"corrector {corrector.name} with {self.name}, whose gradients are not late: leave it out")
        if self.weights not in corrector.needs:
            needed = " or ".join(corrector.needs)
            raise UserError(f"corrector {corrector.name} with weights {self.weights} ({self.name}): it needs {needed}")
        if self.forward != "newest" and "forward weights" in corrector.answers:
            raise UserError(
                f"corrector {corrector.name} with {self.name}, which sets the forward weights itself: leave it out"
            )
        reason = corrector.unfit(self.lag, self.M)
        if reason:
            raise UserError(f"corrector {corrector.name} with {self.name}: {reason}")

    def corrected(self, given: Corrections) -> Method:
        """The method with more correctors: objects, or text such as "lwp+sc"."""
        more = correctors(given)
        for corrector in more:
            late = [self.staleness(k, 2) for k in (1, 2)]
            if not any(late) and corrector.active(Place(1, 2, 8.0)) and not corrector.active(Place(1, 2, 0.0)):
                raise UserError(
                    f"corrector {corrector.name} with {self.name}, whose gradients are not late: leave it out"
                )
        return replace(self, correctors=correctors((*self.correctors, *more)))

    def not_alike(self) -> str | None:
        """Why the iterations of a stage are not all alike, so that they cannot be recorded; None where they are."""
        if self.order:
            return "draws the batches of its stages"
        if self.m > 1:
            return "splits batches into micro-batches"
        return "trains heads of its own" if self.head else None

    def check(self, K: int) -> None:
        """Refuse a number of stages that the method cannot have."""
        reason = self.limit(K) if self.limit else None
        if reason:
            raise UserError(f"{self.name} with K = {K} stage{'s' * (K > 1)}: {reason}")

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program:
        """The operations of stage k of K, one local iteration at a time."""
        if self.order:
            return self.order(k, K, batches)
        if self.m > 1:
            return fill_drain(batches, m=self.m)
        program = lagged(batches, lag=self.lag(k, K), M=self.M, window=self.window)
        if self.feedback == "synthesiser" and k < K:
            program = taught(program, after=LESSON)
        return locked(program) if self.barrier else program

    def place(self, k: int, K: int) -> Place:
        """Where the correctors of stage k work."""
        return Place(k, K, self.staleness(k, K))

    def version_used(self, forwards: int, newest: int) -> int:
        """Version of a stage's weights that its next forward uses, after so many forwards and updates of a program."""
        return newest if self.forward == "newest" else min(newest, max(0, forwards // self.M - 1))

    def replays(self, k: int, K: int) -> bool:
        """Whether a backward of stage k repeats its forward first."""
        return self.recompute or (self.weights == "replay" and self.lag(k, K) > 0)

    def hears(self, k: int, K: int) -> bool:
        """Whether stage k is sent gradients by the stage above."""
        return k < K and self.feedback != "local"

    def waits(self, k: int, K: int) -> bool:
        """Whether a backward of stage k needs the gradient from above."""
        return k < K and self.feedback == "above"

    def staleness(self, k: int, K: int) -> float:
        """Mean level of staleness of stage k, in updates."""
        return 1.0 if self.forward == "before" else mean_staleness(self.lag(k, K), self.M)

    def versions(self, k: int, K: int) -> int:
        """Most parameter versions that stage k holds, the newest included."""
        if self.forward == "before":
            return 2
        return versions_held(self.lag(k, K), self.M) if self.weights == "stash" else 1

    def held(self, k: int, K: int) -> int:
        """Most batches (micro-batches) between forward and backward that stage k holds, as graphs or as inputs."""
        return self.lag(k, K) + self.m
