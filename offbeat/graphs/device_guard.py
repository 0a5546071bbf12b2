"""Losses and gradients that are not finite, found by counters on the device and reported later."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from offbeat.core.batch_guard import BatchGuard
from offbeat.core.metrics import Meter
from offbeat.errors import earliest
from offbeat.graphs.device_counters import DeviceCounters

CHECK_INTERVAL = 64  # forwards between two checks of the counters


class DeviceGuard:
    """Counts losses and updates on the device, and knows which batches they are of.

    losses      batches of the last recorded losses
    updates     the last updates with gradients: index and batches
    """

    def __init__(self, guard: BatchGuard, device: torch.device) -> None:
        self.guard, self.counters = guard, DeviceCounters(device)
        self.losses: deque[int] = deque(maxlen=4 * CHECK_INTERVAL)
        self.updates: deque[tuple[int, list[int]]] = deque(maxlen=4 * CHECK_INTERVAL)

    def observe(self, t: int, loss: Tensor, output: Any, target: Any) -> None:
        """Count the loss of a recorded batch; nothing but tensor work."""
        self.counters.loss(loss, output, target)

    def check_soon(self) -> None:
        """Raise for what was not finite as of the last check; does not wait."""
        self._check(self.counters.poll())

    def settle(self, meter: Meter) -> None:
        """Wait; raise for what is not finite, and move the sums of losses and errors into the meter."""
        self._check(self.counters.now())
        self.counters.read(meter)

    def _check(self, first_not_finite: list[int | None]) -> None:
        if not any(first_not_finite):
            return
        loss, update = first_not_finite
        losses, updates = map(int, self.counters.counts[:, 0].tolist())
        found = []
        if loss:
            found.append(self.guard.loss_error(self.losses[loss - losses - 1], "not finite"))
        if update:
            found.append(self.guard.gradient_error(*self.updates[update - updates - 1]))
        raise earliest(found)
