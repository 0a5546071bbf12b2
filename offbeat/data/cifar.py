"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 50,000 training and 10,000 test images, 3x32x32.

Augmentation is the field's usual one: zero padding by 4, random 32x32 crop, horizontal flip with probability 1/2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from offbeat.data.cifar_files import CIFAR10, CIFAR100, IMAGE, Layout, find, read
from offbeat.data.memory import InMemory


def open_cifar10(*, folder: Path) -> InMemory:
    """CIFAR-10 from its binary or python folder, one of their archives, or the folder that holds one of these."""
    return _open("cifar10", folder, CIFAR10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def open_cifar100(*, folder: Path) -> InMemory:
    """CIFAR-100 with its 100 fine labels; found as CIFAR-10 is."""
    return _open("cifar100", folder, CIFAR100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))


def _open(
    name: str, folder: Path, layouts: tuple[Layout, ...], *, mean: tuple[float, ...], std: tuple[float, ...]
) -> InMemory:
    place, layout = find(folder, layouts)
    count = sum(layout.files.values())
    images = np.empty((count, *IMAGE), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    begin, first = 0, {}
    for file, records in layout.files.items():  # the test file is the last of them
        first[file] = begin
        begin += records
    for file, pixels, its_labels in read(place, layout):
        part = slice(first[file], first[file] + len(its_labels))
        images[part], labels[part] = pixels, its_labels
    train = first[layout.test]
    return InMemory(
        name=name,
        classes=layout.classes,
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
