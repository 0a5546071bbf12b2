"""Augmentation of whole batches: padded random crop, horizontal flip, normalisation.

Written in numpy, not torch: these run in a background thread, where torch would start a second team of OpenMP threads
beside the training's own, and both teams would wait for each other's cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (b, C, H, W)


@dataclass(frozen=True)
class Draws:
    """The random choices for every position of one epoch, so that an epoch can be entered at any batch."""

    top: NDArray[np.int64]  # first row of the crop in the padded image
    left: NDArray[np.int64]
    flip: NDArray[np.bool_]

    def __getitem__(self, part: slice) -> Draws:
        return Draws(self.top[part], self.left[part], self.flip[part])


def draw(samples: int, *, pad: int, flip: bool, generator: torch.Generator) -> Draws:
    """Uniform crop offsets in 0..2*pad, and a flip with probability 1/2 where `flip` allows one."""
    offsets = torch.randint(0, 2 * pad + 1, (2, samples), generator=generator, device="cpu").numpy()
    coins = torch.randint(0, 2, (samples,), generator=generator, device="cpu").numpy().astype(np.bool_)
    return Draws(offsets[0], offsets[1], coins & flip)


def crop_and_flip(images: Pixels, draws: Draws, *, pad: int) -> Pixels:
    """Each image zero-padded by `pad` on all sides, cut back to its size at its own offset, then mirrored or not."""
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), dtype=np.uint8)
    padded[:, :, pad : pad + height, pad : pad + width] = images
    # A view, nothing is copied: b,C,2*pad+1,2*pad+1,H,W
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped = windows[np.arange(count), :, draws.top, draws.left]  # b,C,H,W
    return np.where(draws.flip[:, None, None, None], cropped[..., ::-1], cropped)


def normalise(images: Pixels, *, white: float, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """(pixel / white - mean) / std for each channel, float32; the operations and their order are torchvision's."""
    scaled = images.astype(np.float32)
    scaled /= np.float32(white)
    scaled -= np.array(mean, dtype=np.float32)[:, None, None]
    scaled /= np.array(std, dtype=np.float32)[:, None, None]
    return torch.from_numpy(scaled)
