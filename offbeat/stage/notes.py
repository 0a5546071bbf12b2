"""What a device writes down while nobody waits for it: the loss, wrong answers, and what was first not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.metrics import Meter, batch_size, scores_classes


class Notes:
    """Counters on a device. `loss` and `gradients` are tensor work that can be recorded; the rest is the host's.

    Reading them at once would make the host wait for all that it has asked for. So `look` asks for a copy and reads the
    one that it asked for before.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, wrong answers in percent, samples
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # losses, updates
        self.bad = torch.zeros(2, dtype=torch.int64, device=device)  # the first of each that was not finite; 0: none
        self.classes = True  # whether answers can be right or wrong
        on_gpu = device.type == "cuda"
        self.asked = torch.zeros(2, dtype=torch.int64, pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None

    def loss(self, loss: Tensor, output: Any, target: Any) -> None:
        """One more loss, of a batch with those outputs."""
        loss, size = loss.detach(), batch_size(target, output)
        percent = _wrong(output, target)
        self.classes = percent is not None
        self._count(0, loss.isfinite())
        self.sums[0] += loss * size
        self.sums[2] += size
        if percent is not None:
            self.sums[1] += percent * size

    def gradients(self, gradients: list[Tensor]) -> None:
        """One more update, with those gradients."""
        self._count(1, torch.stack(torch._foreach_norm(gradients)).isfinite().all())

    def _count(self, which: int, good: Tensor) -> None:
        self.counts[which] += 1
        self.bad[which].copy_(torch.where(good | (self.bad[which] > 0), self.bad[which], self.counts[which]))

    def look(self) -> list[int]:
        """Which loss and which update, from 1, were first not finite, as of the last look; 0 for none."""
        if self.arrived is None:
            return self.bad.tolist()
        if not self.arrived.query():
            return [0, 0]
        seen = self.asked.tolist()
        self.asked.copy_(self.bad, non_blocking=True)
        self.arrived.record()
        return seen

    def clear(self) -> None:
        """Forget everything."""
        for counter in (self.sums, self.counts, self.bad):
            counter.zero_()

    def read(self, meter: Meter) -> None:
        """Move what was summed up into the meter; waits."""
        loss, wrong, samples = self.sums.tolist()
        self.sums.zero_()
        if samples:
            for name, value in (("loss", loss), ("error", wrong if self.classes else None), ("top5", None)):
                before = meter.sums[name]
                meter.sums[name] = None if value is None or before is None else before + value
            meter.samples += int(samples)


def _wrong(output: Any, target: Any) -> Tensor | None:
    """Percentage of targets that do not have the highest score; None where they are not classes."""
    return 100.0 * (output.detach().argmax(dim=1) != target).double().mean() if scores_classes(output, target) else None
