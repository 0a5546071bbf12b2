"""Small data sets on the device that trains: copied there once as bytes; every epoch is computed there in large pieces.

    piece    | 0: b0 b1 .. bn | 1: bn+1 ..      | 2: ...       a batch is a slice of its piece
    made     | with the first | with the first of 0 | of 1     one piece ahead, a few large operations each

Random choices are drawn on the CPU by the same calls as for data in host memory, and pixels become floats by a table
of all 256 values that the same `normalise` fills: the batches are the same bit for bit on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.core.layout import ALIGNMENT
from offbeat.data import augment
from offbeat.data.decoded import DecodedOnHost
from offbeat.data.imagefolder import ImageFolder
from offbeat.data.memory import InMemory
from offbeat.data.order import Batches, Passes, epoch_order, generator
from offbeat.data.pixels import PixelTable, arranged
from offbeat.data.synthetic import NOISE_STEP, OFFSETS, Synthetic, patch_of

if TYPE_CHECKING:
    from offbeat.data import DataSet

PIECE = 64 * 2**20  # bytes of finished images that are computed at once
PEAK_PIECES = 6  # memory at the peak: one piece in use, one waiting, one being computed and its intermediates
SHARE = 0.25  # of the device's free memory that data may take: training needs the rest

Making = Callable[[slice], tuple[Tensor, Tensor]]  # positions of an epoch -> their images and labels


class DeviceSource(Protocol):
    """The parts of a data set that are kept on a device, and how batches are computed from them."""

    def epoch(self, seed: int, epoch: int) -> Making: ...
    def tests(self) -> Making: ...


@dataclass(frozen=True, eq=False, repr=False)
class Resident(Passes):
    """A data set whose batches are computed on the device that holds its samples.

    Batches are views of pieces, which are freed with the last of their batches. A piece is computed on the CUDA stream
    that is current when a batch is requested: request a whole epoch on one stream.
    """

    name: str
    shape: tuple[int, int, int]
    classes: int
    train_samples: int
    test_samples: int
    source: DeviceSource
    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    piece: int

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        return self._batches(lambda: self.source.epoch(seed, epoch), parts)

    def test_batches(self, parts: list[slice]) -> Batches:
        return self._batches(self.source.tests, parts)

    def _batches(self, begin: Callable[[], Making], parts: list[slice]) -> Batches:
        for batches, images, labels in _one_ahead(self._pieces(begin, parts)):
            first = batches[0].start
            for part in batches:
                inside = slice(part.start - first, part.stop - first)
                yield _own(images[inside]), _own(labels[inside])

    def _pieces(self, begin: Callable[[], Making], parts: list[slice]) -> Iterator[tuple[list[slice], Tensor, Tensor]]:
        if not parts:
            return
        make = begin()
        size = (parts[1].start if len(parts) > 1 else parts[0].stop) - parts[
            0
        ].start  # with the batches of other shares
        together = max(1, self.piece // (_finished_bytes(self.shape, self.dtype) * size))
        for at in range(0, len(parts), together):
            batches = parts[at : at + together]
            images, labels = make(slice(batches[0].start, batches[-1].stop))
            yield batches, arranged(images.to(self.dtype), channels_last=self.channels_last), labels


def on_device(
    data: DataSet,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    limit: int | None = None,
    piece: int = PIECE,
) -> tuple[DataSet, str | None]:
    """The data set with its samples on the device; or the same data set, and a note if it does not fit there.

    Of an image folder, batches are copied one by one, and only test images stay on the device, if they fit; a text is
    returned as it is. `limit` is how many bytes of the device the data may take, by default a quarter of the free
    memory of a CUDA device.

    >>> from offbeat import data
    >>> digits, note = on_device(data.open("digits"), "cpu")
    >>> [len(labels) for _, labels in digits.test(batch_size=250)]
    [250, 110]
    """
    device = torch.device(device)
    if not isinstance(data, ImageFolder | InMemory | Synthetic):
        return data, None
    if limit is None and device.type == "cuda":
        limit = int(SHARE * torch.cuda.mem_get_info(device)[0])
    if isinstance(data, ImageFolder):
        return DecodedOnHost.of(data, device, dtype, channels_last=channels_last, limit=limit), None
    samples = max(data.train_samples, data.test_samples)
    needed = _kept(data) + PEAK_PIECES * min(piece, samples * _finished_bytes(data.shape, dtype))
    if limit is not None and needed > limit:
        mib = [-(-needed // 2**20), limit // 2**20]
        return data, (
            f"{data.name} needs {mib[0]} MiB on {device}, where data may take {mib[1]} MiB: "
            "it stays in host memory, and every batch is copied"
        )
    source = _Images(data, device, dtype) if isinstance(data, InMemory) else _Noise(data, device)
    return Resident(
        data.name,
        data.shape,
        data.classes,
        data.train_samples,
        data.test_samples,
        source,
        device,
        dtype,
        channels_last,
        piece,
    ), None


def _finished_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of one image; at least those of float32, since shorter types are computed from int32."""
    return int(np.prod(shape)) * max(4, dtype.itemsize)


def _kept(data: InMemory | Synthetic) -> int:
    """Bytes that the data set takes on the device at all times."""
    if isinstance(data, Synthetic):
        return data.noise.nbytes + data.patterns.nbytes
    return sum(t.nbytes for t in (data.train_images, data.train_labels, data.test_images, data.test_labels))


class _Images:
    """Images as bytes; crop, flip and enlargement gather rows and columns, normalisation is a table lookup."""

    def __init__(self, data: InMemory, device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.device = data, device
        self.train = data.train_images.to(device), data.train_labels.to(device)
        self.test = data.test_images.to(device), data.test_labels.to(device)
        channels, height, width = data.train_images.shape[1:]
        self.table = PixelTable(channels, device, dtype, white=data.white, mean=data.mean, std=data.std)
        # The row and column of the image for each row and column of a finished image.
        self.rows = torch.arange(height * data.zoom[0], device=device) // data.zoom[0]
        self.columns = torch.arange(width * data.zoom[1], device=device) // data.zoom[1]
        self.last = width - 1

    def epoch(self, seed: int, epoch: int) -> Making:
        data, (images, labels) = self.data, self.train
        order = _moved(epoch_order(data.train_samples, seed=seed, epoch=epoch), self.device)
        stream = generator("augment", seed, epoch)
        draws = augment.draw(data.train_samples, pad=data.pad, flip=data.flip, generator=stream)
        top, left, flip = (
            _moved(torch.from_numpy(drawn), self.device)[:, None] for drawn in (draws.top, draws.left, draws.flip)
        )

        def make(part: slice) -> tuple[Tensor, Tensor]:
            padded = torch.nn.functional.pad(images[order[part]], (data.pad,) * 4)
            columns = left[part] + torch.where(flip[part], self.last - self.columns, self.columns)
            return self._finished(padded, top[part] + self.rows, columns), labels[order[part]]

        return make

    def tests(self) -> Making:
        images, labels = self.test
        return lambda part: (self._finished(images[part], self.rows[None], self.columns[None]), labels[part].clone())

    def _finished(self, pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Rows (b or 1, H) and columns (b or 1, W) of each image, as floats."""
        count, channels, _, across = pixels.shape
        # Two gathers with expanded views: indexing with several tensors would materialise them on a GPU.
        strips = pixels.gather(2, rows[:, None, :, None].expand(count, channels, -1, across))
        cut = strips.gather(3, columns[:, None, None, :].expand(*strips.shape[:3], -1))  # b,C,H,W
        return self.table.floats(cut)


class _Noise:
    """The noise and the patterns of synthetic samples, which are computed when they are needed here too."""

    def __init__(self, data: Synthetic, device: torch.device) -> None:
        self.data, self.device = data, device
        self.windows = torch.from_numpy(data.noise).to(device).unfold(0, int(np.prod(data.shape)), 1)  # a view
        self.patterns = torch.from_numpy(data.patterns).to(device)
        high, wide = data.patterns.shape[2:]
        self.rows = torch.from_numpy(patch_of(data.shape[1], high)).to(device)[:, None]
        self.columns = torch.from_numpy(patch_of(data.shape[2], wide)).to(device)

    def epoch(self, seed: int, epoch: int) -> Making:
        order = _moved(epoch_order(self.data.train_samples, seed=seed, epoch=epoch), self.device)
        return lambda part: self._made(order[part])

    def tests(self) -> Making:
        first = self.data.train_samples
        return lambda part: self._made(torch.arange(first + part.start, first + part.stop, device=self.device))

    def _made(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        labels = samples % self.data.classes
        images = self.windows[samples * NOISE_STEP % OFFSETS].view(-1, *self.data.shape)
        images += self.patterns[labels][:, :, self.rows, self.columns]
        return images, labels


def _moved(drawn: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for the work in flight there."""
    if device.type == "cuda":
        return drawn.pin_memory().to(device, non_blocking=True)
    return drawn.to(device)


def _own(batch: Tensor) -> Tensor:
    """A slice as a separate tensor, in the memory of the piece unless it does not start on a boundary there.

    Kernels choose their order of sums by where a tensor starts. `.data`, since the slices of a piece would otherwise
    share a version counter: a network that changes its input in place would seem to have changed batches in flight.
    """
    return batch.data if batch.data_ptr() % ALIGNMENT == 0 else batch.clone()


def _one_ahead(source: Iterator[tuple[list[slice], Tensor, Tensor]]) -> Iterator[tuple[list[slice], Tensor, Tensor]]:
    """Each item once the next one is computed: on a GPU that is launched long before it is needed."""
    held = next(source, None)
    while held is not None:
        following = next(source, None)
        yield held
        held = following
