"""Learning rates on the device: stepped on the host, and written between the updates that read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from offbeat.core.optimization import EagerOptimization
from offbeat.graphs.launch_queue import LaunchQueue


class DeviceRates:
    """Learning rates on the device. Those of updates that are launched at once are in different places, which updates
    use in turn, so that each can be written before the launch and after earlier ones. Predictions of weights read those
    of the next update.

    ring    places on the device, by group; empty until they are needed, and where rates are not on a device
    values  what was last written to each, or will be before the next update that reads it
    next    index in the ring of what the next update reads
    host    tensors of the host that a schedule steps instead of them, unless it is stepped on_numbers
    """

    def __init__(
        self, eager: EagerOptimization, launch_queue: LaunchQueue, rank: int, *, M: int, predicts: bool
    ) -> None:
        self.eager, self.launch_queue, self.rank = eager, launch_queue, rank
        self.size = launch_queue.rate_places(M, predicts=predicts)
        self.write = launch_queue.write_before_turn if predicts else launch_queue.write_before_update
        self.reset()

    def reset(self) -> None:
        """Take the rates from the device when they are next needed."""
        self.ring: list[list[Tensor]] = []
        self.values: list[list[float]] = []
        self.next = 0
        self.host: list[Tensor] = []
        self.on_numbers = False

    def restart(self) -> None:
        """Start with the first place again, as the slots do, so that the same updates meet the same slots."""
        if self.ring:
            self._continue(0, self.values[self.next])

    def advance(self) -> None:
        """Step the schedule."""
        if not self.ring and not self._take():
            self.eager.advance()
            return
        self._continue((self.next + 1) % self.size, self._stepped())

    def _continue(self, index: int, values: list[float]) -> None:
        """Have the next update read these values, at that place."""
        places = self.ring[index]
        if index != self.next:
            self.next = index
            self._set_rates(places)
        if values == self.values[index]:
            return
        self.values[index] = values
        self.write(self.rank, dict(zip(places, values, strict=True)))

    def known(self) -> list[float]:
        """The rates of the next update, which the device may not have yet."""
        if not self.ring:
            return self.eager.learning_rates()
        values = zip(self.values[self.next], self.ring[self.next], strict=True)
        return [float(_tensor(value, place.dtype)) for value, place in values]

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """Have the optimizer read the rates at that place."""
        if not self.ring:
            yield
            return
        self._set_rates(self.ring[index])
        try:
            yield
        finally:
            self._set_rates(self.ring[self.next])

    def _set_rates(self, rates: list[Tensor]) -> None:
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate

    def _groups(self) -> list[dict[str, Any]]:
        return self.eager.optimizer.param_groups if self.eager.optimizer else []

    def _take(self) -> bool:
        """Read the rates; whether all of them are on the device, and work on it is queued."""
        rates = [group["lr"] for group in self._groups()]
        places = [rate for rate in rates if isinstance(rate, Tensor)]
        if not self.launch_queue.defers or not places or len(places) < len(rates):
            return False
        self.launch_queue.flush()
        self.ring = [places, *([place.clone() for place in places] for _ in range(self.size - 1))]
        self.host = [place.to("cpu", copy=True) for place in places]
        self.values = [[float(rate) for rate in self.host]] * self.size
        scheduler = self.eager.scheduler
        initial = getattr(scheduler, "base_lrs", [])
        self.on_numbers = type(scheduler) is LambdaLR and not any(isinstance(rate, Tensor) for rate in initial)
        return True

    def _stepped(self) -> list[float]:
        """The rates after a step of the schedule."""
        places = self.ring[self.next]
        if self.on_numbers:
            return _step_on_numbers(self.eager.scheduler, places)
        self._set_rates(self.host)
        self.eager.advance()
        self.host = [group["lr"] for group in self._groups()]
        self._set_rates(places)
        return [float(rate) for rate in self.host]


def _step_on_numbers(scheduler: Any, places: list[Tensor]) -> list[float]:
    """The rates after a step of a LambdaLR, whose state is then that of `scheduler.step()`.

    They do not depend on the rates before, as those of most schedules do, so they need not be rounded to the type of
    the optimizer's tensors in between. Torch takes ten times as long to step these.
    """
    scheduler._step_count += 1
    scheduler.last_epoch = update = scheduler.last_epoch + 1
    values, tensors = [], []
    for base, factor, place in zip(scheduler.base_lrs, scheduler.lr_lambdas, places, strict=True):
        values.append(value := float(base * factor(update)))
        tensors.append(_tensor(value, place.dtype))
    scheduler._last_lr = tensors
    return values


@lru_cache(maxsize=256)
def _tensor(value: float, dtype: torch.dtype) -> Tensor:
    """Stages make the same updates, so that all of them need it."""
    return torch.tensor(value, dtype=dtype)
