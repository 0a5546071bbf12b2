"""Handwritten digits (Alpaydin and Kaynak, 1998) as scikit-learn carries them: 1,797 grey images of 8x8."""

from __future__ import annotations

import numpy as np
import torch

from offbeat.data.memory import InMemory
from offbeat.errors import UserError, require

SIDE = 8


def open_digits(*, shape: tuple[int, int, int] = (1, SIDE, SIDE)) -> InMemory:
    """The digits, 1,437 to train and 360 to test; a larger `shape` repeats each pixel (nearest-neighbour upsampling).

    Training images are shifted by up to one pixel of the 8x8 grid each way, with black moving in.
    """
    channels, height, width = shape
    if channels != 1 or height % SIDE or width % SIDE:
        raise UserError(f"digits cannot have shape {shape}: give 1, height, width, both multiples of {SIDE}")
    require(["sklearn"], "the handwritten digits need")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)  # grey levels 0..16
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    # Every fifth of the samples sorted by class is a test sample: stratified, and the same for every version of numpy.
    by_class = np.argsort(bunch.target, kind="stable")
    is_test = np.arange(len(by_class)) % 5 == 0
    train, test = np.sort(by_class[~is_test]), np.sort(by_class[is_test])
    return InMemory(
        name="digits",
        classes=10,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        pad=1,
        flip=False,  # a mirrored digit is another sign
        white=16.0,
        mean=(0.3053,),
        std=(0.3760,),
        zoom=(height // SIDE, width // SIDE),
    )
