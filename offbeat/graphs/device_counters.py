"""Counters on a device, read without waiting: the loss, wrong answers, and what was first not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.core.metrics import Meter, batch_size, scores_classes


class DeviceCounters:
    """Counters on a device. `loss` and `gradients` are tensor work that can be recorded, in few kernels, since it is
    done for every batch and every update; the rest is the host's.

    Reading them at once would make the host wait for all queued work. So `poll` starts a copy and reads the one that it
    started before.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, wrong answers in percent, samples
        # losses and updates: how many, and how many since the first that was not finite, with it
        self.counts = torch.zeros(2, 2, dtype=torch.float64, device=device)
        self.steps = torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=device)  # what is added: a flag stays at 1
        self.scale = torch.ones(1, device=device)
        self.classes = True  # whether answers can be right or wrong
        on_gpu = device.type == "cuda"
        self.copied = torch.zeros(2, 2, dtype=torch.float64, pin_memory=on_gpu)
        self.one = torch.ones((), dtype=torch.float64, device=device)
        self.shares: dict[int, Tensor] = {}  # factors of mean, count and one, by batch size
        self.arrived = torch.cuda.Event() if on_gpu else None

    def loss(self, loss: Tensor, output: Any, target: Any) -> None:
        """One more loss, of a batch with those outputs."""
        value, size = loss.data.double(), batch_size(target, output)  # autograd does not see it written
        self.classes = scores_classes(output, target)
        wrong = (output.detach().argmax(dim=1) != target).sum(dtype=torch.float64) if self.classes else self.one
        if size not in self.shares:  # in the warm-up, before anything is recorded
            answers = target.numel() if self.classes else 1
            self.shares[size] = self.sums.new_tensor([size, 100.0 * size / answers, size])
        self.sums.addcmul_(torch.stack([value, wrong, self.one]), self.shares[size])
        self._count(0, [value])

    def gradients(self, gradients: list[Tensor]) -> None:
        """One more update, with those gradients."""
        self._count(1, [torch.view_as_real(g) if g.is_complex() else g for g in gradients])

    def _count(self, which: int, tensors: list[Tensor]) -> None:
        """One more loss or update. The function of torch.amp sets a flag where something is not finite, in one kernel;
        with a scale of 1 it leaves the tensors as they are."""
        step = self.steps[which]
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, step[1:], self.scale)
        self.counts[which].add_(step)

    def poll(self) -> list[int | None]:
        """Which loss and which update, from 1, were first not finite, as of the last call; None for none."""
        if self.arrived is None:
            return self.now()
        if not self.arrived.query():
            return [None, None]
        found = _indices(self.copied)
        self.copied.copy_(self.counts, non_blocking=True)
        self.arrived.record()
        return found

    def now(self) -> list[int | None]:
        """The same as of now; waits."""
        return _indices(self.counts)

    def clear(self) -> None:
        """Set all counters to zero."""
        self.sums.zero_()
        self.counts.zero_()
        self.steps[:, 1] = 0.0

    def read(self, meter: Meter) -> None:
        """Move what was summed up into the meter; waits."""
        loss, wrong, samples = self.sums.tolist()
        self.sums.zero_()
        if samples:
            for name, value in (("loss", loss), ("error", wrong if self.classes else None), ("top5", None)):
                before = meter.sums[name]
                meter.sums[name] = None if value is None or before is None else before + value
            meter.samples += int(samples)


def _indices(counts: Tensor) -> list[int | None]:
    return [int(counted - since) + 1 if since else None for counted, since in counts.tolist()]
