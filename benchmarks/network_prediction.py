"""Predicted seconds per update of the rows of benchmarks/network.py.

From the measured times of stages without messages, the sizes of messages, and the rate and delay of a line. A line
transfers one message at a time in each direction. Rows of this package are predicted by its timeline. In rows of torch
a gloo send starts when the receiver's notice that it has posted the receive arrives (`rendezvous`): this package posts
receives ahead, torch.distributed.pipelining when it needs the message. All-reduces are rings with a notice in each
turn, and overlap with the last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from network_relay import Profile
from network_rows import INNER_STEPS, SAMPLES, M, NetworkRow

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
    if row.kind == "torch":
        return rendezvous(row, _costs(row, costs, profile))
    method = named(row.setting, **({"M": row.parts} if row.late else {"m": row.parts}))
    return (row.parts if row.late else 1) * period(method, _costs(row, costs, profile))


def _data_parallel(row: NetworkRow, costs: MeasuredCosts, profile: Profile) -> float:
    samples = SAMPLES // costs.K // row.parts
    forward, backward = costs.whole(0, samples), costs.whole(1, samples)
    buckets = -(-costs.workers[0]["parameters"] // BUCKET)
    reduced = _all_reduce(costs, profile, buckets=buckets)
    alone = row.parts * forward + (row.parts - 1) * backward
    buffers = 2 * profile.delay  # the first worker broadcasts them before the forward
    # the last bucket is complete only when the backward is
    return alone + buffers + max(backward + reduced / buckets, reduced)


def _all_reduce(costs: MeasuredCosts, profile: Profile, *, buckets: int) -> float:
    """A ring: every worker sends 2(K-1) times 1/K of each bucket."""
    turns = 2 * (costs.K - 1)
    return buckets * turns * 2 * profile.delay + turns / costs.K * 8 * costs.workers[0]["parameters"] / profile.rate


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


# ---- torch.distributed.pipelining

UPDATES = 8  # simulated, of which the second half is counted
Key = tuple[int, int, int]  # of a message: source, target, micro-batch


def rendezvous(row: NetworkRow, costs: Costs) -> float:
    """Seconds per update where a transfer starts once the receiver's notice has arrived.

    1F1B posts a send together with the next receive and waits for both; GPipe waits for its sends at the end.
    """
    K, m, waits = costs.K, row.parts, row.setting == "Schedule1F1B"
    order = one_f_one_b if waits else lambda k, K, batches, m: fill_drain_in_order(batches, m=m)
    programs = [[op for each in order(k, K, range(UPDATES), m=m) for op in each] for k in range(1, K + 1)]
    method = named("gpipe", m=m)
    now, place, ends = [0.0] * K, [0] * K, list[float]()
    sent: dict[Key, float] = {}
    posted: dict[Key, float] = {}
    free: dict[tuple[int, int], float] = {}
    accepted: list[Key | None] = [None] * K  # the send that a stage waits for
    moved = True
    while moved:
        moved = False
        for k in range(1, K + 1):
            while place[k - 1] < len(programs[k - 1]):
                operation = programs[k - 1][place[k - 1]]
                source = method.receives(operation, k, K)
                if source:
                    posted.setdefault((source, k, operation.t), now[k - 1])
                waited = accepted[k - 1]
                if waited is not None and waited not in posted:
                    break
                if waited is not None:
                    now[k - 1] = max(now[k - 1], posted[waited] + costs.latency)
                    accepted[k - 1] = None
                begins = now[k - 1]
                if source:
                    key = (source, k, operation.t)
                    if key not in sent:
                        break
                    starts = max(sent[key], posted[key] + costs.latency, free.get(key[:2], 0.0))
                    free[key[:2]] = starts + costs.transfer_seconds(source, k, method)
                    begins = max(begins, free[key[:2]] + costs.latency)
                now[k - 1] = begins + costs.of(operation, k, method)
                target = method.sends(operation, k, K)
                if target:
                    sent[k, target, operation.t] = now[k - 1]
                    accepted[k - 1] = (k, target, operation.t) if waits else None
                if isinstance(operation, Update) and k == 1:
                    ends.append(now[0])
                place[k - 1] += 1
                moved = True
    half = UPDATES // 2
    return (ends[-1] - ends[half - 1]) / (UPDATES - half)


def fill_drain_in_order(batches: Iterable[int], *, m: int) -> Program:
    """GPipe of torch: all forwards, then all backwards in the same order.

    >>> [" ".join(map(str, each)) for each in fill_drain_in_order(range(1), m=2)]
    ['F0 F1 B0 B1 U']
    """
    for t in batches:
        micro = range(t * m, (t + 1) * m)
        yield (*map(Forward, micro), *map(Backward, micro), Update(1))


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
