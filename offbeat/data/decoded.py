"""Folders of images for another device: decoded on the host, copied as bytes, normalised on the device.

What worker processes hand over and what is copied is then a quarter of the floats. The bytes of test images, which are
the same in every epoch, stay on the device where they fit: they are decoded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from offbeat.data.imagefolder import MEAN, STD, WHITE, Batch, ImageFolder
from offbeat.data.order import Batches, Passes
from offbeat.data.pixels import PixelTable, arranged


@dataclass(frozen=True, eq=False, repr=False)
class DecodedOnHost(Passes):
    """A folder of images whose batches are decoded on the host, and copied to the device before they are normalised.

    A batch is computed on the CUDA stream that is current when it is requested.

    keeps   whether test images stay on the device
    kept    their batches, as bytes, by the size of the first in the last complete pass
    """

    name: str
    shape: tuple[int, int, int]
    classes: int
    train_samples: int
    test_samples: int
    source: ImageFolder
    table: PixelTable
    channels_last: bool
    keeps: bool
    kept: dict[int, list[Batch]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        data: ImageFolder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        channels_last: bool = False,
        limit: int | None = None,
    ) -> DecodedOnHost:
        """The same images, with batches on the device. Test images stay there if they take at most `limit` bytes."""
        table = PixelTable(data.shape[0], device, dtype, white=WHITE, mean=MEAN, std=STD)
        sizes = data.name, data.shape, data.classes, data.train_samples, data.test_samples
        source = replace(data, as_bytes=True, pinned=device.type == "cuda")
        keeps = limit is None or data.test_samples * math.prod(data.shape) <= limit
        return cls(*sizes, source, table, channels_last, keeps)

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        return self._finished(self._copied(self.source.train_batches(parts, seed=seed, epoch=epoch)))

    def test_batches(self, parts: list[slice]) -> Batches:
        return self._finished(self._tests(parts))

    def _tests(self, parts: list[slice]) -> Batches:
        size = parts[0].stop - parts[0].start
        if size in self.kept:
            yield from self.kept[size]
            return
        batches = []
        for batch in self._copied(self.source.test_batches(parts)):
            if self.keeps:
                batches.append(batch)
            yield batch
        if self.keeps:
            if self.table.device.type == "cuda":
                torch.cuda.synchronize(self.table.device)  # copied on this stream, read on any other
            self.kept.clear()
            self.kept[size] = batches

    def _copied(self, batches: Batches) -> Batches:
        device = self.table.device
        for pixels, labels in batches:
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _finished(self, batches: Batches) -> Batches:
        """Bytes (b, H, W, 3) as floats (b, 3, H, W)."""
        for pixels, labels in batches:
            images = self.table.floats(pixels.permute(0, 3, 1, 2))
            yield arranged(images, channels_last=self.channels_last), labels
