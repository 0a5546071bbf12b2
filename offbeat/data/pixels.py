"""Bytes of images to floats on any device, with the same bits as `augment.normalise` gives on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.data import augment


class PixelTable:
    """A table of all 256 values of each channel, which `normalise` fills."""

    def __init__(
        self,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        white: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self.device = device
        values = np.broadcast_to(np.arange(256, dtype=np.uint8), (channels, 1, 256))
        table = augment.normalise(values, white=white, mean=mean, std=std)
        self.table = table.flatten().to(device, dtype)  # value v of channel c is at 256 c + v
        self.first = 256 * torch.arange(channels, device=device, dtype=torch.int32)[:, None, None]

    def floats(self, pixels: Tensor) -> Tensor:
        """Of pixels (b, C, H, W)."""
        return self.table.index_select(0, pixels.int().add_(self.first).flatten()).view(pixels.shape)


def arranged(images: Tensor, *, channels_last: bool) -> Tensor:
    """In the memory format of channels-last, or the usual one."""
    return images.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
