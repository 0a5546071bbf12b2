"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 50,000 training and 10,000 test images, 3x32x32.

Augmentation is the usual one: zero padding by 4, random 32x32 crop, horizontal flip with probability 1/2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from offbeat.data.cifar_files import CIFAR10, CIFAR100, IMAGE, CifarFormat, find, read
from offbeat.data.memory import InMemory


def open_cifar10(*, folder: Path) -> InMemory:
    """CIFAR-10 from its binary or python folder, one of their archives, or the folder that holds one of these."""
    return _open("cifar10", folder, CIFAR10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def open_cifar100(*, folder: Path) -> InMemory:
    """CIFAR-100 with its 100 fine labels, from the same places as CIFAR-10."""
    return _open("cifar100", folder, CIFAR100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))


def _open(
    name: str, folder: Path, formats: tuple[CifarFormat, ...], *, mean: tuple[float, ...], std: tuple[float, ...]
) -> InMemory:
    place, format = find(folder, formats)
    count = sum(format.files.values())
    images = np.empty((count, *IMAGE), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    begin, first = 0, {}
    for file, records in format.files.items():  # the test file is the last of them
        first[file] = begin
        begin += records
    for file, pixels, its_labels in read(place, format):
        part = slice(first[file], first[file] + len(its_labels))
        images[part], labels[part] = pixels, its_labels
    train = first[format.test]
    return InMemory(
        name=name,
        classes=format.classes,
        train_images=torch.from_numpy(images[:train]),
        train_labels=torch.from_numpy(labels[:train]),
        test_images=torch.from_numpy(images[train:]),
        test_labels=torch.from_numpy(labels[train:]),
        pad=4,
        flip=True,
        white=255.0,
        mean=mean,
        std=std,
    )
