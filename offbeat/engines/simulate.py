"""Engine `simulate`: all K stages in this process, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from offbeat.core.links import Link
from offbeat.core.links.local import LocalLink
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.method import Method


class Simulate:
    """All stages here. `shuffle` interleaves their operations at random, which must change no number."""

    waits = False
    records = False

    def __init__(self, K: int, *, shuffle: int | None = None) -> None:
        self.K = K
        self.here: Sequence[int] = range(1, K + 1)
        self.order = None if shuffle is None else random.Random(shuffle)

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        return LocalLink(capacity)

    def run(self, work: list[Iterator[bool]]) -> None:
        unfinished = list(work)
        stuck = 0  # generators in a row that could not go on
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
                raise RuntimeError("no stage can go on: the programs wait for each other")

    def make_launch_queue(self, method: Method) -> LaunchQueue | None:
        return None

    def share(self, value: Any, source: int) -> Any:
        return value

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        pass

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Orders time, of which there is none here."""

    def beside(self, k: int) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None:
        """Nothing to wait for: whatever was asked for is done."""

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass
