"""What every data set keeps: shapes, pure epochs, resuming, the short last batch, the global random state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import offbeat.data
from offbeat.data import DataSet
from offbeat.data.memory import InMemory
from offbeat.data.order import epoch_order
from offbeat.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core

Batches = list[tuple[Tensor, Tensor]]


def small_cifar() -> InMemory:
    """CIFAR's pipeline on 300 images, so that the contract runs in milliseconds; test_cifar.py has the full size."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (400, 3, 32, 32), dtype=torch.uint8, generator=stream)
    labels = torch.randint(0, 10, (400,), generator=stream)
    return InMemory(
        "cifar10",
        10,
        images[:300],
        labels[:300],
        images[300:],
        labels[300:],
        pad=4,
        flip=True,
        white=255.0,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 3)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 256, (40 + index, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.JPEG")
    return folder


@pytest.fixture(params=["cifar10", "digits", "synthetic", "imagefolder", "imagefolder with workers"])
def data(request: pytest.FixtureRequest, image_folder: Path) -> DataSet:
    if request.param == "cifar10":
        return small_cifar()
    if request.param == "digits":
        return offbeat.data.open("digits", shape=(1, 16, 16))
    if request.param == "synthetic":
        return offbeat.data.open("synthetic", shape=(2, 6, 9), classes=3, samples=50)
    workers = 2 if request.param.endswith("workers") else 0
    return offbeat.data.open("imagefolder", folder=image_folder, shape=(3, 16, 24), workers=workers)


def same(left: Batches, right: Batches) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(left, right, strict=True)
    )


def uneven(samples: int) -> int:
    """A batch size that leaves a short last batch."""
    return next(size for size in itertools.count(max(4, samples // 5)) if samples % size)


def test_batches_are_float32_images_and_int64_labels_with_the_short_last_one(data: DataSet) -> None:
    size = uneven(data.train_samples)
    batches = list(data.train(batch_size=size, seed=0, epoch=0))
    lengths = [len(labels) for _, labels in batches]
    assert lengths == [size] * (data.train_samples // size) + [data.train_samples % size]
    for images, labels in batches:
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert images.shape == (len(labels), *data.shape)
        assert images.is_contiguous()
        assert images.isfinite().all()
        assert 0 <= labels.min() <= labels.max() < data.classes


def test_the_test_split_is_the_same_on_every_call_and_complete(data: DataSet) -> None:
    size = uneven(data.test_samples)
    batches = list(data.test(batch_size=size))
    assert sum(len(labels) for _, labels in batches) == data.test_samples
    assert all(images.shape == (len(labels), *data.shape) for images, labels in batches)
    assert same(batches, list(data.test(batch_size=size)))
    whole = next(data.test(batch_size=data.test_samples))
    assert torch.equal(torch.cat([images for images, _ in batches]), whole[0])


def test_an_epoch_is_a_pure_function_of_seed_and_epoch(data: DataSet) -> None:
    def epoch(seed: int, number: int) -> Batches:
        return list(data.train(batch_size=10, seed=seed, epoch=number))

    first = epoch(0, 1)
    torch.manual_seed(random.SystemRandom().randrange(1000))
    assert same(first, epoch(0, 1))
    assert not same(first, epoch(1, 0))
    assert not same(first, epoch(0, 2))
    assert not same(first, epoch(1, 1))


def test_skipping_samples_gives_the_same_bits_as_the_whole_epoch(data: DataSet) -> None:
    size = uneven(data.train_samples)
    whole = list(data.train(batch_size=size, seed=3, epoch=2))
    for start in range(len(whole) + 2):
        assert same(whole[start:], list(data.train(batch_size=size, seed=3, epoch=2, skip=start * size)))


def test_shares_of_an_epoch_are_its_batches_in_turn(data: DataSet) -> None:
    size = max(1, data.train_samples // 8)
    whole = list(data.train(batch_size=size, seed=3, epoch=2))
    groups = len(whole) // 3
    for replica in range(3):
        share = list(data.train(batch_size=size, seed=3, epoch=2, share=(replica, 3)))
        assert same(whole[replica : 3 * groups : 3], share)


def test_the_labels_follow_the_epoch_order_and_each_sample_appears_once(data: DataSet) -> None:
    fixed = {"cifar10": "train_labels", "digits": "train_labels"}.get(data.name)
    if data.name == "imagefolder":
        known = torch.tensor(data.train_files.labels)  # type: ignore[attr-defined]
    else:
        known = getattr(data, fixed) if fixed else torch.arange(data.train_samples) % data.classes
    order = epoch_order(data.train_samples, seed=5, epoch=6)
    assert torch.equal(order.sort().values, torch.arange(data.train_samples))
    labels = torch.cat([labels for _, labels in data.train(batch_size=8, seed=5, epoch=6)])
    assert torch.equal(labels, known[order])


def test_no_global_random_state_changes(data: DataSet) -> None:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    list(data.train(batch_size=10, seed=0, epoch=0))
    list(data.test(batch_size=10))
    after = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert all(np.array_equal(old, new) for old, new in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]


def test_batches_may_be_changed_in_place_without_changing_the_data_set(data: DataSet) -> None:
    def every() -> Iterator[tuple[Tensor, Tensor]]:
        yield from data.train(batch_size=10, seed=0, epoch=0)
        yield from data.test(batch_size=10)

    before = [(images.clone(), labels.clone()) for images, labels in every()]
    for images, labels in every():
        images.zero_()
        labels.zero_()
    assert same(before, list(every()))


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_size_below_one_is_refused_at_once(data: DataSet, size: int) -> None:
    with pytest.raises(UserError, match="batch_size"):
        data.train(batch_size=size, seed=0, epoch=0)
    with pytest.raises(UserError, match="batch_size"):
        data.test(batch_size=size)


def test_a_negative_skip_is_refused(data: DataSet) -> None:
    with pytest.raises(UserError, match="skip=-1"):
        data.train(batch_size=4, seed=0, epoch=0, skip=-1)


def test_an_epoch_can_go_on_with_another_batch_size(data: DataSet) -> None:
    whole = list(data.train(batch_size=4, seed=3, epoch=2))
    rest = list(data.train(batch_size=3, seed=3, epoch=2, skip=8))
    assert torch.equal(torch.cat([images for images, _ in whole[2:]]), torch.cat([images for images, _ in rest]))
    assert torch.equal(torch.cat([labels for _, labels in whole[2:]]), torch.cat([labels for _, labels in rest]))


def test_drop_last_leaves_out_the_short_batch_alone(data: DataSet) -> None:
    size = data.train_samples // 2 + 1
    whole = list(data.train(batch_size=size, seed=0, epoch=0))
    assert len(whole) == 2
    assert same(whole[:1], list(data.train(batch_size=size, seed=0, epoch=0, drop_last=True)))
