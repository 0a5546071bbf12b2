"""The declaration of a training method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from offbeat.correctors import AutoCorrector, Corrector, CorrectorLike, StageContext, StageInfo, correctors
from offbeat.errors import UserError, unknown
from offbeat.interpreter import Step, reach, steady_state, steps, unused
from offbeat.ops import (
    LESSON,
    Backward,
    Forward,
    Operation,
    Program,
    Take,
    Teach,
    WindowRule,
    fill_drain,
    lagged,
    locked,
    pipelined,
    taught,
)

Weights = Literal["stash", "hybrid", "replay"]
ForwardWeights = Literal["newest", "before"]
Feedback = Literal["above", "local", "synthesiser"]
Recompute = bool | Sequence[int]  # all stages or none, or the numbers of the stages, from 1
Head = Callable[[tuple[int, ...], int], Any]  # (shape of one sample's output, classes) -> nn.Module


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method as plain data. Engines, plans and pictures read nothing else about it.

    name       on the command line
    title      a few words
    reference  where it was published
    locks      the locks that it keeps, of "forward", "backward", "update"

    Order of the operations
    lag        (k, K) -> batches between the forward and the backward of one local iteration of stage k of K
    M          gradients per update, which applies their mean
    window     when an update is due: after M gradients ("count") or after the forward of every M-th batch ("aligned")
    barrier    whether all stages wait for each other after the forward of every local iteration
    pipelined  whether stages forward the next batches of a window before the backward of the first, in a method without
               lag; results are the same, but stages do not wait for each other until the end of the window
    m          micro-batches per batch; with more than one, each batch fills and drains the pipeline
    order      (k, K, batches) -> program, for a method whose order the settings above cannot express
    free_running
               whether no stage waits for one above it, and each has one forward, backward and update per batch in the
               long run, in an order of its own: the slowest stage then determines the time per batch
    limit      K -> the reason why the method cannot have K stages, or None

    Weights
    forward    weights of a forward: the newest ("newest"), or those of the previous window ("before")
    weights    weights of a backward if an update came after its forward: the parameters of its forward ("stash"),
               stored activations with current parameters ("hybrid"), or a repeated forward with current ones ("replay")
    recompute  whether backwards repeat their forward with the weights, random numbers and buffers of that forward:
               results are the same, but a stage holds inputs instead of graphs. True, or the numbers of the stages that
               do so, from 1. A stage that holds a single batch never does.

    Gradient of a stage's output
    feedback   from the next stage ("above"), from a local loss ("local"), or from a synthesiser that the next stage
               trains ("synthesiser")
    head       builds the auxiliary network of every stage but the last, for the latter two
    head_lr    learning rate of an Adam for the head; None: the optimizer of the stage trains it
    top        factor of the loss of the last stage

    correctors corrections of late gradients, see offbeat.correctors
    workers    copies of the model that compute at the same time (data parallelism)

    staleness_warmup
               (method, updates) pairs that train the first updates: back-propagation, for example, or methods whose lag
               grows. The pipeline is drained between them. All else here describes what follows the warm-up.

    >>> from offbeat.methods import lags
    >>> method = Method(name="mine", lag=lags.round_trip, M=2)
    >>> [method.staleness(k, 3) for k in (1, 2, 3)]
    [2.0, 1.0, 0.0]
    """

    name: str
    lag: Callable[[int, int], int]
    title: str = ""
    reference: str = ""
    locks: tuple[str, ...] = ()
    M: int = 1
    window: WindowRule = "count"
    barrier: bool = False
    pipelined: bool = False
    m: int = 1
    order: Callable[[int, int, Iterable[int]], Program] | None = None
    free_running: bool = False
    limit: Callable[[int], str | None] | None = None
    forward: ForwardWeights = "newest"
    weights: Weights = "stash"
    recompute: Recompute = False
    feedback: Feedback = "above"
    head: Head | None = None
    head_lr: float | None = None
    top: float = 1.0
    correctors: tuple[Corrector, ...] = ()
    workers: int = 1
    staleness_warmup: tuple[tuple[Method, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("locks", "correctors", "staleness_warmup"):  # tuples, so that a method can be hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_recompute()
        for letter, number, meaning in (
            ("M", self.M, "gradients per update"),
            ("m", self.m, "micro-batches"),
            ("N", self.workers, "workers"),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(f"{letter}={number!r} {meaning}: use an integer of at least 1")
        for kind, value, allowed in (("weights", self.weights, Weights), ("window", self.window, WindowRule)):
            if value not in get_args(allowed):
                raise unknown(kind, str(value), get_args(allowed))
        self._check_declaration()
        for corrector in self.correctors:
            corrector.check()
            self._check(corrector)
        self._check_warmup()

    def _check_recompute(self) -> None:
        if isinstance(self.recompute, bool):
            return
        stages = tuple(self.recompute) if isinstance(self.recompute, list | tuple) else ()
        if not stages or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in stages):
            raise UserError(f"recompute={self.recompute!r}: use stage numbers from 1 up, or leave it out")
        object.__setattr__(self, "recompute", tuple(sorted(set(stages))))

    @property
    def holds_several(self) -> bool:
        """Whether a stage may have several batches between forward and backward.

        >>> from offbeat.methods import ADL, BP
        >>> ADL().holds_several, BP(M=4).holds_several, BP(M=4, pipelined=True).holds_several
        (True, False, True)
        """
        return bool(self.lag(1, 2) or self.pipelined or self.m > 1 or self.workers > 1 or self.order)

    def _check_declaration(self) -> None:
        """Raise an error for settings that no engine can combine."""
        late = self.lag(1, 2) > 0
        for wrong, reason in (
            (self.feedback != "above" and self.head is None, f"feedback {self.feedback} needs a head"),
            (self.feedback == "above" and self.head is not None, 'a head needs feedback "local" or "synthesiser"'),
            (self.head is not None and (late or self.m > 1), "a stage with a head has no lag and no micro-batches"),
            (
                self.recompute and self.weights != "stash",
                f'recompute needs weights="stash", not {self.weights!r}: use that, or leave out recompute',
            ),
            (self.recompute and self.head is not None, "a stage with a head holds a single batch: leave out recompute"),
            (
                self.pipelined and (late or self.barrier or self.m > 1 or self.order or self.feedback != "above"),
                "only whole batches whose gradients come from above without a lag can be pipelined",
            ),
            (
                self.free_running and (self.order is None or self.feedback != "local" or self.M > 1),
                "free_running needs an order, a local loss and M=1",
            ),
            (self.m > 1 and (late or self.M > 1), "with micro-batches there is one update per batch, and no lag"),
        ):
            if wrong:
                raise UserError(f"method {self.name}: {reason}")

    def _check(self, corrector: Corrector) -> None:
        if isinstance(corrector, AutoCorrector):  # chooses nothing where gradients are not late
            return
        if self.feedback != "above" or self.m > 1:
            raise UserError(f"corrector {corrector.name} with {self.name}, whose gradients are not late: leave it out")
        if self.weights not in corrector.supported_weights:
            needed = " or ".join(corrector.supported_weights)
            raise UserError(f"corrector {corrector.name} with weights {self.weights} ({self.name}): it needs {needed}")
        if self.forward != "newest" and "forward weights" in corrector.changes:
            raise UserError(
                f"corrector {corrector.name} with {self.name}, which sets the forward weights itself: leave it out"
            )
        reason = corrector.unsupported(self.lag, self.M)
        if reason:
            raise UserError(f"corrector {corrector.name} with {self.name}: {reason}")

    def _check_warmup(self) -> None:
        for method, updates in self.staleness_warmup:
            if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
                raise UserError(f"staleness_warmup with {updates!r} updates of {method.name}: use an integer from 1 up")
            for one, place in ((self, "of"), (method, "with")):
                if one.feedback != "above" or one.m > 1 or one.workers > 1 or one.order:
                    raise UserError(
                        f"staleness_warmup {place} {one.name}: use methods in which whole batches pass through the "
                        "stages and gradients come back, such as bp and adl"
                    )
            if method.M != self.M:
                raise UserError(
                    f"staleness_warmup with {method.name} M={method.M} before {self.name} M={self.M}: use the same M, "
                    "so that updates and the learning rate keep their meaning"
                )
            if method.staleness_warmup:
                raise UserError(
                    f"staleness_warmup with {method.name}, which has one itself: give all phases in one list"
                )
        if self.staleness_warmup and not self.lag(1, 2):
            raise UserError(f"staleness_warmup of {self.name}, whose gradients are not late: leave it out")

    def corrected(self, given: CorrectorLike) -> Method:
        """The method with additional correctors: objects, or text such as "lwp+sc".

        >>> from offbeat.methods import ADL
        >>> ADL(M=4).corrected("sc").correctors
        (SpikeCompensation(delay=None, extra=0.0),)
        """
        more = correctors(given)
        for corrector in more:
            late = [self.staleness(k, 2) for k in (1, 2)]
            needs_delay = corrector.active(StageContext(1, 2, 8.0)) and not corrector.active(StageContext(1, 2, 0.0))
            if not any(late) and needs_delay:
                raise UserError(
                    f"corrector {corrector.name} with {self.name}, whose gradients are not late: leave it out"
                )
        return replace(self, correctors=correctors((*self.correctors, *more)))

    def phase(self, batch: int) -> Method:
        """The method that trains this batch: one of the warm-up, or this one without a warm-up.

        >>> from offbeat.methods import ADL, BP
        >>> method = Method(name="warm", lag=ADL().lag, staleness_warmup=[(BP(), 10)])
        >>> method.phase(9).name, method.phase(10).name
        ('bp', 'warm')
        """
        for method, updates in self.staleness_warmup:
            batch -= updates * method.M
            if batch < 0:
                return method
        return self.after_warmup

    @property
    def after_warmup(self) -> Method:
        """This method without a warm-up.

        >>> from offbeat.methods import ADL, BP
        >>> Method(name="warm", lag=ADL().lag, staleness_warmup=[(BP(), 10)]).after_warmup.staleness_warmup
        ()
        """
        return replace(self, staleness_warmup=()) if self.staleness_warmup else self

    @property
    def phases(self) -> tuple[Method, ...]:
        """The methods that train one after the other: those of the warm-up, and this one without a warm-up.

        >>> from offbeat.methods import ADL, BP
        >>> [method.name for method in Method(name="warm", lag=ADL().lag, staleness_warmup=[(BP(), 10)]).phases]
        ['bp', 'warm']
        """
        return (*(method for method, _ in self.staleness_warmup), self.after_warmup)

    def why_not_capturable(self) -> str | None:
        """The reason why the iterations of a stage differ, so that they cannot be recorded; None if they do not.

        >>> from offbeat.methods import ADL, GPipe
        >>> ADL().why_not_capturable(), GPipe(m=4).why_not_capturable()
        (None, 'splits batches into micro-batches')
        """
        if self.order:
            return "chooses the batches of its stages at random"
        if self.m > 1:
            return "splits batches into micro-batches"
        return "trains auxiliary heads" if self.head else None

    def why_no_replicas(self) -> str | None:
        """The reason why replicas of a stage could not stay equal by adding the gradients of their windows; None if
        they do.

        >>> from offbeat.methods import ADL, ASGD
        >>> ADL().why_no_replicas(), ASGD(N=4).why_no_replicas()
        (None, 'has several workers itself')
        """
        if self.head_lr is not None:
            return "trains its synthesisers by an optimizer of their own, whose gradients are not part of a window"
        return "has several workers itself" if self.workers > 1 else None

    def check(self, K: int) -> None:
        """Raise an error if the method cannot have K stages.

        >>> from offbeat.methods import ADL
        >>> ADL(recompute=[1, 5]).check(K=4)
        Traceback (most recent call last):
        offbeat.errors.UserError: adl with K=4 stages: recompute has stage 5: use stage numbers from 1 to 4
        """
        for method, _ in self.staleness_warmup:
            method.check(K)
        reason = self.limit(K) if self.limit else None
        if not isinstance(self.recompute, bool) and max(self.recompute) > K:
            reason = f"recompute has stage {max(self.recompute)}: use stage numbers from 1 to {K}"
        if reason:
            raise UserError(f"{self.name} with K={K} stage{'s' * (K > 1)}: {reason}")

    def program(self, k: int, K: int, batches: Iterable[int]) -> Program:
        """The operations of stage k of K, one local iteration at a time.

        >>> from offbeat.methods import ADL
        >>> [" ".join(map(str, iteration)) for iteration in ADL(M=2).program(2, 2, range(3))]
        ['F0 B0', 'F1 B1 U', 'F2 B2', 'U']
        """
        if self.order:
            return self.order(k, K, batches)
        if self.m > 1:
            return fill_drain(batches, m=self.m)
        program = lagged(batches, lag=self.lag(k, K), M=self.M, window=self.window)
        if self.pipelined:
            return pipelined(program, ahead=K - k)
        if self.feedback == "synthesiser" and k < K:
            program = taught(program, after=LESSON)
        return locked(program) if self.barrier else program

    def stage_info(self, k: int, K: int) -> StageInfo:
        """Stage k of K, for a function that makes its optimizer.

        >>> from offbeat.methods import ADL
        >>> ADL(M=4).stage_info(1, 4)
        StageInfo(k=1, K=4, delay=1.5, lag=6, M=4)
        """
        return StageInfo(k, K, self.staleness(k, K), self.lag(k, K), self.M)

    def stage_context(self, k: int, K: int) -> StageContext:
        """The context of the correctors of stage k.

        >>> from offbeat.methods import ADL
        >>> ADL(M=4).stage_context(1, 4).delay
        1.5
        """
        return StageContext(k, K, self.staleness(k, K))

    # ---- what an operation receives, sends and computes with

    def receives(self, operation: Operation, k: int, K: int) -> int | None:
        """The stage whose message the operation of stage k uses: k-1 for an input (0: the data), k+1 for a gradient;
        None for no message.

        >>> from offbeat.methods import ADL
        >>> ADL().receives(Forward(0), 2, 4), ADL().receives(Backward(0), 2, 4), ADL().receives(Backward(0), 4, 4)
        (1, 3, None)
        """
        kind = type(operation)
        if kind is Forward:
            return None if operation.buffered else k - 1  # type: ignore[union-attr]
        if kind is Backward:
            return k + 1 if k < K and self.feedback == "above" else None
        if kind is Take:
            return k - 1
        return k + 1 if kind is Teach else None

    def sends(self, operation: Operation, k: int, K: int) -> int | None:
        """The stage that the operation of stage k sends a message to: k+1 for its output, k-1 for the gradient of its
        input; None for no message.

        >>> from offbeat.methods import ADL
        >>> ADL().sends(Forward(0), 2, 4), ADL().sends(Backward(0), 2, 4), ADL().sends(Forward(0), 4, 4)
        (3, 1, None)
        """
        kind = type(operation)
        if kind is Forward:
            return k + 1 if k < K else None
        return k - 1 if kind is Backward and k > 1 and self.feedback != "local" else None

    def forward_version(self, forwards: int, newest: int) -> int:
        """Version of the weights that the next forward uses, after a number of forwards and of updates (`newest`).

        >>> from offbeat.methods import ADL, TwoBW
        >>> ADL(M=4).forward_version(forwards=8, newest=2), TwoBW(M=4).forward_version(forwards=8, newest=2)
        (2, 1)
        """
        return newest if self.forward == "newest" else min(newest, max(0, forwards // self.M - 1))

    def backward_version(self, forwarded: int, newest: int) -> int:
        """Version of the weights that a backward uses, whose forward used version `forwarded`.

        >>> from offbeat.methods import ADL
        >>> ADL().backward_version(1, newest=3), ADL(weights="hybrid").backward_version(1, newest=3)
        (1, 3)
        """
        return forwarded if self.weights == "stash" else newest

    def versions_kept(self) -> int:
        """How many of its newest versions a stage keeps in addition to those that batches in flight need; 0 if there is
        only one version, which updates change in place.

        >>> from offbeat.methods import ADL, TwoBW
        >>> ADL().versions_kept(), TwoBW().versions_kept(), ADL(weights="hybrid").versions_kept()
        (1, 2, 0)
        """
        if self.weights != "stash":
            return 0
        return 1 if self.forward == "newest" else 2

    def replays(self, k: int, K: int) -> bool:
        """Whether a backward of stage k repeats its forward.

        >>> from offbeat.methods import ADL
        >>> ADL(recompute=True).replays(1, 4), ADL(recompute=True).replays(4, 4), ADL().replays(1, 4)
        (True, False, False)
        """
        if self.weights == "replay":
            return self.lag(k, K) > 0 or self._predicts(k, K)
        wanted = self.recompute if isinstance(self.recompute, bool) else k in self.recompute
        return wanted and self.held(k, K) > 1

    def _predicts(self, k: int, K: int) -> bool:
        context = self.stage_context(k, K)
        return any(
            corrector.active(context) and {"forward weights", "backward weights"} & {*corrector.changes}
            for corrector in self.correctors
        )

    # ---- what follows from the order of operations

    def steps(self, k: int, K: int, batches: Iterable[int]) -> Iterator[tuple[Step, ...]]:
        """The program of stage k, with what each operation receives, sends and computes with (see interpreter.py).

        >>> from offbeat.methods import ADL
        >>> steps = [step for iteration in ADL(M=2).steps(1, 2, range(3)) for step in iteration]
        >>> [(str(step.operation), step.version) for step in steps]
        [('F0', 0), ('F1', 0), ('F2', 0), ('B0', 0), ('B1', 0), ('U', 1), ('B2', 0), ('U', 2)]
        """
        return steps(self, k, K, batches)

    def full(self, k: int, K: int, *, in_flight: int, forwards: int) -> bool:
        """Whether the next forward is one of steady state, given the batches in flight and the number of forwards.

        >>> from offbeat.methods import ADL
        >>> ADL().full(1, 2, in_flight=1, forwards=1), ADL().full(1, 2, in_flight=2, forwards=2)
        (False, True)
        """
        return in_flight >= self.lag(k, K) and (self.forward == "newest" or forwards >= self.M)

    def plain_lag(self, k: int, K: int) -> int | None:
        """The lag of stage k if its steady state follows from it, M, the window and the versions kept: the program is
        `ops.lagged`, and where forwards use weights of the previous window, these are kept and windows are by count.
        None otherwise.

        >>> from offbeat.methods import ADL, GPipe, TwoBW
        >>> ADL().plain_lag(1, 4), TwoBW().plain_lag(1, 4), GPipe(m=4).plain_lag(1, 4)
        (6, 3, None)
        """
        other = self.order or self.m > 1 or self.pipelined
        before = self.forward == "before" and (self.weights != "stash" or self.window != "count")
        return None if other or before else self.lag(k, K)

    def drained(self, k: int, K: int) -> int | None:
        """The largest number of batches (micro-batches) that stage k holds, if it runs all backwards of a window before
        the update: the program is `ops.fill_drain` or `ops.pipelined`. None otherwise.

        >>> from offbeat.methods import ADL, BP, GPipe
        >>> GPipe(m=8).drained(1, 4), BP(M=8, pipelined=True).drained(1, 4), ADL().drained(1, 4)
        (8, 4, None)
        """
        if self.order or self.forward != "newest" or not (self.m > 1 or self.pipelined):
            return None
        return self.m if self.m > 1 else min(self.M, K - k + 1)

    def counted(self, levels: Iterable[int | None]) -> list[int]:
        """The levels of staleness of a window that count: all if it is complete and in steady state, else none.

        >>> from offbeat.methods import ADL
        >>> ADL(M=2).counted([3, 2]), ADL(M=2).counted([None, 2])
        ([3, 2], [])
        """
        known = [level for level in levels if level is not None]
        return known if len(known) == self.M else []

    def staleness(self, k: int, K: int) -> float:
        """Mean staleness of the gradients of stage k, in updates.

        >>> from offbeat.methods import ADL
        >>> [ADL(M=2).staleness(k, 4) for k in (1, 2, 3, 4)]
        [3.0, 2.0, 1.0, 0.0]
        """
        return steady_state(self, k, K).staleness

    def versions(self, k: int, K: int) -> int:
        """Largest number of parameter versions that stage k holds, including the newest.

        >>> from offbeat.methods import ADL
        >>> [ADL(M=2).versions(k, 4) for k in (1, 2, 3, 4)]
        [4, 3, 2, 1]
        """
        return steady_state(self, k, K).versions

    def copies(self, k: int, K: int) -> int:
        """Largest number of copies of its parameters that stage k holds, for versions and predictions.

        >>> from offbeat.methods import ADL
        >>> [ADL(M=2).copies(k, 4) for k in (1, 2, 3, 4)]
        [4, 3, 2, 0]
        """
        if self.weights != "stash":
            return int(self._predicts(k, K))
        changed = self.lag(k, K) or self.forward == "before" or self._predicts(k, K)
        return self.versions(k, K) if changed else 0

    def held(self, k: int, K: int) -> int:
        """Largest number of batches (micro-batches) between forward and backward that stage k holds.

        >>> from offbeat.methods import ADL
        >>> [ADL(M=2).held(k, 4) for k in (1, 2, 3, 4)]
        [7, 5, 3, 1]
        """
        return steady_state(self, k, K).held

    def resting(self, k: int, K: int, iterations: int) -> int:
        """Number of batches between forward and backward that stage k holds after a number of local iterations.

        >>> from offbeat.methods import ADL
        >>> [ADL().resting(1, 2, iterations) for iterations in range(4)]
        [0, 1, 2, 2]
        """
        held = steady_state(self, k, K).resting
        return held[min(iterations, len(held) - 1)]

    def fill(self, K: int) -> int:
        """Number of local iterations until all stages are in steady state.

        >>> from offbeat.methods import ADL
        >>> ADL(M=2).fill(4)
        6
        """
        return max(steady_state(self, k, K).fill for k in range(1, K + 1))

    def reach(self, K: int, t: int) -> int:
        """Local iterations, after that of batch t, until a mark ahead of batch t has reached every stage.

        >>> from offbeat.methods import ADL, AsyncDGL
        >>> ADL().reach(4, 0), AsyncDGL().reach(4, 0)
        (0, 2)
        """
        return reach(self, K, t)

    def notice(self, K: int) -> int:
        """Batches before a checkpoint at which every stage must know of it, to keep what its batches in flight need.

        >>> from offbeat.methods import ADL, BP
        >>> ADL(M=2).notice(4), BP().notice(4)
        (8, 2)
        """
        return 2 + max(phase.resting(k, K, phase.fill(K)) for phase in self.phases for k in range(1, K + 1))

    def synchronous(self, K: int) -> bool:
        """Whether stages wait for each other in every update: there is no lag, and gradients come from above.

        >>> from offbeat.methods import ADL, GPipe
        >>> GPipe().synchronous(4), ADL().synchronous(4)
        (True, False)
        """
        return self.feedback == "above" and not any(self.lag(k, K) for k in range(1, K + 1))

    def unused(self, k: int, K: int) -> int:
        """Largest number of gradients sent by stage k and not yet used by stage k-1, after equally many iterations;
        with `pipelined` where a state is taken (see `Worker.catch_up`).

        >>> from offbeat.methods import ADL
        >>> [ADL().unused(k, 3) for k in (1, 2, 3)]
        [0, 2, 2]
        """
        return unused(self, k, K) if k > 1 and not self.pipelined else 0


StalenessWarmup = int | str | Sequence[tuple[Method, int]] | None  # updates, "bp@200+adl-1f1b@300", or such pairs
