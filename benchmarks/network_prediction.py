"""Seconds per update of the rows of benchmarks/network.py, as the timeline predicts them.

From the measured times of stages without messages, the sizes of messages, and the rate and delay of a line. A line
transfers one message at a time in each direction. All-reduces are rings, and overlap with the last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from network_relay import Profile
from network_rows import INNER_STEPS, SAMPLES, M, NetworkRow

from offbeat.method import Method
from offbeat.methods import named
from offbeat.ops import Backward, Forward, Program, Update
from offbeat.timeline import Costs, period

BUCKET = 25 * 1024 * 1024  # bytes of a bucket of DDP, which is reduced by itself


@dataclass(frozen=True)
class MeasuredCosts:
    """The answers of all workers to a request for costs; see network_worker.py."""

    workers: list[dict[str, Any]]

    @property
    def K(self) -> int:  # noqa: N802
        return len(self.workers)

    def stage(self, what: int, samples: int) -> list[float]:
        """Seconds of every stage: 0 forward, 1 backward, 2 update."""
        return [float(worker["stages"][str(samples)][what]) for worker in self.workers]

    def whole(self, what: int, samples: int) -> float:
        """Seconds of the whole network in the slowest worker: 0 forward, 1 backward with update."""
        return max(float(worker["whole"][str(samples)][what]) for worker in self.workers)

    def message(self, what: int, messages: str) -> list[int]:
        """Bytes of the message of a batch at every boundary: 0 activations, 1 gradients."""
        return [worker["bytes"][messages][what] for worker in self.workers[:-1]]

    def encoding(self, messages: str) -> float:
        """Seconds to encode and decode a message."""
        return max(worker["encoding"][messages] for worker in self.workers[:-1])


def predicted(row: NetworkRow, costs: MeasuredCosts, profile: Profile) -> float:
    """Seconds per update."""
    if row.kind == "ddp":
        return _data_parallel(row, costs, profile)
    if row.kind == "local-sgd":
        samples = SAMPLES // costs.K
        alone = costs.whole(0, samples) + costs.whole(1, samples)
        return alone + _all_reduce(costs, profile, buckets=1) / INNER_STEPS
    method = _method(row)
    return (row.parts if row.late else 1) * period(method, _costs(row, costs, profile))


def _data_parallel(row: NetworkRow, costs: MeasuredCosts, profile: Profile) -> float:
    samples = SAMPLES // costs.K // row.parts
    forward, backward = costs.whole(0, samples), costs.whole(1, samples)
    buckets = -(-costs.workers[0]["parameters"] // BUCKET)
    reduced = _all_reduce(costs, profile, buckets=buckets)
    alone = row.parts * forward + (row.parts - 1) * backward
    # the last bucket is complete only when the backward is
    return alone + max(backward + reduced / buckets, reduced)


def _all_reduce(costs: MeasuredCosts, profile: Profile, *, buckets: int) -> float:
    """A ring: every worker sends 2(K-1) times 1/K of each bucket."""
    turns = 2 * (costs.K - 1)
    return buckets * turns * profile.delay + turns / costs.K * 8 * costs.workers[0]["parameters"] / profile.rate


def _costs(row: NetworkRow, costs: MeasuredCosts, profile: Profile) -> Costs:
    """Of a local iteration: a batch of a late method, or an update in micro-batches."""
    samples, pieces = SAMPLES // row.parts, 1 if row.late else row.parts
    batch, encoding = SAMPLES // M, costs.encoding(row.messages) if row.messages != "exact" else 0.0
    share = samples / batch  # of a message

    def seconds(what: int) -> list[float]:
        return [pieces * 8 * share * size / profile.rate for size in costs.message(what, row.messages)]

    return Costs(
        [pieces * (value + encoding) for value in costs.stage(0, samples)],
        [pieces * (value + encoding) for value in costs.stage(1, samples)],
        costs.stage(2, samples),
        up=seconds(0),
        down=seconds(1),
        latency=profile.delay,
        exclusive=True,
    )


def _method(row: NetworkRow) -> Method:
    if row.setting == "Schedule1F1B":
        m = row.parts
        return Method(name="1f1b", lag=lambda k, K: 0, m=m, order=lambda k, K, batches: one_f_one_b(k, K, batches, m=m))
    if row.setting == "ScheduleGPipe":
        return named("gpipe", m=row.parts)
    return named(row.setting, **({"M": row.parts} if row.late else {"m": row.parts}))


def one_f_one_b(k: int, K: int, batches: Iterable[int], *, m: int) -> Program:
    """Synchronous 1F1B over the m micro-batches of each batch.

    >>> [" ".join(map(str, each)) for each in one_f_one_b(1, 2, range(1), m=3)]
    ['F0 F1 B0 F2 B1 B2 U']
    """
    ahead = min(m, K - k + 1)
    for t in batches:
        first = t * m
        operations: list[Any] = [Forward(first + number) for number in range(ahead)]
        for number in range(m):
            operations.append(Backward(first + number))
            if number + ahead < m:
                operations.append(Forward(first + number + ahead))
        yield (*operations, Update(1))
