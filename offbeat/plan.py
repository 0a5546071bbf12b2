"""What will happen before it runs: stages, balance, memory, staleness, and the speed-up of every declared method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from offbeat.cutting.partition import By, solve_for, stage_seconds
from offbeat.cutting.profile import Profile, profile
from offbeat.cutting.solve import Memory
from offbeat.cutting.trace import trace
from offbeat.cutting.walk import verify
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.methods import DECLARED
from offbeat.theory import mean_staleness, versions_held
from offbeat.timeline import Costs, speed_up


@dataclass(frozen=True)
class Network:
    """How long a message is under way: latency in seconds, bandwidth in bytes a second."""

    latency: float = 1e-4
    bandwidth: float = 2e9

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; times of one batch on its worker."""

    k: int
    units: list[Any]  # first and last index, first and last name
    params: int
    forward_ms: float
    backward_ms: float
    boundary_bytes: int  # sent up for one batch; 0 at the last stage
    in_flight: int
    versions: int
    memory_bytes: int
    mean_staleness: float


@dataclass(frozen=True)
class Plan:
    """The partition of a model for a method, and what to expect of it."""

    model: str
    method: str
    K: int
    M: int
    batch_size: int
    cuts: list[int]
    balance: float
    balance_bound: float  # what the largest unit permits
    predicted_speedup: float
    stages: list[StagePlan]
    methods: dict[str, float]
    advice: list[str]
    notes: list[str]

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

    @classmethod
    def of(cls, name: str, model: nn.Module, sample: Any, batch_size: int) -> Measured:
        verify(trace(model), sample)
        return cls(name, model, sample, batch_size, profile(model, sample))


def make_plan(
    measured: Measured,
    method: Method,
    K: int,
    *,
    by: By = "measured",
    network: Network | None = None,
    speeds: Sequence[float] | None = None,
    memory_limit: float | None = None,
    pinned: Sequence[int] = (),
    max_staleness: float | None = None,
) -> tuple[Plan, Costs]:
    """Cut for the method, measure the stages, and ask the clock."""
    network = network or Network()
    if speeds is not None and len(speeds) != K:
        raise UserError(f"{len(speeds)} speeds for {K} stages: give one for each")
    if max_staleness is not None and not 0 < max_staleness < float("inf"):
        raise UserError(f"a mean staleness of at most {max_staleness}: give a number above 0")
    costs = measured.profile
    traced = trace(measured.model)
    if len(traced.legal_cuts) + 1 < K:
        most = len(traced.legal_cuts) + 1
        raise UserError(f"{K} stages but only {most} units to cut between: use K <= {most}, or a deeper model")
    ks = range(1, K + 1)
    in_flight = [method.lag(k, K) + method.m for k in ks]
    held_versions = [versions_held(method.lag(k, K), method.M) if method.weights == "stash" else 1 for k in ks]
    memory = None
    if memory_limit is not None:
        memory = Memory(
            parameters=[unit.parameter_bytes for unit in costs.units], held=[unit.held_bytes for unit in costs.units],
            versions=[v + 3 for v in held_versions], in_flight=in_flight, limit=memory_limit,
        )  # fmt: skip
    deterministic = Profile(**{**vars(costs), "timed": False})
    solution = solve_for(
        measured.model, measured.sample, K, by=by, speeds=speeds, memory=memory, pinned=pinned,
        measured=costs if by == "measured" else deterministic,
    )  # fmt: skip
    seconds = stage_seconds(measured.model, solution.cuts, measured.sample)
    rates = list(speeds or [1.0] * K)
    alone = sum(forward + backward for forward, backward in seconds) / max(rates)
    seconds = [(forward / rate, backward / rate) for (forward, backward), rate in zip(seconds, rates, strict=True)]
    messages = [network.seconds(costs.boundary_bytes[cut]) for cut in solution.cuts]
    timing = Costs([f for f, _ in seconds], [b for _, b in seconds], up=messages, down=messages, baseline=alone)
    edges = list(zip([0, *solution.cuts], [*solution.cuts, len(costs.units)], strict=True))
    stages = [
        StagePlan(
            k=k,
            units=[start, end - 1, costs.units[start].name, costs.units[end - 1].name],
            params=sum(unit.parameters for unit in costs.units[start:end]),
            forward_ms=1000 * seconds[k - 1][0],
            backward_ms=1000 * seconds[k - 1][1],
            boundary_bytes=costs.boundary_bytes[end] if k < K else 0,
            in_flight=in_flight[k - 1],
            versions=held_versions[k - 1],
            memory_bytes=_memory(costs, start, end, in_flight[k - 1], held_versions[k - 1]),
            mean_staleness=mean_staleness(method.lag(k, K), method.M),
        )
        for k, (start, end) in enumerate(edges, start=1)
    ]
    loads = [forward + backward for forward, backward in seconds]
    plan = Plan(
        model=measured.name, method=method.name, K=K, M=method.M, batch_size=measured.batch_size,
        cuts=list(solution.cuts), balance=sum(loads) / K / max(loads), balance_bound=solution.balance_bound,
        predicted_speedup=speed_up(method, timing), stages=stages,
        methods={name: speed_up(method if name == method.name else declare(), timing)
                 for name, declare in DECLARED.items()},
        advice=list(_advice(method, K, stages, loads, max_staleness)), notes=list(traced.notes),
    )  # fmt: skip
    return plan, timing


def _memory(costs: Profile, start: int, end: int, in_flight: int, versions: int) -> int:
    """Parameters, gradients and momentum, the versions held, and what autograd saves for the batches in flight."""
    parameters = sum(unit.parameter_bytes for unit in costs.units[start:end])
    return parameters * (3 + versions) + sum(unit.held_bytes for unit in costs.units[start:end]) * in_flight


def _advice(
    method: Method, K: int, stages: list[StagePlan], loads: list[float], max_staleness: float | None
) -> Iterable[str]:
    lag = max(method.lag(k, K) for k in range(1, K + 1))
    if max_staleness is not None:
        M = max(1, -int(-lag // max_staleness))
        yield f"M = {M} is the smallest that keeps the mean staleness of every stage at or below {max_staleness:g}"
    largest = max(stages, key=lambda stage: stage.memory_bytes)
    yield (
        f"memory is largest at stage {largest.k}: {largest.memory_bytes / 1e6:,.0f} MB for {largest.in_flight} batches "
        f"in flight and {largest.versions} versions"
    )
    fewer = -(-sum(loads) // max(loads)) if max(loads) else K
    if fewer < K:
        yield f"the slowest stage takes 1/{sum(loads) / max(loads):.1f} of all time: K = {fewer:.0f} could be as fast"
