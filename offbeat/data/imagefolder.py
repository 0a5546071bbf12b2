"""A folder of images in ImageNet's layout: {train,val}/<class>/*.JPEG, decoded by worker processes.

The random choices for a training sample are drawn from (seed, epoch, index of the sample), so that the number of
workers changes only the speed.
"""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from offbeat.data.augment import normalise
from offbeat.data.images import testing_pixels, training_pixels
from offbeat.data.order import Batches, Passes, epoch_order, generator
from offbeat.errors import UserError, require
from offbeat.seeds import derive

Batch = tuple[Tensor, Tensor]

SUFFIXES = (".jpeg", ".jpg", ".png")
LAYOUT = "train/<class>/*.jpeg and val/<class>/*.jpeg (or test/ for val/; .jpg and .png too)"
WHITE, MEAN, STD = 255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


@dataclass(frozen=True)
class Files:
    """The images of one split, sorted by class and then by name."""

    paths: list[str]
    labels: list[int]


@dataclass(frozen=True, eq=False, repr=False)
class ImageFolder(Passes):
    """Images of classes that are folders; classes are numbered in the order of the sorted folder names.

    as_bytes   whether batches are bytes (b, H, W, 3), for those who arrange and normalise them
    pinned     whether batches are in pinned memory, for copies to a GPU
    """

    shape: tuple[int, int, int]
    class_names: list[str]
    train_files: Files
    test_files: Files
    workers: int
    name: str = "imagefolder"
    as_bytes: bool = False
    pinned: bool = False

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def train_samples(self) -> int:
        return len(self.train_files.paths)

    @property
    def test_samples(self) -> int:
        return len(self.test_files.paths)

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        """Random-resized crops and flips; other images are not read."""
        order = epoch_order(self.train_samples, seed=seed, epoch=epoch)
        return self._loaded(self.train_files, (seed, epoch), [order[part].tolist() for part in parts])

    def test_batches(self, parts: list[slice]) -> Batches:
        """Resized and cut at the centre."""
        return self._loaded(self.test_files, None, [list(range(part.start, part.stop)) for part in parts])

    def _loaded(self, files: Files, seeds: tuple[int, int] | None, batches: list[list[int]]) -> Batches:
        reader = _Reader(files, self.shape, seeds, as_bytes=self.as_bytes)
        return _loaded(reader, batches, self.workers, pinned=self.pinned)


class _Reader(Dataset[Batch | UserError]):
    """What a worker process runs: the indices of a batch in, the batch out.

    A UserError is returned, not raised: the DataLoader would wrap a raised one in the worker's traceback.
    """

    def __init__(
        self, files: Files, shape: tuple[int, int, int], seeds: tuple[int, int] | None, *, as_bytes: bool
    ) -> None:
        self.files, self.size, self.seeds, self.as_bytes = files, shape[1:], seeds, as_bytes

    def __getitem__(self, indices: list[int]) -> Batch | UserError:
        try:
            pixels = np.stack([self._pixels(index) for index in indices])  # b,H,W,3
        except UserError as error:
            return error
        labels = torch.tensor([self.files.labels[index] for index in indices], dtype=torch.int64)
        if self.as_bytes:
            return torch.from_numpy(pixels), labels
        planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        return normalise(planes, white=WHITE, mean=MEAN, std=STD), labels

    def _pixels(self, index: int) -> np.ndarray:
        if self.seeds is None:
            return testing_pixels(self.files.paths[index], self.size)
        draws = random.Random(derive("image", *self.seeds, index))
        return training_pixels(self.files.paths[index], self.size, draws)


def _loaded(reader: _Reader, batches: list[list[int]], workers: int, *, pinned: bool) -> Batches:
    # batch_size=None: an element of `batches` is one item of the reader. Without a generator of its own the DataLoader
    # would draw its workers' seed from torch's global one.
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=batches,
        num_workers=min(workers, len(batches)),
        collate_fn=_as_it_is,
        generator=generator("loader"),
        pin_memory=pinned,
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork beside threads; the workers run nothing but Pillow and numpy.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        running = iter(loader)
    try:
        for batch in running:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    finally:
        del running  # the DataLoader ends its worker processes when its iterator is deleted


def _as_it_is(item: Any) -> Any:
    return item


def open_imagefolder(*, folder: Path, shape: tuple[int, int, int] = (3, 224, 224), workers: int = 2) -> ImageFolder:
    """The images below `folder`, cropped to `shape`; val is used to test, or test where there is no val."""
    require(["PIL"], "a folder of images needs")
    if shape[0] != 3:
        raise UserError(f"imagefolder cannot have shape {shape}: images are decoded to RGB, give 3, height, width")
    if not isinstance(workers, int) or workers < 0:
        raise UserError(f"workers={workers}: give the number of decoding processes, 0 for none")
    train = folder / "train"
    test = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        gone = "train/" if not train.is_dir() else "val/ and no test/"
        raise UserError(f"{folder} has no {gone}: imagefolder expects {LAYOUT}")
    classes, test_classes = _class_names(train), _class_names(test)
    if classes != test_classes:
        odd = min(set(classes) ^ set(test_classes))
        has, lacks = (train, test) if odd in classes else (test, train)
        raise UserError(f"class {odd!r} is in {has} but not in {lacks}: both need the same class folders")
    if len(classes) == 1:
        raise UserError(f"{train} has a single class folder, {classes[0]!r}: give one for each of at least 2 classes")
    return ImageFolder(
        shape=shape,
        class_names=classes,
        train_files=_files(train, classes),
        test_files=_files(test, classes),
        workers=workers,
    )


def _class_names(split: Path) -> list[str]:
    with os.scandir(split) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise UserError(f"{split} has no class folders: imagefolder expects {LAYOUT}")
    return found


def _files(split: Path, classes: list[str]) -> Files:
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        entries = sorted(os.listdir(split / name))
        images = [entry for entry in entries if entry.lower().endswith(SUFFIXES) and not entry.startswith(".")]
        if not images:
            held = f"no image among its {len(entries)} files" if entries else "no file"
            raise UserError(f"class folder {split / name} holds {held}: add images ({' '.join(SUFFIXES)}) or remove it")
        paths += [os.path.join(split, name, image) for image in images]
        labels += [label] * len(images)
    return Files(paths, labels)
