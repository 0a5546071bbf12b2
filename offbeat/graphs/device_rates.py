"""Learning rates on the device: stepped on the host, and written between the updates that read them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from offbeat.core.optimization import EagerOptimization
from offbeat.graphs.launch_queue import LaunchQueue, write


class DeviceRates:
    """Learning rates on the device, which change there only when the updates that are queued have been made.

    places  where the rates are on the device; empty until they are needed, and where they are not on a device
    values  what was last written there, or will be before the next update
    host    tensors of the host that a schedule steps instead of them, unless it is stepped on_numbers
    """

    def __init__(self, eager: EagerOptimization, launch_queue: LaunchQueue, rank: int, *, predicts: bool) -> None:
        self.eager, self.launch_queue, self.rank, self.predicts = eager, launch_queue, rank, predicts
        self.reset()

    def reset(self) -> None:
        """Take the rates from the device when they are next needed."""
        self.places: list[Tensor] = []
        self.values: list[float] = []
        self.host: list[Tensor] = []
        self.on_numbers = False

    def advance(self) -> None:
        """Step the schedule."""
        if not self.places and not self._take():
            self.eager.advance()
            return
        before, self.values = self.values, self._stepped()
        if self.values == before:
            return
        values = dict(zip(self.places, self.values, strict=True))
        if self.predicts:  # predictions read the rates, too
            self.launch_queue.after(self.rank, partial(write, values))
        else:
            self.launch_queue.write_before_update(self.rank, values)

    def _groups(self) -> list[dict[str, Any]]:
        return self.eager.optimizer.param_groups if self.eager.optimizer else []

    def _take(self) -> bool:
        """Read the rates; whether all of them are on the device, and work on it is queued."""
        rates = [group["lr"] for group in self._groups()]
        places = [rate for rate in rates if isinstance(rate, Tensor)]
        if not self.launch_queue.defers or not places or len(places) < len(rates):
            return False
        self.launch_queue.flush()
        self.places = places
        self.host = [place.to("cpu", copy=True) for place in places]
        self.values = [float(rate) for rate in self.host]
        scheduler = self.eager.scheduler
        initial = getattr(scheduler, "base_lrs", [])
        self.on_numbers = type(scheduler) is LambdaLR and not any(isinstance(rate, Tensor) for rate in initial)
        return True

    def _stepped(self) -> list[float]:
        """The rates after a step of the schedule."""
        if self.on_numbers:
            return _step_on_numbers(self.eager.scheduler, self.places)
        groups = self._groups()
        for group, rate in zip(groups, self.host, strict=True):
            group["lr"] = rate
        self.eager.advance()
        self.host = [group["lr"] for group in groups]
        for group, place in zip(groups, self.places, strict=True):
            group["lr"] = place
        return [float(rate) for rate in self.host]


def _step_on_numbers(scheduler: LambdaLR, places: list[Tensor]) -> list[float]:
    """The rates after a step of the schedule, whose state is then that of `scheduler.step()`.

    They do not depend on the rates before, as those of most schedules do, so they need not be rounded to the type of
    the optimizer's tensors in between. Torch takes ten times as long to step these.
    """
    scheduler._step_count += 1
    scheduler.last_epoch = update = scheduler.last_epoch + 1
    values: list[float] = []
    tensors: list[float | Tensor] = []
    for base, factor, place in zip(scheduler.base_lrs, scheduler.lr_lambdas, places, strict=True):
        values.append(value := float(base * factor(update)))
        tensors.append(_tensor(value, place.dtype))
    scheduler._last_lr = tensors
    return values


@lru_cache(maxsize=256)
def _tensor(value: float, dtype: torch.dtype) -> Tensor:
    """Stages make the same updates, so that all of them need it."""
    return torch.tensor(value, dtype=dtype)
