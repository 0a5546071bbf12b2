"""Engine `simulate`: all K stages in this process, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.clipping import LocalNormExchange, LocalNorms, NormExchange
from offbeat.core.links import Link
from offbeat.core.links.local import LocalLink
from offbeat.core.replicas import LocalReplicas, LocalWindowSum, WindowSum
from offbeat.engines import MakeExecutor, eager
from offbeat.method import Method


class Simulate:
    """All stages of all replicas in this process. `shuffle` interleaves their operations at random, which must change
    no result."""

    waits = False
    on_one_device = False  # its results are those of processes
    leads = True
    mesh = None

    def __init__(self, K: int, *, replicas: int = 1, shuffle: int | None = None) -> None:
        self.K, self.replicas = K, replicas
        self.here: Sequence[int] = range(1, K + 1)
        self.replicas_here: Sequence[int] = range(replicas)
        self.sums = {k: LocalReplicas(replicas) for k in self.here}
        self.norms = [LocalNorms(K) for _ in self.replicas_here]
        self.order = None if shuffle is None else random.Random(shuffle)

    def link(
        self,
        channel: str,
        source: int,
        target: int,
        *,
        capacity: int,
        patient: bool = False,
        from_replica: int | None = None,
    ) -> Link | None:
        return LocalLink(capacity)

    def window_sum(self, k: int, replica: int) -> WindowSum | None:
        return LocalWindowSum(self.sums[k], replica) if self.replicas > 1 else None

    def norm_exchange(self, k: int, replica: int) -> NormExchange:
        return LocalNormExchange(self.norms[replica], k)

    def run(self, work: list[Iterator[bool]]) -> None:
        unfinished = list(work)
        stuck = 0  # consecutive generators that could not continue
        while unfinished:
            generator = unfinished.pop(self.order.randrange(len(unfinished)) if self.order else 0)
            for progress in generator:
                stuck = 0 if progress else stuck + 1
                if self.order or not progress:
                    unfinished.append(generator)
                    break
            else:
                stuck = 0
            if stuck > 1000 * len(unfinished):
                raise RuntimeError("no stage can continue: the programs wait for each other")

    @property
    def interleaves(self) -> bool:
        return self.order is not None

    @property
    def defers(self) -> bool:
        return False

    def device_for(self, given: torch.device | None) -> torch.device:
        return given or torch.device("cpu")

    def ordered(self, method: Method) -> Method:
        return method

    def executor_maker(self, method: Method) -> MakeExecutor:
        return eager

    def take(self, batch: Any, device: torch.device) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), batch)

    def give(self, loss: Tensor) -> Tensor:
        return loss

    def share(self, value: Any, source: int) -> Any:
        return value

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        pass

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Stages that run one after the other have nothing to wait for."""

    def stage_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        """Nothing is queued: all work is done when its call returns."""

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass
