"""How to divide workers into stages and replicas: K x R, predicted from the profile of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from offbeat.errors import UserError, first_line
from offbeat.method import Method
from offbeat.partitioning.refine import rescaled, stage_sums
from offbeat.partitioning.solve import solve
from offbeat.partitioning.timing import whole_time
from offbeat.settings import shown
from offbeat.studies.plan import (
    Kept,
    LinkCost,
    Measured,
    exposure,
    recompute_to_fit,
    with_repeated_forwards,
)
from offbeat.theory import smallest_M
from offbeat.timeline import Costs, period


@dataclass(frozen=True)
class Split:
    """K stages in R replicas, as the clock predicts them.

    speedup        in batches per second, over back-propagation on one worker; None where it is not possible
    staleness      the largest mean staleness of a stage, in updates
    memory_bytes   of the fullest worker
    recompute      stages that repeat forwards, to fit the memory limit or to be faster within it
    reason         why it is not possible
    """

    K: int
    replicas: int
    M: int
    samples_per_update: int
    staleness: float | None = None
    memory_bytes: int | None = None
    speedup: float | None = None
    recompute: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def splits(
    measured: Measured,
    method: Method,
    workers: int,
    *,
    link: LinkCost,
    memory_limit: float | None = None,
    max_staleness: float | None = None,
) -> list[Split]:
    """Every way to divide the workers, from the most replicas to the most stages.

    max_staleness: take the smallest M that keeps the mean staleness of every stage at or below it.
    """
    whole = whole_time(measured.traced.twin(), measured.sample)
    units = measured.profile.units
    times = [
        rescaled([unit.forward for unit in units], (), [whole.forward]),
        rescaled([unit.backward for unit in units], (), [whole.backward]),
        rescaled([unit.parameter_bytes for unit in units], (), [whole.update]),
    ]
    found = []
    for K in (K for K in range(1, workers + 1) if workers % K == 0):
        split = Split(K, workers // K, method.M, measured.batch_size * method.M * (workers // K))
        try:
            chosen = _method(method, K, workers // K, max_staleness)
            split = replace(split, M=chosen.M, samples_per_update=measured.batch_size * chosen.M * split.replicas)
            found.append(_predicted(split, measured, chosen, times, whole.batch(), link, memory_limit))
        except UserError as error:
            found.append(replace(split, reason=first_line(error)))
    return found


def best(found: Sequence[Split]) -> Split:
    """The fastest; UserError where none is possible."""
    possible = [split for split in found if split.speedup is not None]
    if not possible:
        reasons = "; ".join(f"K={split.K}, replicas={split.replicas}: {split.reason}" for split in found)
        raise UserError(f"no division of {found[0].K * found[0].replicas} workers is possible ({reasons})")
    return max(possible, key=lambda split: split.speedup or 0.0)


def _method(method: Method, K: int, replicas: int, max_staleness: float | None) -> Method:
    """The method with the M that the staleness needs."""
    method.check(K)
    if replicas > 1 and (reason := method.why_no_replicas()):
        raise UserError(f"{method.name} {reason}")
    if max_staleness is None:
        return method
    M = smallest_M(method, K, max_staleness)
    if M is None:
        raise UserError(f"no M keeps the mean staleness at or below {max_staleness:g}")
    return replace(method.after_warmup, M=M)


def _predicted(
    split: Split,
    measured: Measured,
    method: Method,
    times: Sequence[Sequence[float]],
    alone: float,
    link: LinkCost,
    memory_limit: float | None,
) -> Split:
    costs, K = measured.profile, split.K
    if len(costs.legal_cuts) < K - 1:
        raise UserError(f"the network has {len(costs.legal_cuts) + 1} units to cut between")
    forward, backward, update = times
    sums = [
        link.sum_seconds(unit.parameter_bytes, split.replicas) - link.sum_seconds(0, split.replicas)
        for unit in costs.units
    ]
    work = [f + b + (u + s) / method.M for f, b, u, s in zip(forward, backward, update, sums, strict=True)]
    messages = [link.message_seconds(size) for size in costs.boundary_bytes]
    exposed = exposure(method, K, sum(forward), sum(backward), messages)
    fitting = recompute_to_fit(method, K, costs, memory_limit)
    method = fitting.method
    kept = Kept.of(method, K)
    cuts = solve(
        work,
        K,
        speeds=with_repeated_forwards(method, K, costs, None),
        memory=kept.limited(costs, memory_limit),
        legal=costs.legal_cuts,
        exposed_below=exposed,
        exposed_above=exposed,
    ).cuts
    fixed = link.sum_seconds(0, split.replicas)
    f, b, u, s = (stage_sums(parts, cuts) for parts in (forward, backward, update, sums))
    hops = [messages[cut] for cut in cuts]
    updates = [own + fixed + adding for own, adding in zip(u, s, strict=True)]
    seconds = period(method, Costs(f, b, updates, up=hops, down=hops))
    edges = pairwise([0, *cuts, len(costs.units)])
    return replace(
        split,
        staleness=max(kept.staleness),
        memory_bytes=max(kept.bytes(costs, k, start, end) for k, (start, end) in enumerate(edges, start=1)),
        speedup=split.replicas * alone / seconds,
        recompute="" if fitting.without is None else shown(method.recompute),
    )
