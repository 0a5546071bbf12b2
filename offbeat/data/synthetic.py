"""A synthetic classification task of any size: each class a coarse Gaussian pattern, each sample that plus noise.

The data set is fixed; a sample is made when a batch needs it, so that 224x224 images do not fill the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.data.order import Batches, Passes, epoch_order, generator
from offbeat.data.prefetch import prefetch
from offbeat.errors import UserError

GRID = 4  # a class pattern has GRID x GRID patches: coarse enough to survive convolution and pooling
OFFSETS = 2**20
NOISE_STEP = 2_654_435_761  # odd, so that each of OFFSETS samples has an offset of its own, far from its neighbours'


@dataclass(frozen=True, eq=False, repr=False)
class Synthetic(Passes):
    """Sample i has class i mod classes; image = pattern of its class (std 1/2) + noise (std 1). The test samples follow
    the training samples."""

    shape: tuple[int, int, int]
    classes: int
    train_samples: int
    test_samples: int
    patterns: NDArray[np.float32]  # classes, C, at most GRID, at most GRID
    noise: NDArray[np.float32]  # C*H*W + OFFSETS; a sample's noise is the window at its own offset
    name: str = "synthetic"

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        """Nothing is augmented."""
        order = epoch_order(self.train_samples, seed=seed, epoch=epoch).numpy()
        return prefetch(self._batch(order[part]) for part in parts)

    def test_batches(self, parts: list[slice]) -> Batches:
        order = np.arange(self.train_samples, self.train_samples + self.test_samples)
        return prefetch(self._batch(order[part]) for part in parts)

    def _batch(self, samples: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        _, height, width = self.shape
        labels = samples % self.classes
        # Fresh normal numbers for every sample would take longer than many a training step. Windows of one long noise
        # are a plain copy.
        windows = np.lib.stride_tricks.sliding_window_view(self.noise, int(np.prod(self.shape)))
        images = windows[samples * NOISE_STEP % OFFSETS].reshape(-1, *self.shape)
        patterns = self.patterns[labels]  # b,C,h,w
        high, wide = patterns.shape[2:]
        for row, column in np.ndindex(high, wide):  # a patch at a time: the images are passed over once, in place
            rows = slice(row * height // high, (row + 1) * height // high)
            columns = slice(column * width // wide, (column + 1) * width // wide)
            images[:, :, rows, columns] += patterns[:, :, row, column, None, None]
        return torch.from_numpy(images), torch.from_numpy(labels)


def patch_of(length: int, patches: int) -> NDArray[np.int64]:
    """The patch of each of `length` rows or columns.

    >>> patch_of(6, 4).tolist()
    [0, 1, 1, 2, 3, 3]
    """
    edges = np.arange(patches + 1) * length // patches
    return np.repeat(np.arange(patches), np.diff(edges))


def open_synthetic(*, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10, samples: int = 2048) -> Synthetic:
    """`samples` training samples and a quarter as many (at least one) to test, the same on every call."""
    for option, value in (("classes", classes), ("samples", samples)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"synthetic data cannot have {value} {option}: give a whole number of at least 1")
    channels, height, width = shape
    coarse = (classes, channels, min(GRID, height), min(GRID, width))
    length = channels * height * width + OFFSETS
    patterns = torch.randn(coarse, generator=generator("patterns"), dtype=torch.float32, device="cpu") / 2
    noise = torch.randn(length, generator=generator("noise"), dtype=torch.float32, device="cpu")
    return Synthetic(
        shape=shape,
        classes=classes,
        train_samples=samples,
        test_samples=max(1, samples // 4),
        patterns=patterns.numpy(),
        noise=noise.numpy(),
    )
