"""Folders of images for another device: decoded on the host, copied as bytes, normalised on the device.

What worker processes hand over and what is copied is then a quarter of the floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from offbeat.data.imagefolder import MEAN, STD, WHITE, Batch, ImageFolder
from offbeat.data.pixels import PixelTable, arranged


@dataclass(frozen=True, eq=False, repr=False)
class DecodedOnHost:
    """A folder of images whose batches are decoded on the host, and copied to the device before they are normalised.

    A batch is computed on the CUDA stream that is current when it is requested.
    """

    name: str
    shape: tuple[int, int, int]
    classes: int
    train_samples: int
    test_samples: int
    source: ImageFolder
    table: PixelTable
    channels_last: bool

    @classmethod
    def of(
        cls, data: ImageFolder, device: torch.device, dtype: torch.dtype, *, channels_last: bool = False
    ) -> DecodedOnHost:
        """The same images, with batches on the device."""
        table = PixelTable(data.shape[0], device, dtype, white=WHITE, mean=MEAN, std=STD)
        sizes = data.name, data.shape, data.classes, data.train_samples, data.test_samples
        source = replace(data, as_bytes=True, pinned=device.type == "cuda")
        return cls(*sizes, source, table, channels_last)

    def train(
        self,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        skip: int = 0,
        drop_last: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[Batch]:
        """One shuffled and augmented epoch without its first `skip` samples, which are not read."""
        decoded = self.source.train(
            batch_size=batch_size, seed=seed, epoch=epoch, skip=skip, drop_last=drop_last, share=share
        )
        return self._finished(decoded)

    def test(self, *, batch_size: int) -> Iterator[Batch]:
        """The test images once, in order, resized and cut at the centre."""
        return self._finished(self.source.test(batch_size=batch_size))

    def _finished(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        device = self.table.device
        for pixels, labels in batches:
            images = self.table.floats(pixels.to(device, non_blocking=True))
            yield arranged(images, channels_last=self.channels_last), labels.to(device, non_blocking=True)
