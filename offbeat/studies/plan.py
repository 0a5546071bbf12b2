"""The plan of a run: stages, balance, memory, staleness, and the predicted speed-up of every declared method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from offbeat.core.compression import Messages, sent_bytes
from offbeat.errors import UserError, first_line
from offbeat.method import Method
from offbeat.methods import DECLARED, METHODS, settings_of
from offbeat.partitioning.loopback import measure_links
from offbeat.partitioning.partition import By
from offbeat.partitioning.profile import Profile, profile
from offbeat.partitioning.refine import LAPS, LONGEST, Refinement, RoundsBalance, refine, rescaled, stage_sums
from offbeat.partitioning.solve import Memory, Solution, Way, fastest_changed, solve, too_few_units
from offbeat.partitioning.timing import Load, StageTime, Stopwatch, Timings, shortest, whole_time
from offbeat.partitioning.trace import Traced, trace
from offbeat.partitioning.walk import verify
from offbeat.settings import shown
from offbeat.theory import smallest_M
from offbeat.timeline import Costs, bounds, longer_than, period, speed_up

FEW = 4  # stages by which the clock measures what a method exposes of a message: more do not change it
POINTS = 9  # message times at which it does; between them exposure is interpolated
FINAL_ROUNDS = 5  # in which the stages of the chosen cuts are timed
AS_FAST = 1.03  # times as long per batch counts as equally fast


@dataclass(frozen=True)
class LinkCost:
    """What a message costs: latency in seconds, bandwidth in bytes per second, and how stages encode their messages."""

    latency: float = 1e-4
    bandwidth: float = 2e9
    messages: Messages = "exact"

    def seconds(self, size: float) -> float:
        """For that many bytes."""
        return self.latency + size / self.bandwidth

    def message_seconds(self, size: float) -> float:
        """For a message between two stages with `size` bytes of float32 values. Encoding takes no time.

        >>> link = LinkCost(latency=1.0, bandwidth=4.0, messages="bf16")
        >>> link.seconds(8), link.message_seconds(8)
        (3.0, 2.0)
        """
        return self.seconds(sent_bytes(size, self.messages))

    def sum_seconds(self, size: float, replicas: int) -> float:
        """Adding gradients of that many bytes over R replicas: an all-to-all and an all-gather, in each of which a
        worker sends (R-1)/R of them (see core/replica_group.py).

        >>> LinkCost(latency=1.0, bandwidth=4.0).sum_seconds(8, 2), LinkCost().sum_seconds(8, 1)
        (4.0, 0.0)
        """
        return 2 * self.seconds(size * (replicas - 1) / replicas) if replicas > 1 else 0.0


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; times of one batch on its worker."""

    k: int
    units: list[Any]  # first and last index, first and last name
    params: int
    forward_ms: float
    backward_ms: float
    update_ms: float  # one, for M batches
    boundary_bytes: int  # sent up for one batch; 0 at the last stage
    in_flight: int
    versions: int
    memory_bytes: int
    mean_staleness: float
    recompute: bool  # whether backwards repeat their forward, so that inputs are held instead of graphs
    sum_ms: float = 0.0  # adding the gradients of all replicas, once per update


@dataclass(frozen=True)
class Plan:
    """The partition of a model for a method, and its predicted speed, memory and staleness."""

    model: str
    method: str
    K: int
    M: int
    batch_size: int
    cuts: list[int]
    balance: float
    balance_rounds: list[float]  # the smallest and the largest of the rounds in which the stages were timed
    balance_bound: float  # what the largest unit permits
    bp_ms: float  # a batch of back-propagation on one worker, the fastest, with an update for every batch
    predicted_speedup: float
    stages: list[StagePlan]
    methods: dict[str, float]
    advice: list[str]
    notes: list[str]
    replicas: int = 1
    messages: Messages = "exact"
    refinement: dict[str, Any] | None = None  # what moving the cuts by whole stages gained; None by FLOPs
    calibration: dict[str, float] | None = None  # of stages that run at once; None where there are too few cores

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """What planning measures once, for any K and method."""

    name: str
    model: nn.Module
    sample: Any
    batch_size: int
    profile: Profile
    traced: Traced

    @classmethod
    def of(cls, name: str, model: nn.Module, sample: Any, batch_size: int, *, known: Profile | None = None) -> Measured:
        """`known` is an earlier profile of this model; UserError unless it fits."""
        traced = trace(model)
        verify(traced, sample)
        if known is None:
            costs = replace(profile(model, sample, traced=traced), model=name)
        else:
            device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
            if why := known.misfit(sample, traced, model=name, device=device):
                raise UserError(f"the profile does not fit: {why}; measure a new one, into another file")
            costs = known
        return cls(name, model, sample, batch_size, costs, traced)


def make_plan(
    measured: Measured,
    method: Method,
    K: int,
    *,
    by: By = "measured",
    link: LinkCost | None = None,
    speeds: Sequence[float] | None = None,
    memory_limit: float | None = None,
    pinned: Sequence[int] = (),
    max_staleness: float | None = None,
    replicas: int = 1,
) -> tuple[Plan, Costs]:
    """Cut the model for the method, measure the stages, and predict their timeline by the clock.

    With replicas, an update includes the sum of their gradients, and a worker of each replica trains a batch at a time:
    the speed-up counts the batches of all.
    """
    link = link or LinkCost()
    costs, traced = measured.profile, measured.traced
    _check(K, len(traced.legal_cuts) + 1, speeds, max_staleness)
    fitting = recompute_to_fit(method, K, costs, memory_limit, by=by, speeds=speeds, pinned=pinned)
    method = fitting.method
    kept = Kept.of(method, K)
    options: dict[str, Any] = {
        "speeds": with_repeated_forwards(method, K, costs, speeds),
        "memory": kept.limited(costs, memory_limit),
        "pinned": pinned,
        "legal": costs.legal_cuts,
    }
    found = _measure(measured, method, K, by, link, options)
    solution, taken = found.solution, found.times
    rates = list(speeds or [1.0] * K)
    seconds = [
        StageTime(*(part / rate for part in (time.forward, time.backward, time.update)))
        for time, rate in zip(taken, rates, strict=True)
    ]
    sent = [round(sent_bytes(costs.boundary_bytes[cut], link.messages)) for cut in solution.cuts]
    messages = [link.seconds(size) for size in sent]
    sizes = stage_sums([unit.parameter_bytes for unit in costs.units], solution.cuts)
    sums = [link.sum_seconds(size, replicas) for size in sizes]
    working = message_work(found.calibration, sent)
    timing = Costs(
        [time.forward + work for time, work in zip(seconds, working, strict=True)],
        [time.backward + work for time, work in zip(seconds, working, strict=True)],
        [time.update + adding for time, adding in zip(seconds, sums, strict=True)],
        up=messages,
        down=messages,
        baseline=found.bp / max(rates),
    )
    stages = _stage_plans(costs, kept, solution.cuts, seconds, sums, [*sent, 0])

    def loads_of(times: Sequence[StageTime]) -> list[float]:
        each = enumerate(zip(times, rates, strict=True), start=1)
        return [time.batch(method.M) / rate + timing.replayed(k, method) for k, (time, rate) in each]

    balance = RoundsBalance.of(loads_of(taken), [loads_of(times) for times in found.rounds])
    free = speeds is None and memory_limit is None and not pinned
    fewer = _fewest(method, costs, link, solution, taken) if free else K
    predicted = replicas * speed_up(method, timing)
    plan = Plan(
        model=measured.name,
        method=method.name,
        K=K,
        M=method.M,
        batch_size=measured.batch_size,
        cuts=list(solution.cuts),
        balance=balance.balance,
        balance_rounds=[balance.least, balance.most],
        balance_bound=solution.balance_bound,
        bp_ms=1000 * timing.alone,
        predicted_speedup=predicted,
        stages=stages,
        methods={
            name: predicted if name == method.name else replicas * speed_up(declare(), timing)
            for name, declare in DECLARED.items()
            if replicas == 1 or declare().why_no_replicas() is None
        },
        advice=[*fitting.advice(), *_advice(method, timing, stages, fewer, max_staleness)],
        notes=[*traced.notes, *found.notes],
        replicas=replicas,
        messages=link.messages,
        refinement=None if found.refinement is None else found.refinement.as_dict(),
        calibration=None if found.calibration is None else asdict(found.calibration),
    )
    return plan, timing


def _check(K: int, most: int, speeds: Sequence[float] | None, max_staleness: float | None) -> None:
    if speeds is not None and len(speeds) != K:
        raise UserError(f"{len(speeds)} speeds for {K} stages: give one for each")
    if max_staleness is not None and not 0 < max_staleness < float("inf"):
        raise UserError(f"a mean staleness of at most {max_staleness}: give a number above 0")
    if most < K:
        raise too_few_units(K, most, ", or a deeper model")


def _stage_plans(
    costs: Profile,
    kept: Kept,
    cuts: Sequence[int],
    seconds: Sequence[StageTime],
    sums: Sequence[float],
    sent: Sequence[int],
) -> list[StagePlan]:
    return [
        StagePlan(
            k=k,
            units=[start, end - 1, costs.units[start].name, costs.units[end - 1].name],
            params=sum(unit.parameters for unit in costs.units[start:end]),
            forward_ms=1000 * time.forward,
            backward_ms=1000 * time.backward,
            update_ms=1000 * time.update,
            boundary_bytes=sent[k - 1],
            in_flight=kept.in_flight[k - 1],
            versions=kept.versions[k - 1],
            memory_bytes=kept.bytes(costs, k, start, end),
            mean_staleness=kept.staleness[k - 1],
            recompute=kept.recompute[k - 1],
            sum_ms=1000 * sums[k - 1],
        )
        for k, (time, (start, end)) in enumerate(
            zip(seconds, pairwise([0, *cuts, len(costs.units)]), strict=True), start=1
        )
    ]


@dataclass(frozen=True)
class Calibration:
    """What stages lose that run at once on this machine, each on cores of its own.

    slow_down          seconds of all stages when they compute at the same time, over those of one after the other
    work_per_message   processor seconds of each of the two processes for a message, and for each of its bytes
    work_per_byte
    """

    slow_down: float
    work_per_message: float
    work_per_byte: float


def message_work(calibration: Calibration | None, sizes: Sequence[int]) -> list[float]:
    """Processor seconds that each stage spends on messages of these sizes during a forward, and as many during a
    backward: it receives one and sends one.

    >>> message_work(Calibration(1.0, 1.0, 0.5), [2, 4])
    [2.0, 5.0, 3.0]
    """
    each = (
        []
        if calibration is None
        else [calibration.work_per_message + size * calibration.work_per_byte for size in sizes]
    )
    ends = [0.0, *(each or [0.0] * len(sizes)), 0.0]
    return [below + above for below, above in pairwise(ends)]


@dataclass(frozen=True)
class MeasuredStages:
    """The cuts, and what was measured of their stages, at speed 1.

    rounds   the times of all stages, by round; `times` has the shortest of each stage
    bp       seconds per batch of back-propagation on one worker
    """

    solution: Solution
    refinement: Refinement | None
    times: list[StageTime]
    rounds: Timings
    bp: float
    calibration: Calibration | None
    notes: list[str]


def _measure(
    measured: Measured, method: Method, K: int, by: By, link: LinkCost, options: dict[str, Any]
) -> MeasuredStages:
    costs, twin = measured.profile, measured.traced.twin()
    M = min(method.M, 4)  # an update is timed by itself; a longer window only takes longer to reach one
    messages = [link.message_seconds(size) for size in costs.boundary_bytes]
    refinement = None
    with Stopwatch(twin, measured.sample, K) as stopwatch:
        if by == "measured":
            both = sum(unit.forward for unit in costs.units), sum(unit.backward for unit in costs.units)
            exposed = exposure(method, K, *both, messages)
            both_sides: dict[str, Any] = {"exposed_below": exposed, "exposed_above": exposed}
            refinement = refine(costs.costs(), K, stopwatch, M=M, **both_sides, **options)
            solution = refinement.solution
        else:
            solution = solve(replace(costs, timed=False).costs(), K, **options)
        slowest = max(stage_sums(costs.costs(), solution.cuts))
        lags = [method.lag(k, K) for k in range(1, K + 1)]
        load = Load(lags, M, seconds=min(LONGEST, 2 * LAPS * slowest), rounds=FINAL_ROUNDS)
        # measured again: the times by which the best cuts were chosen are too optimistic
        (rounds,) = stopwatch([solution.cuts], load)
        taken = shortest(rounds, M)
        calibration = None
        if stopwatch.workers:
            (alone,) = stopwatch.alone([solution.cuts], replace(load, rounds=1))
            calibration = _calibrated(taken, shortest(alone, M), M, stopwatch.notes)
    # What BP takes alone is at most what its stages take together; more would be noise.
    bp = min(whole_time(twin, measured.sample).batch(), sum(time.batch() for time in taken))
    return MeasuredStages(solution, refinement, taken, rounds, bp, calibration, stopwatch.notes)


def _calibrated(at_once: Sequence[StageTime], alone: Sequence[StageTime], M: int, notes: list[str]) -> Calibration:
    """Where links cannot be measured, messages take no work, and a note has the reason."""
    slow_down = sum(time.batch(M) for time in at_once) / sum(time.batch(M) for time in alone)
    try:
        link = measure_links()
    except UserError as error:
        notes.append(f"the prediction is without the processor time of messages: {first_line(error)}")
        return Calibration(slow_down, 0.0, 0.0)
    return Calibration(slow_down, link.work_per_message, link.work_per_byte)


def exposure(method: Method, K: int, forward: float, backward: float, messages: Sequence[float]) -> list[float] | None:
    """Seconds that a cut adds to each of its two stages: what the method cannot hide of a message that long.

    By the clock: the period of equal stages with such messages, less their period without. None where it hides all.

    >>> from offbeat.methods import ADL, DDG
    >>> exposure(ADL(), 2, 2.0, 4.0, [0.5]), exposure(DDG(barrier=False), 2, 2.0, 4.0, [0.5])
    (None, [0.5])
    """
    few = min(K, FEW)
    if few < 2 or not messages:
        return None
    F, B = [forward / K] * few, [backward / K] * few
    plain = period(method, Costs(F, B))
    points = np.unique(np.linspace(min(messages), max(messages), POINTS))
    sides = 1 if few == 2 else 2  # a stage between two cuts bears half of the whole at each
    added = []
    for message in points:
        hops = [float(message)] * (few - 1)
        added.append(max(0.0, period(method, Costs(F, B, up=hops, down=hops)) - plain) / sides)
    if max(added) <= 1e-9 * plain:
        return None
    return [float(value) for value in np.interp(messages, points, added)]


@dataclass(frozen=True)
class Kept:
    """Of each stage: the batches (micro-batches) in flight, the weight versions, the copies of parameters besides the
    optimizer's own, the mean staleness that they are for, and whether forwards are repeated, so that one batch at a
    time has a graph and the others are held as inputs; micro-batches of a batch."""

    in_flight: list[int]
    versions: list[int]
    copies: list[int]
    staleness: list[float]
    recompute: list[bool]
    m: int = 1

    @classmethod
    def of(cls, method: Method, K: int) -> Kept:
        stages = range(1, K + 1)
        return cls(
            [method.held(k, K) for k in stages],
            [method.versions(k, K) for k in stages],
            [method.copies(k, K) for k in stages],
            [method.staleness(k, K) for k in stages],
            [method.replays(k, K) for k in stages],
            method.m,
        )

    @property
    def batches(self) -> list[float]:
        """Batches in flight whose inputs each stage holds."""
        return [held / self.m for held in self.in_flight]

    @property
    def graphs(self) -> list[float]:
        """Those of them whose activations it holds."""
        each = zip(self.batches, self.recompute, strict=True)
        return [1 / self.m if repeats else held for held, repeats in each]

    def bytes(self, costs: Profile, k: int, start: int, end: int) -> int:
        """Parameters, gradients and momentum, copies of parameters, and the batches in flight: all that they hold, or
        the inputs of those whose forwards are repeated."""
        parameters = sum(unit.parameter_bytes for unit in costs.units[start:end])
        graphs = costs.held_bytes(start, end) * self.graphs[k - 1]
        inputs = costs.boundary_bytes[start] * (self.batches[k - 1] - self.graphs[k - 1])
        return parameters * (3 + self.copies[k - 1]) + int(graphs + inputs)

    def limited(self, costs: Profile, limit: float | None) -> Memory | None:
        """The same for the solver."""
        if limit is None:
            return None
        return Memory(
            parameters=[unit.parameter_bytes for unit in costs.units],
            held=[unit.held_bytes for unit in costs.units],
            versions=[3 + count for count in self.copies],
            in_flight=self.graphs,
            limit=limit,
            entering=costs.boundary_bytes,
            inputs=self.batches,
            twice=[unit.held_input_bytes for unit in costs.units],
            in_bytes=True,
        )


@dataclass(frozen=True)
class Fitting:
    """A method as it fits a memory limit.

    without   if stages were chosen that recompute: seconds per batch with none of them, by the units, over those of the
              fastest choice; infinite where that does not fit
    """

    method: Method
    without: float | None = None

    def advice(self) -> Iterator[str]:
        """Which stages recompute, and why."""
        if self.without is None:
            return
        chosen = f"with {self.method.name}:recompute={shown(self.method.recompute)}: these stages repeat forwards"
        if self.without == float("inf"):
            yield f"fits {chosen}"
        else:
            yield (
                f"faster {chosen}, and the cuts are more even; without it the cuts that fit take "
                f"{self.without:.2f} times as long per batch"
            )


def recompute_to_fit(
    method: Method,
    K: int,
    costs: Profile,
    limit: float | None,
    *,
    by: By = "measured",
    speeds: Sequence[float] | None = None,
    pinned: Sequence[int] = (),
) -> Fitting:
    """The method with `recompute` in the stages with which it is fastest within the memory limit, by the units; in the
    fewest that are as fast, and in all if even that does not fit.

    It stays as it is if it recomputes already, if its stages hold a single batch, or if its weights are not stashed.
    """
    takes = method.name in METHODS and "recompute" in settings_of(method.name) and method.holds_several
    if limit is None or method.recompute or method.weights != "stash" or not takes:
        return Fitting(method)
    every = replace(method, recompute=True)
    ways = []
    for each in (method, every):
        memory = Kept.of(each, K).limited(costs, limit)
        assert memory is not None
        ways.append(Way(memory, with_repeated_forwards(each, K, costs, speeds)))
    work = costs.costs() if by == "measured" else replace(costs, timed=False).costs()
    found = fastest_changed(work, K, *ways, within=AS_FAST, pinned=pinned, legal=costs.legal_cuts)
    if found is None:
        return Fitting(every, float("inf"))
    return Fitting(replace(method, recompute=found.stages), found.without) if found.stages else Fitting(method)


def with_repeated_forwards(
    method: Method, K: int, costs: Profile, speeds: Sequence[float] | None
) -> Sequence[float] | None:
    """The speeds of the workers for the balance of the cuts: a stage that repeats forwards is slower."""
    replays = [method.replays(k, K) for k in range(1, K + 1)]
    forward, backward = (sum(getattr(unit, kind) for unit in costs.units) for kind in ("forward", "backward"))
    if not any(replays) or not forward:
        return speeds
    slower = (forward + backward) / (2 * forward + backward)
    return [speed * (slower if again else 1.0) for speed, again in zip(speeds or [1.0] * K, replays, strict=True)]


def _fewest(method: Method, costs: Profile, link: LinkCost, solution: Solution, taken: Sequence[StageTime]) -> int:
    """The smallest number of stages that is as fast by the clock, from units scaled to the measured stages; by
    bisection."""
    cuts, K = solution.cuts, len(taken)
    forward = rescaled([unit.forward for unit in costs.units], cuts, [time.forward for time in taken])
    backward = rescaled([unit.backward for unit in costs.units], cuts, [time.backward for time in taken])
    update = rescaled([unit.parameter_bytes for unit in costs.units], cuts, [time.update for time in taken])
    work = [sum(parts[:2]) + parts[2] / method.M for parts in zip(forward, backward, update, strict=True)]
    messages = [link.message_seconds(size) for size in costs.boundary_bytes]

    def timing(chosen: Sequence[int]) -> Costs:
        hops = [messages[cut] for cut in chosen]
        f, b, u = (stage_sums(parts, chosen) for parts in (forward, backward, update))
        return Costs(f, b, u, up=hops, down=hops)

    def as_fast(fewer: int) -> bool:
        if sum(work) / fewer > AS_FAST * most:  # not even if they balanced
            return False
        exposed = exposure(method, fewer, sum(forward), sum(backward), messages)
        found = solve(work, fewer, legal=costs.legal_cuts, exposed_below=exposed, exposed_above=exposed)
        fewer_stages = timing(found.cuts)
        if longer_than(method, fewer_stages, AS_FAST * most):
            return False
        if least == most or not longer_than(method, fewer_stages, AS_FAST * least):
            return True
        return not longer_than(method, fewer_stages, AS_FAST * period(method, timing(cuts)))

    least, most = bounds(method, timing(cuts))
    fewest, too_few, trial = K, 0, K - 1
    while trial > too_few:
        fewest, too_few = (trial, too_few) if as_fast(trial) else (fewest, trial)
        trial = (fewest + too_few) // 2
    return fewest


def _advice(
    method: Method, timing: Costs, stages: list[StagePlan], fewest: int, max_staleness: float | None
) -> Iterator[str]:
    K = timing.K
    if max_staleness is not None:
        yield _advised_window(method, K, max_staleness)
    largest = max(stages, key=lambda stage: stage.memory_bytes)
    batches, versions = largest.in_flight, largest.versions
    yield (
        f"memory is largest at stage {largest.k}: {largest.memory_bytes / 1e6:,.0f} MB for "
        f"{'inputs of ' if largest.recompute else ''}{batches} {'micro-' if method.m > 1 else ''}"
        f"batch{'es' * (batches > 1)} in flight and {versions} version{'s' * (versions > 1)}"
    )
    for first, updates in method.staleness_warmup:
        each, later = (1e3 * method.M * period(one, timing) for one in (first, method))
        yield (
            f"{updates} updates are trained by {first.name} before those of this plan (staleness_warmup): {each:.3g} "
            f"ms per update, {each / later:.2f} times as long as a later one"
        )
    if fewest < K:
        yield f"K = {fewest} would be as fast, within {AS_FAST - 1:.0%}"


def _advised_window(method: Method, K: int, most: float) -> str:
    """The smallest M that keeps the staleness of every stage within the limit, if there is one."""
    try:
        M = smallest_M(method, K, most)
    except UserError as error:
        return f"no M keeps the mean staleness at or below {most:g}: {error}"
    if M is None:
        least = max(Kept.of(method, K).staleness)
        return (
            f"no M keeps the mean staleness at or below {most:g}: with {method.name} it is {least:g} for M = {method.M}"
        )
    return f"M = {M} is the smallest that keeps the mean staleness of every stage at or below {most:g}"
