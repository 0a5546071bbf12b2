"""Folders of images: layout, crops, determinism over workers, broken files, no process left behind."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import offbeat.data
from offbeat.data.imagefolder import MEAN, STD
from offbeat.data.images import covering, random_box
from offbeat.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core


def save(path: Path, *, height: int = 30, width: int = 40, mode: str = "RGB", seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        save(tmp_path / "train" / "b" / f"{number}.JPEG", seed=number)
        save(tmp_path / "train" / "a" / f"{number}.png", seed=10 + number)
    save(tmp_path / "val" / "a" / "x.jpg")
    save(tmp_path / "val" / "b" / "grey.jpeg", mode="L")
    save(tmp_path / "val" / "b" / "palette.png", mode="P")
    (tmp_path / "val" / "b" / "notes.txt").write_text("not an image")
    return tmp_path


def no_child_left(seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not multiprocessing.active_children()


def test_classes_are_the_sorted_folder_names(folder: Path) -> None:
    data = offbeat.data.open("imagefolder", folder=folder, workers=0)
    assert (data.shape, data.classes, data.train_samples, data.test_samples) == ((3, 224, 224), 2, 12, 3)
    images, labels = next(data.test(batch_size=3))
    assert images.shape == (3, 3, 224, 224)
    assert labels.tolist() == [0, 1, 1]


def test_test_may_stand_for_val(folder: Path) -> None:
    (folder / "val").rename(folder / "test")
    assert offbeat.data.open("imagefolder", folder=str(folder)).test_samples == 3


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bits_do_not_depend_on_the_number_of_workers(folder: Path, workers: int) -> None:
    none, some = (
        list(
            offbeat.data.open("imagefolder", folder=folder, shape=(3, 20, 20), workers=number).train(
                batch_size=5, seed=1, epoch=2
            )
        )
        for number in (0, workers)
    )
    for (images, labels), (others, their_labels) in zip(none, some, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)
    assert no_child_left()


def test_testing_resizes_the_shorter_side_and_cuts_the_centre(folder: Path) -> None:
    save(folder / "val" / "a" / "x.jpg", height=60, width=90)
    data = offbeat.data.open("imagefolder", folder=folder, shape=(3, 28, 28), workers=0)
    images, _ = next(data.test(batch_size=1))
    with Image.open(folder / "val" / "a" / "x.jpg") as image:
        resized = image.resize((48, 32), Image.Resampling.BILINEAR)  # 32 = 28 * 256 / 224
    cut = torch.from_numpy(np.array(resized.crop((10, 2, 38, 30)))).permute(2, 0, 1).float()
    expected = (cut / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    assert torch.equal(images[0], expected)


@pytest.mark.parametrize("size", [(224, 224), (32, 64), (64, 32), (1, 1), (7, 13)])
def test_the_resized_image_always_covers_the_crop(size: tuple[int, int]) -> None:
    assert covering((256, 256), (224, 224)) == (256, 256)
    for image in ((1, 1), (500, 375), (375, 500), (3, 1000), (1000, 3), (333, 333)):
        high, wide = covering(image, size)
        assert high >= size[0]
        assert wide >= size[1]


def test_random_boxes_lie_inside_the_image_and_vary_in_area_and_ratio() -> None:
    draws = random.Random(0)
    boxes = [random_box((300, 400), draws) for _ in range(2000)]
    areas = np.array([(right - left) * (bottom - top) for left, top, right, bottom in boxes]) / (300 * 400)
    ratios = np.array([(right - left) / (bottom - top) for left, top, right, bottom in boxes])
    assert all(0 <= left < right <= 400 and 0 <= top < bottom <= 300 for left, top, right, bottom in boxes)
    assert 0.078 < areas.min() < 0.1
    assert 0.9 < areas.max() <= 1
    assert 0.73 < ratios.min() < 0.77
    assert 1.30 < ratios.max() < 1.36


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((10, 1000), (493, 0, 506, 10)),
        ((1000, 10), (0, 493, 10, 506)),
        ((40, 50), (0, 0, 50, 40)),
        ((1, 1), (0, 0, 1, 1)),
    ],
)
def test_an_image_too_narrow_for_any_crop_gives_its_centre(size: tuple[int, int], box: tuple[int, ...]) -> None:
    class Largest(random.Random):
        """Always asks for the whole area, which never fits a long image."""

        def uniform(self, a: float, b: float) -> float:
            return b

    assert random_box(size, Largest()) == box


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named_in_one_line(folder: Path, workers: int) -> None:
    broken = folder / "train" / "b" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:400])
    data = offbeat.data.open("imagefolder", folder=folder, shape=(3, 16, 16), workers=workers)
    with pytest.raises(UserError, match=r"cannot decode the image .*train/b/3\.JPEG") as caught:
        list(data.train(batch_size=2, seed=0, epoch=0))
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert no_child_left()


@pytest.mark.parametrize("content", [b"", b"this is text", b"\x89PNG\r\n\x1a\n" + bytes(30)])
def test_a_file_that_is_no_image_at_all_is_named_too(folder: Path, content: bytes) -> None:
    (folder / "val" / "a" / "x.jpg").write_bytes(content)
    data = offbeat.data.open("imagefolder", folder=folder, workers=0)
    with pytest.raises(UserError, match=r"val/a/x\.jpg"):
        list(data.test(batch_size=2))


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_the_worker_processes_end_when_the_iterator_is_dropped_early(folder: Path, how: str) -> None:
    data = offbeat.data.open("imagefolder", folder=folder, shape=(3, 16, 16), workers=2)
    batches = data.train(batch_size=1, seed=0, epoch=0)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    if how == "closed":
        batches.close()  # type: ignore[attr-defined]
    del batches
    gc.collect()
    assert no_child_left()


def test_the_data_set_can_be_pickled_for_spawned_workers(folder: Path) -> None:
    data = offbeat.data.open("imagefolder", folder=folder, shape=(3, 16, 16), workers=0)
    copy = pickle.loads(pickle.dumps(data))
    ours, theirs = (next(each.train(batch_size=12, seed=0, epoch=0)) for each in (data, copy))
    assert torch.equal(ours[0], theirs[0])


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        offbeat.data.open("imagefolder", folder=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_layout_that_is_not_imagenets_is_refused(folder: Path) -> None:
    shutil.rmtree(folder / "val")
    assert "no val/ and no test/" in refusal(folder)
    shutil.rmtree(folder / "train")
    assert "no train/" in refusal(folder)
    (folder / "train").mkdir()
    (folder / "val").mkdir()
    assert "no class folders" in refusal(folder)


def test_classes_that_differ_between_the_splits_are_refused(folder: Path) -> None:
    save(folder / "val" / "c" / "1.png")
    assert "class 'c' is in" in refusal(folder)


def test_a_single_class_is_refused(folder: Path) -> None:
    """Training had a loss of 0 from the first batch."""
    for split in ("train", "val"):
        for other in sorted((folder / split).iterdir())[1:]:
            shutil.rmtree(other)
    assert "train has a single class folder, 'a': give one for each of at least 2" in refusal(folder)


def test_an_empty_class_and_one_without_images_are_refused(folder: Path) -> None:
    shutil.rmtree(folder / "train" / "b")
    (folder / "train" / "b").mkdir()
    assert "train/b holds no file" in refusal(folder)
    (folder / "train" / "b" / "notes.txt").write_text("")
    assert "train/b holds no image among its 1 files" in refusal(folder)


def test_grey_shapes_and_negative_workers_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="RGB"):
        offbeat.data.open("imagefolder", folder=folder, shape=(1, 8, 8))
    with pytest.raises(UserError, match="workers=-1"):
        offbeat.data.open("imagefolder", folder=folder, workers=-1)
