"""A data set of small images that is kept in memory as bytes and augmented batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from offbeat.data import augment
from offbeat.data.order import Batches, Passes, epoch_order, generator
from offbeat.data.prefetch import prefetch


@dataclass(frozen=True, eq=False, repr=False)
class InMemory(Passes):
    """Images as uint8 (N, C, h, w), labels as int64 (N,), and the augmentation and normalisation of their batches."""

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    pad: int  # the random crop's zero padding in pixels, put on before normalisation: black, not mean grey
    flip: bool
    white: float  # the value of the brightest pixel
    mean: tuple[float, ...]
    std: tuple[float, ...]
    zoom: tuple[int, int] = (1, 1)  # each pixel becomes a block of zoom[0] x zoom[1] (nearest-neighbour upsampling)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one sample, as the batches have it."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height * self.zoom[0], width * self.zoom[1]

    @property
    def train_samples(self) -> int:
        return len(self.train_labels)

    @property
    def test_samples(self) -> int:
        return len(self.test_labels)

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        return prefetch(self._train(parts, seed, epoch))

    def test_batches(self, parts: list[slice]) -> Batches:
        """Normalised only."""
        return prefetch(self._test(parts))

    def _train(self, parts: list[slice], seed: int, epoch: int) -> Batches:
        order = epoch_order(self.train_samples, seed=seed, epoch=epoch).numpy()
        # Drawn for the whole epoch at once (about 1 ms for 50,000 samples): skipping batches costs nothing.
        stream = generator("augment", seed, epoch)
        draws = augment.draw(self.train_samples, pad=self.pad, flip=self.flip, generator=stream)
        images, labels = self.train_images.numpy(), self.train_labels
        for part in parts:
            pixels = augment.crop_and_flip(images[order[part]], draws[part], pad=self.pad)
            yield self._finished(pixels), labels[order[part]]

    def _test(self, parts: list[slice]) -> Batches:
        for part in parts:
            yield self._finished(self.test_images[part].numpy()), self.test_labels[part].clone()

    def _finished(self, pixels: augment.Pixels) -> Tensor:
        high, wide = self.zoom
        if self.zoom != (1, 1):
            pixels = np.repeat(np.repeat(pixels, high, axis=2), wide, axis=3)
        return augment.normalise(pixels, white=self.white, mean=self.mean, std=self.std)
