"""The replicas of a stage in several processes: the sum of their windows on torch.distributed.

An all-reduce whose order of adding does not depend on the number of replicas or the backend. Each replica adds 1/R of
every bucket and gives the result to the others, so that 2 (R-1)/R of the gradients are sent and as much received, as by
a ring:

    bucket of replica 0   [ a0 | b0 ]   all-to-all   [ a0 a1 ]  a0 + a1   all-gather   [ a | b ]
    bucket of replica 1   [ a1 | b1 ]                [ b0 b1 ]  b0 + b1                [ a | b ]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.replicas import (
    WindowFacts,
    WindowShare,
    add_in_order,
    check_places,
    replace_sums,
    request_of,
)
from offbeat.core.window import GradientWindow

BUCKET = 25 << 20  # bytes, as in torch's DistributedDataParallel


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type whose gradients are sent together, by their index."""

    parameters: list[int]
    sizes: list[int]
    dtype: torch.dtype


def buckets(parameters: list[Tensor]) -> Iterator[Bucket]:
    """All parameters in order, type by type, in buckets of about BUCKET bytes.

    >>> [bucket.sizes for bucket in buckets([torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)])]
    [[3, 4], [2]]
    """
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        open_bucket = Bucket([], [], dtype)
        for index, parameter in enumerate(parameters):
            if parameter.dtype != dtype:
                continue
            if open_bucket.sizes and (sum(open_bucket.sizes) + parameter.numel()) * dtype.itemsize > BUCKET:
                yield open_bucket
                open_bucket = Bucket([], [], dtype)
            open_bucket.parameters.append(index)
            open_bucket.sizes.append(parameter.numel())
        yield open_bucket


class GroupWindowSum:
    """The sum over replicas in other processes, see WindowSum. Tensors are sent from host memory.

    A thread adds the windows, while the stage continues.

    collective   around what may fail when another process does
    wait         for a collective of torch.distributed
    """

    overlaps = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        *,
        collective: Callable[[], AbstractContextManager[None]],
        wait: Callable[[Any], None],
    ) -> None:
        self.group, self.replicas, self.collective, self.wait = group, replicas, collective, wait
        self.replica = dist.get_rank(group)
        self.request = self.requested = 0
        self.buckets: list[Bucket] = []
        self.header = torch.empty(0)
        self.scattered: list[tuple[Tensor, Any]] = []  # (the replicas' shares of a bucket, its transfer)
        self.headers: list[Tensor] = []
        self.header_sent: Any = None
        self.complete: Callable[[], None] | None = None
        self.adding: Future[tuple[list[Tensor | None], list[WindowFacts]]] = Future()
        self.threads: list[threading.Thread] = []

    def start(self, window: GradientWindow, *, update: int, over: int, unit: int) -> None:
        share = WindowShare.of(window, update=update, over=over, unit=unit, request=self.request)
        self.request = 0
        self.buckets = list(buckets(list(window.parameters.values())))
        known = [each is not None for each in share.sums]
        with self.collective():
            self._send_header([*share.facts, *known])
            self.scattered = [self._scatter(bucket, share.sums) for bucket in self.buckets]
        self.adding = Future()
        shapes = [parameter.shape for parameter in window.parameters.values()]
        self.threads = [threading.Thread(target=self._add, args=(self.adding, shapes), name="offbeat-sum", daemon=True)]
        self.threads[0].start()

    def end(self, window: GradientWindow, *, batches: int) -> None:
        """A header alone, in the place of that of a window, after the window that may be under way."""
        with self.collective():
            if self.threads:
                self.adding.result()
            self._send_header([*WindowFacts(batches, 0, 0, 0.0, 1, 0), *[0.0] * len(window.parameters)])
            _, facts = self._received_headers()
        check_places(facts)

    def _send_header(self, stated: list[float]) -> None:
        self.header = torch.tensor(stated, dtype=torch.float64)
        self.headers = [torch.empty_like(self.header) for _ in range(self.replicas)]
        self.header_sent = dist.all_gather(self.headers, self.header, group=self.group, async_op=True)

    def _received_headers(self) -> tuple[list[list[float]], list[WindowFacts]]:
        """The headers of all replicas, and their facts."""
        self.wait(self.header_sent)
        stated = [header.tolist() for header in self.headers]
        facts = [
            WindowFacts(int(update), int(over), int(count), excess, int(unit), int(request))
            for update, over, count, excess, unit, request, *_ in stated
        ]
        return stated, facts

    def _scatter(self, bucket: Bucket, sums: list[Tensor | None]) -> tuple[Tensor, Any]:
        """Send 1/R of the bucket to each replica."""
        width = max(1, -(-sum(bucket.sizes) // self.replicas))
        given = torch.empty(self.replicas * width, dtype=bucket.dtype)
        given[sum(bucket.sizes) :].zero_()
        for index, place in zip(bucket.parameters, given[: sum(bucket.sizes)].split(bucket.sizes), strict=True):
            gradient = sums[index]
            if gradient is None:
                place.zero_()
            else:
                place.view(gradient.shape).copy_(gradient)
        received = torch.empty_like(given)
        # bytes, since gloo does not know all types
        sent = dist.all_to_all_single(
            received.view(torch.uint8), given.view(torch.uint8), group=self.group, async_op=True
        )
        return received.view(self.replicas, width), (sent, given)

    def ready(self) -> bool:
        return self.adding.done()

    def finish(self, window: GradientWindow) -> int:
        with self.collective():
            sums, facts = self.adding.result()
        replace_sums(window, sums, facts)
        self.scattered, self.headers, self.threads = [], [], []
        return request_of(facts)

    def _add(self, adding: Future[tuple[list[Tensor | None], list[WindowFacts]]], shapes: list[torch.Size]) -> None:
        """Receive the shares of the window under way, add them, and bring the sums to all replicas."""
        try:
            stated, facts = self._received_headers()
            check_places(facts)
            gathered = [self._gather(*one, facts) for one in self.scattered]
            for _, work, _ in gathered:
                self.wait(work)
        except Exception as error:
            adding.set_exception(error)
            return
        found: dict[int, Tensor] = {}
        for bucket, (parts, _, _) in zip(self.buckets, gathered, strict=True):
            flat = parts.flatten()[: sum(bucket.sizes)]
            found |= dict(zip(bucket.parameters, flat.split(bucket.sizes), strict=True))
        given = [any(column) for column in zip(*(each[len(WindowFacts._fields) :] for each in stated), strict=True)]
        sums = [found[index].view(shape) if given[index] else None for index, shape in enumerate(shapes)]
        adding.set_result((sums, facts))

    def _gather(
        self, shares: Tensor, transfer: tuple[Any, Tensor], facts: list[WindowFacts]
    ) -> tuple[Tensor, Any, Tensor]:
        """Add the replicas' shares of a bucket, and send the sum to all."""
        self.wait(transfer[0])
        total = add_in_order(shares.unbind(), facts)
        parts = torch.empty_like(shares)
        rows = [part.view(torch.uint8) for part in parts.unbind()]
        return parts, dist.all_gather(rows, total.view(torch.uint8), group=self.group, async_op=True), total
