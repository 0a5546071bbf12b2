"""Which batches belong to which epoch, also in a run that is resumed with another batch size.

samples of epoch 0  | 0 1 2 3 | 4 5 6 7 | 8 9 |         batch size 4: batches 0, 1, 2
samples of epoch 1  | 0 1 2 3 | 4 5 | 6 7 | 8 9 |       batch 3; from batch 4 on, batch size 2
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from offbeat.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Epochs of `samples` samples in batches of `batch_size`.

    Batch number `batch` starts at sample `offset` of `epoch`; the batches before it, if any, had another size.

    >>> epochs = Epochs(samples=10, batch_size=4)
    >>> epochs.per_epoch, [epochs.position(n) for n in range(5)]
    (3, [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4)])
    >>> halved = epochs.continued(4, Epochs(samples=10, batch_size=2))
    >>> [halved.position(n) for n in range(4, 9)]
    [(1, 4), (1, 6), (1, 8), (2, 0), (2, 2)]
    """

    samples: int
    batch_size: int
    drop_last: bool = False
    batch: int = 0
    epoch: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise UserError(
                f"batch_size={self.batch_size} with drop_last=True, but an epoch has {self.samples} samples: "
                f"use batch_size={self.samples} or less, or drop_last=False"
            )

    def _batches(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    @property
    def per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return self._batches(self.samples)

    @property
    def first_end(self) -> int:
        """The number of batches after which the epoch of batch number `batch` ends."""
        return self.batch + self._batches(self.samples - self.offset)

    def position(self, batches: int) -> tuple[int, int]:
        """The epoch after this many batches, and the samples of it that have been used."""
        if batches < self.first_end:
            return self.epoch, self.offset + (batches - self.batch) * self.batch_size
        epochs, rest = divmod(batches - self.first_end, self.per_epoch)
        return self.epoch + 1 + epochs, rest * self.batch_size

    def epoch_of(self, t: int) -> int:
        """The epoch of batch t."""
        return self.position(t)[0]

    def ends_epoch(self, batches: int) -> bool:
        """Whether an epoch ends after this many batches."""
        return batches > self.batch and self.position(batches)[1] == 0

    def progress(self, batches: int) -> float:
        """Progress after this many batches, in batches of the current size: what schedules count."""
        if batches < self.first_end:
            return max(0.0, self.epoch * self.per_epoch + self.offset / self.batch_size + (batches - self.batch))
        return (self.epoch + 1) * self.per_epoch + (batches - self.first_end)

    def continued(self, batches: int, new: Epochs) -> Epochs:
        """The epochs of `new`, starting where these are after this many batches; self if nothing differs."""
        if (new.samples, new.batch_size, new.drop_last) == (self.samples, self.batch_size, self.drop_last):
            return self
        epoch, offset = self.position(batches)
        offset = offset * new.samples // self.samples
        if not new._batches(new.samples - offset):  # less than a batch is left, and dropped
            epoch, offset = epoch + 1, 0
        return replace(new, batch=batches, epoch=epoch, offset=offset)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
