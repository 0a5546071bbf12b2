"""Data sets by name: CIFAR, folders of images, scikit-learn's digits, a synthetic one, and text.

    data = offbeat.data.open("cifar10", folder="~/data")
    for images, labels in data.train(batch_size=128, seed=0, epoch=3):
        ...

A training epoch is a pure function of (seed, epoch, batch_size): the same bits on every call, on every machine with the
same torch, whatever the global random state, which is never touched.

May import errors, seeds and core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from offbeat.data.cifar import open_cifar10, open_cifar100
from offbeat.data.digits import open_digits
from offbeat.data.imagefolder import LAYOUT, open_imagefolder
from offbeat.data.resident import on_device
from offbeat.data.synthetic import open_synthetic
from offbeat.data.text import open_text
from offbeat.errors import UserError, unknown

__all__ = ["DataSet", "names", "on_device", "open", "open_data"]


class DataSet(Protocol):
    """Samples with their targets, split into training and test samples.

    Batches of images are float32 (b, C, H, W) and int64 (b,), those of text int64 (b, context) twice. The short last
    batch of test samples is always used.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...  # of one sample: (C, H, W), or (context,)
    @property
    def classes(self) -> int: ...  # of text: the vocabulary
    @property
    def train_samples(self) -> int: ...
    @property
    def test_samples(self) -> int: ...

    def train(
        self,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        skip: int = 0,
        drop_last: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One shuffled and augmented epoch without its first `skip` samples, and without a short last batch where
        `drop_last`. Of a share (r, R) only the batches r, r + R, ..., without the last ones if they are fewer than
        R."""

    def test(self, *, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test samples once, in their fixed order, without augmentation."""


@dataclass(frozen=True)
class Kind:
    """A data set that can be opened by name: the function that opens it, and its options."""

    opener: Callable[..., DataSet]
    takes: tuple[str, ...] = ()
    layout: str = ""  # contents of the folder, where one is required
    sizes: str = "channels, height, width"  # of one sample
    fixed: tuple[tuple[int, ...], int] | None = None  # shape and classes, where they are known without the files


KINDS = {
    "cifar10": Kind(
        open_cifar10, ("folder",), "cifar-10-batches-bin, cifar-10-batches-py or their tar.gz", fixed=((3, 32, 32), 10)
    ),
    "cifar100": Kind(
        open_cifar100, ("folder",), "cifar-100-binary, cifar-100-python or their tar.gz", fixed=((3, 32, 32), 100)
    ),
    "imagefolder": Kind(open_imagefolder, ("folder", "shape", "workers"), LAYOUT),
    "digits": Kind(open_digits, ("shape",)),
    "synthetic": Kind(open_synthetic, ("shape", "classes", "samples")),
    "text": Kind(open_text, ("folder", "shape", "samples", "tokenizer"), sizes="tokens"),
}


def names() -> list[str]:
    """The names that open() accepts.

    >>> names()
    ['cifar10', 'cifar100', 'imagefolder', 'digits', 'synthetic', 'text']
    """
    return list(KINDS)


def open_data(
    name: str,
    *,
    folder: Path | str | None = None,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    tokenizer: Path | str | None = None,
    workers: int = 2,
) -> DataSet:
    """The data set of that name; options that are None take the data set's own value.

    `folder` is where the files are (cifar10, cifar100, imagefolder, text); `shape`, `classes` and `samples` are only
    for the data sets whose files do not fix them; `tokenizer` is a tokenizer.json for text; `workers` processes decode
    the images of an imagefolder (0: this process).

    >>> data = open_data("synthetic", shape=(1, 8, 8), classes=3, samples=10)
    >>> [len(labels) for _, labels in data.train(batch_size=4, seed=0, epoch=0)]
    [4, 4, 2]
    """
    if name not in KINDS:
        raise unknown("data set", name, KINDS)
    kind = KINDS[name]
    given = {"folder": folder, "shape": shape, "classes": classes, "samples": samples, "tokenizer": tokenizer}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if option not in kind.takes:
            takers = ", ".join(other for other, its in KINDS.items() if option in its.takes)
            raise UserError(f"{name} takes no {option}: leave it out (data sets that take one: {takers})")
    if kind.layout and folder is None:
        raise UserError(f"{name} needs folder=: give the folder that holds {kind.layout}")
    if folder is not None:
        options["folder"] = Path(folder).expanduser()
        if not _exists(options["folder"]):
            holds = kind.layout or f"{name} files"
            raise UserError(f"folder {options['folder']} does not exist: {name} needs one that holds {holds}")
    if tokenizer is not None:
        options["tokenizer"] = Path(tokenizer).expanduser()
    if shape is not None:
        options["shape"] = _checked_shape(name, shape)
    if "workers" in kind.takes:
        options["workers"] = workers
    return kind.opener(**options)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have
        return False


def _checked_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes, wanted = tuple(shape), KINDS[name].sizes
    if len(sizes) != len(wanted.split(", ")) or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise UserError(f"shape={sizes} of {name}: give {wanted}, each a whole number of at least 1")
    return sizes


open = open_data
