"""CIFAR: every published form, checked sizes, and the augmentation against a literal reference."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offbeat.data
from offbeat.data import augment
from offbeat.data.cifar_files import CIFAR10, CIFAR100, CifarFormat
from offbeat.data.memory import InMemory
from offbeat.data.order import epoch_order, generator
from offbeat.errors import UserError

UNPACK = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "unpack"


def records(layout: CifarFormat, file: str) -> tuple[np.ndarray, np.ndarray]:
    """The fake content of one file; the binary and the python form of a data set have the same."""
    number = int("".join(filter(str.isdigit, file)) or 9)
    numbers = np.random.default_rng([layout.classes, number, "test" in file])
    count = layout.files[file]
    labels = np.arange(count) % layout.classes
    pixels = numbers.integers(0, 256, 1_000_003, dtype=np.uint8)  # a prime number of them, so that no image repeats
    return np.resize(pixels, (count, 3072)), labels.astype(np.uint8)


def content(layout: CifarFormat, file: str) -> bytes:
    images, labels = records(layout, file)
    if layout.label_key:
        return pickle.dumps({"data": images, layout.label_key: labels.tolist(), "coarse_labels": []}, protocol=4)
    coarse = [np.full((len(labels), 1), 255, dtype=np.uint8)] * (layout.label_bytes - 1)
    return np.concatenate([*coarse, labels[:, None], images], axis=1).tobytes()


def write(folder: Path, layout: CifarFormat) -> None:
    (folder / layout.folder).mkdir(parents=True)
    for file in layout.files:
        (folder / layout.folder / file).write_bytes(content(layout, file))


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=0) as tar:
        tar.add(folder, arcname=folder.name)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Full-size fakes of all four published folders, one to a folder of its own."""
    root = tmp_path_factory.mktemp("cifar")
    for layout in CIFAR10 + CIFAR100:
        write(root / layout.folder, layout)
    yield {layout.folder: root / layout.folder for layout in CIFAR10 + CIFAR100}
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def cifar(fakes: dict[str, Path]) -> InMemory:
    data = offbeat.data.open("cifar10", folder=fakes["cifar-10-batches-bin"])
    assert isinstance(data, InMemory)
    return data


def check_content(data: Any, layout: CifarFormat) -> None:
    *training, test = layout.files
    images, labels = zip(*(records(layout, file) for file in training), strict=True)
    assert np.array_equal(data.train_images.numpy().reshape(-1, 3072), np.concatenate(images))
    assert np.array_equal(data.train_labels.numpy(), np.concatenate(labels))
    assert np.array_equal(data.test_images.numpy().reshape(-1, 3072), records(layout, test)[0])
    assert np.array_equal(data.test_labels.numpy(), records(layout, test)[1])
    assert (data.shape, data.train_samples, data.test_samples) == ((3, 32, 32), 50_000, 10_000)
    assert data.classes == layout.classes
    assert data.train_images.dtype == torch.uint8


def check_same(data: Any, other: Any) -> None:
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(data, name), getattr(other, name))
    assert (data.shape, data.classes) == (other.shape, other.classes)


@pytest.mark.parametrize("layout", CIFAR10 + CIFAR100, ids=lambda layout: layout.folder)
def test_every_folder_is_read_given_itself_or_its_parent(fakes: dict[str, Path], layout: CifarFormat) -> None:
    name = f"cifar{layout.classes}"
    found = offbeat.data.open(name, folder=fakes[layout.folder])
    check_content(found, layout)
    check_same(offbeat.data.open(name, folder=str(fakes[layout.folder] / layout.folder)), found)


@pytest.mark.parametrize("layout", [CIFAR10[0], CIFAR100[1]], ids=lambda layout: layout.archive)
def test_an_archive_is_read_without_writing_a_file(fakes: dict[str, Path], layout: CifarFormat, tmp_path: Path) -> None:
    archive = tmp_path / layout.archive
    pack(fakes[layout.folder] / layout.folder, archive)
    name = f"cifar{layout.classes}"
    found = offbeat.data.open(name, folder=tmp_path)
    check_content(found, layout)
    assert list(tmp_path.iterdir()) == [archive]
    renamed = archive.rename(tmp_path / "renamed.tar.gz")
    check_same(offbeat.data.open(name, folder=renamed), found)
    with pytest.raises(UserError, match="holds no file of CIFAR-"):
        offbeat.data.open("cifar100" if name == "cifar10" else "cifar10", folder=renamed)
    with renamed.open("r+b") as file:
        file.truncate(20_000_000)
    with pytest.raises(UserError, match=r"renamed\.tar\.gz \(20000000 bytes\) is truncated"):
        offbeat.data.open(name, folder=renamed)
    renamed.unlink()


def test_the_other_data_set_is_not_taken_for_this_one(fakes: dict[str, Path]) -> None:
    for name, folder in (("cifar100", "cifar-10-batches-bin"), ("cifar10", "cifar-100-python")):
        with pytest.raises(UserError, match=f"no CIFAR-{name[5:]} in"):
            offbeat.data.open(name, folder=fakes[folder] / folder)


@pytest.fixture
def linked(fakes: dict[str, Path], tmp_path: Path) -> Iterator[dict[str, Path]]:
    """The fake folders again, file by file as hard links, to break one of them."""
    for layout in CIFAR10 + CIFAR100:
        (tmp_path / layout.folder).mkdir()
        for file in layout.files:
            os.link(fakes[layout.folder] / layout.folder / file, tmp_path / layout.folder / file)
    yield {layout.folder: tmp_path / layout.folder for layout in CIFAR10 + CIFAR100}
    shutil.rmtree(tmp_path)  # pytest would keep every link, and with it the fakes


def replaced(path: Path, raw: bytes) -> None:
    path.unlink()  # never through the link
    path.write_bytes(raw)


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        offbeat.data.open(name, folder=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named_with_the_size_expected(linked: dict[str, Path]) -> None:
    folder = linked["cifar-10-batches-bin"]
    (folder / "data_batch_4.bin").unlink()
    assert "data_batch_4.bin is missing (0 of 30730000 bytes)" in refusal("cifar10", folder)
    for file in folder.iterdir():
        file.unlink()
    assert "data_batch_1.bin is missing" in refusal("cifar10", folder)


def test_a_truncated_file_is_named_with_its_size_and_the_size_expected(linked: dict[str, Path]) -> None:
    replaced(linked["cifar-10-batches-bin"] / "test_batch.bin", bytes(1000))
    text = refusal("cifar10", linked["cifar-10-batches-bin"])
    assert "test_batch.bin has 1000 bytes, expected 30730000" in text
    replaced(linked["cifar-100-binary"] / "train.bin", bytes(1000))
    assert "train.bin has 1000 bytes, expected 153700000" in refusal("cifar100", linked["cifar-100-binary"])
    replaced(linked["cifar-10-batches-py"] / "data_batch_2", bytes(1000))
    text = refusal("cifar10", linked["cifar-10-batches-py"])
    assert "data_batch_2 has 1000 bytes, expected 30720000 to" in text


def test_a_label_out_of_range_is_refused(linked: dict[str, Path]) -> None:
    raw = bytearray(content(CIFAR10[0], "data_batch_1.bin"))
    raw[3073 * 17] = 10
    replaced(linked["cifar-10-batches-bin"] / "data_batch_1.bin", bytes(raw))
    assert "data_batch_1.bin holds the label 10, expected 0 to 9" in refusal("cifar10", linked["cifar-10-batches-bin"])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"data": np.zeros((10_001, 3072), dtype=np.uint8), "labels": [0] * 10_000}, "expected 10000 of each"),
        ({"data": np.zeros((10_000, 3072), dtype=np.uint8), "labels": [0] * 9_999}, "expected 10000 of each"),
        ({"data": np.zeros((10_000, 3072), dtype=np.uint8), "labels": [-1] * 10_000}, "label -1"),
        ({"data": np.zeros((10_000, 3072), dtype=np.uint8)}, "has no 'data' and 'labels'"),
        ({"data": np.zeros((10_000, 3072), dtype=np.uint8), "labels": ["cat"]}, "has no 'data' and 'labels'"),
        ({"data": bytes(30_720_000), "labels": [0] * 10_000}, "'data' is not an array of bytes"),
    ],
)
def test_a_pickle_of_the_wrong_content_is_refused(linked: dict[str, Path], wrong: dict[str, Any], text: str) -> None:
    replaced(linked["cifar-10-batches-py"] / "data_batch_1", pickle.dumps(wrong))
    assert text in refusal("cifar10", linked["cifar-10-batches-py"])


def test_a_malicious_pickle_among_the_files_is_refused(linked: dict[str, Path], tmp_path: Path) -> None:
    # os.mkdir("bad"), then enough bytes for the size check to let it through
    target = str(tmp_path / "bad").encode()
    call = b"cos\nmkdir\n(X" + struct.pack("<I", len(target)) + target + b"tR."
    replaced(linked["cifar-10-batches-py"] / "data_batch_1", call + bytes(31_000_000))
    assert "data_batch_1 names os.mkdir" in refusal("cifar10", linked["cifar-10-batches-py"])
    assert not (tmp_path / "bad").exists()


def test_an_archive_with_a_link_or_a_path_outside_it_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    (tmp_path / "secret").write_bytes(bytes(30_730_000))
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
        tar.add(tmp_path / "secret", arcname="../../data_batch_2.bin")
    assert "data_batch_1.bin is missing" in refusal("cifar10", tmp_path)
    assert "holds no file of CIFAR-10" in refusal("cifar10", archive)
    (tmp_path / "secret").unlink()


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"404 not found")
    assert "(13 bytes) is truncated or not a tar.gz" in refusal("cifar100", tmp_path)


def test_training_batches_equal_a_literal_reference_bit_for_bit(cifar: InMemory) -> None:
    order = epoch_order(50_000, seed=7, epoch=2)
    draws = augment.draw(50_000, pad=4, flip=True, generator=generator("augment", 7, 2))
    mean, std = torch.tensor(cifar.mean)[:, None, None], torch.tensor(cifar.std)[:, None, None]
    images, labels = next(cifar.train(batch_size=256, seed=7, epoch=2, skip=3 * 256))
    for position in range(256):
        sample = int(order[3 * 256 + position])
        top, left, flip = (int(each[3 * 256 + position]) for each in (draws.top, draws.left, draws.flip))
        padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
        padded[:, 4:36, 4:36] = cifar.train_images[sample]
        cut = padded[:, top : top + 32, left : left + 32]
        if flip:
            cut = cut.flip(-1)
        assert torch.equal(images[position], cut.to(torch.float32).div(255).sub(mean).div(std))
        assert labels[position] == cifar.train_labels[sample]


def test_crops_and_flips_are_uniform() -> None:
    draws = augment.draw(81_000, pad=4, flip=True, generator=generator("augment", 0, 0))
    cells = np.bincount(draws.top * 9 + draws.left, minlength=81)
    assert (((cells - 1000) ** 2) / 1000).sum() < 150  # chi-squared, 80 degrees of freedom: 1 in 300,000
    assert abs(draws.flip.mean() - 0.5) < 0.01
    assert not augment.draw(1000, pad=1, flip=False, generator=generator("augment", 0, 0)).flip.any()


def test_test_batches_are_normalised_only(cifar: InMemory) -> None:
    mean, std = torch.tensor(cifar.mean)[:, None, None], torch.tensor(cifar.std)[:, None, None]
    images, labels = next(cifar.test(batch_size=100))
    assert torch.equal(images, cifar.test_images[:100].float().div(255).sub(mean).div(std))
    assert torch.equal(labels, cifar.test_labels[:100])


def test_a_whole_epoch_uses_every_image_once_and_leaves_no_thread(cifar: InMemory) -> None:
    lengths = [len(labels) for _, labels in cifar.train(batch_size=512, seed=0, epoch=0)]
    assert lengths == [512] * 97 + [336]
    half = cifar.train(batch_size=512, seed=0, epoch=0)
    next(half)
    del half
    assert [thread for thread in threading.enumerate() if thread.name == "offbeat-prefetch"] == []


@pytest.mark.slow
@pytest.mark.skipif(not UNPACK.exists(), reason=f"the real CIFAR-10 is unpacked by {UNPACK}, which is not here")
def test_the_real_cifar10_has_the_mean_and_std_it_is_normalised_with(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(UNPACK), "cifar10", str(tmp_path)], check=True, capture_output=True)
    data = offbeat.data.open("cifar10", folder=tmp_path)
    assert isinstance(data, InMemory)
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert data.test_labels[:8].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    pixels = data.train_images.transpose(0, 1).flatten(1).double() / 255
    assert torch.allclose(pixels.mean(1), torch.tensor(data.mean, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(pixels.std(1), torch.tensor(data.std, dtype=torch.float64), atol=1e-4)
    images, _ = next(data.train(batch_size=128, seed=0, epoch=0))
    assert images.shape == (128, 3, 32, 32)
    shutil.rmtree(tmp_path)
