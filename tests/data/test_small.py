"""The data sets that need no files: digits and synthetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat.data
from offbeat.data import DataSet
from offbeat.data.memory import InMemory
from offbeat.data.synthetic import OFFSETS, Synthetic


def all_of(data: DataSet) -> tuple[Tensor, Tensor]:
    return next(data.test(batch_size=data.test_samples))


def accuracy_of_a_linear_model(data: DataSet, *, epochs: int, rate: float) -> float:
    model = nn.Linear(int(torch.tensor(data.shape).prod()), data.classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        for images, labels in data.train(batch_size=32, seed=0, epoch=epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.flatten(1)), labels).backward()
            optimizer.step()
    images, labels = all_of(data)
    return float((model(images.flatten(1)).argmax(1) == labels).float().mean())


def test_digits_are_split_into_1437_and_360_with_every_class_in_proportion() -> None:
    data = offbeat.data.open("digits")
    assert (data.shape, data.classes, data.train_samples, data.test_samples) == ((1, 8, 8), 10, 1437, 360)
    assert isinstance(data, InMemory)
    share = data.test_labels.bincount() / (data.test_labels.bincount() + data.train_labels.bincount())
    assert share.sub(0.2).abs().max() < 0.01
    both = torch.cat([data.train_images, data.test_images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797  # no training image is a test image


def test_digits_are_normalised() -> None:
    data = offbeat.data.open("digits")
    assert isinstance(data, InMemory)
    pixels = data.train_images.double() / 16
    assert data.mean[0] == pytest.approx(float(pixels.mean()), abs=2e-3)
    assert data.std[0] == pytest.approx(float(pixels.std()), abs=2e-3)
    images, _ = all_of(data)
    assert torch.equal(images, (data.test_images.float() / 16 - data.mean[0]) / data.std[0])


def test_larger_digits_repeat_each_pixel() -> None:
    small, _ = all_of(offbeat.data.open("digits"))
    large, _ = all_of(offbeat.data.open("digits", shape=(1, 16, 24)))
    assert torch.equal(large, small.repeat_interleave(2, dim=2).repeat_interleave(3, dim=3))


def test_digits_are_shifted_by_at_most_one_pixel_and_all_nine_shifts_occur() -> None:
    data = offbeat.data.open("digits")
    assert isinstance(data, InMemory)
    from offbeat.data.order import epoch_order

    order = epoch_order(data.train_samples, seed=1, epoch=1)
    images, _ = next(data.train(batch_size=data.train_samples, seed=1, epoch=1))
    padded = nn.functional.pad(data.train_images[order], (1, 1, 1, 1)).float()
    shifts = torch.stack(
        [
            (images == (padded[:, :, top : top + 8, left : left + 8] / 16 - data.mean[0]) / data.std[0])
            .flatten(1)
            .all(1)
            for top in range(3)
            for left in range(3)
        ]
    )
    assert shifts.any(0).all()
    assert shifts.any(1).all()


def test_a_linear_model_learns_the_digits() -> None:
    assert accuracy_of_a_linear_model(offbeat.data.open("digits"), epochs=8, rate=0.02) > 0.75  # of shifted digits


def test_synthetic_defaults_are_small_images_of_ten_classes() -> None:
    data = offbeat.data.open("synthetic")
    assert (data.shape, data.classes, data.train_samples, data.test_samples) == ((3, 32, 32), 10, 2048, 512)
    assert offbeat.data.open("synthetic", samples=2).test_samples == 1


def test_a_linear_model_learns_the_synthetic_data() -> None:
    assert accuracy_of_a_linear_model(offbeat.data.open("synthetic", shape=(3, 16, 16)), epochs=2, rate=0.02) > 0.9


def test_synthetic_samples_are_fixed_all_different_and_of_unit_noise() -> None:
    data = offbeat.data.open("synthetic", samples=400, classes=4, shape=(1, 8, 8))
    first, second = (next(data.train(batch_size=400, seed=0, epoch=epoch)) for epoch in (0, 1))
    assert len(first[0].flatten(1).unique(dim=0)) == 400
    assert torch.equal(first[0].flatten(1).sort(dim=0).values, second[0].flatten(1).sort(dim=0).values)
    for label in range(4):
        of_class = first[0][first[1] == label]
        assert of_class.std(0).mean() == pytest.approx(1, abs=0.05)


def test_synthetic_images_of_imagenet_size_take_little_memory() -> None:
    data = offbeat.data.open("synthetic", shape=(3, 224, 224), classes=1000, samples=1_281_167)
    images, labels = next(data.train(batch_size=4, seed=0, epoch=0, skip=4000))
    assert images.shape == (4, 3, 224, 224)
    assert labels.max() < 1000
    kept = data.noise.nbytes + data.patterns.nbytes  # type: ignore[attr-defined]
    assert kept < 10_000_000


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 2), (1, 1, 7)])
def test_synthetic_images_can_be_tiny(shape: tuple[int, int, int]) -> None:
    images, _ = next(offbeat.data.open("synthetic", shape=shape, samples=6).train(batch_size=6, seed=0, epoch=0))
    assert images.shape == (6, *shape)


def test_a_synthetic_image_is_its_class_pattern_plus_its_noise() -> None:
    data = offbeat.data.open("synthetic", shape=(2, 6, 9), classes=3, samples=5)
    assert isinstance(data, Synthetic)
    images, labels = next(data.test(batch_size=1))  # sample 5, the first after the training samples
    assert labels.tolist() == [5 % 3]
    offset = 5 * 2_654_435_761 % OFFSETS
    for channel, y, x in np.ndindex(2, 6, 9):
        noise = data.noise[offset + (channel * 6 + y) * 9 + x]
        row = next(row for row in range(4) if row * 6 // 4 <= y < (row + 1) * 6 // 4)
        column = next(column for column in range(4) if column * 9 // 4 <= x < (column + 1) * 9 // 4)
        assert images[0, channel, y, x].item() == noise + data.patterns[2, channel, row, column]
