"""Data on the device: the very batches of the path through host memory, made in pieces."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import offbeat.data
from offbeat.data import DataSet, imagefolder, resident
from offbeat.data.cifar import open_cifar10, open_cifar100
from offbeat.data.cifar_files import CIFAR10, CIFAR100, CifarFormat
from offbeat.data.memory import InMemory
from offbeat.data.resident import ALIGNMENT, Resident, on_device
from offbeat.errors import UserError
from offbeat.runs.begin import train_here
from offbeat.runs.build import move_data
from offbeat.runs.recipe import Recipe, make_recipe

SETS = ["cifar10", "cifar100", "cifar10 not augmented", "digits", "large digits", "synthetic", "odd synthetic"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DataSet]:
    """Every kind that lies in memory; CIFAR from files of its binary form with fewer images in them."""
    numbers = np.random.default_rng(0)

    def small_cifar(name: str, layout: CifarFormat, opener: Callable[..., InMemory]) -> InMemory:
        *training, test = layout.files
        layout = replace(layout, files=dict.fromkeys(training, 601 // len(training)) | {test: 203})
        folder = tmp_path_factory.mktemp("cifar")
        for file, count in layout.files.items():
            rows = numbers.integers(0, 256, (count, layout.label_bytes + 3072), dtype=np.uint8)
            rows[:, : layout.label_bytes] = (np.arange(count) % layout.classes)[:, None]
            (folder / file).write_bytes(rows.tobytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"offbeat.data.cifar.{name}", (layout,))
            return opener(folder=folder)

    ten = small_cifar("CIFAR10", CIFAR10[0], open_cifar10)
    return {
        "cifar10": ten,
        "cifar100": small_cifar("CIFAR100", CIFAR100[0], open_cifar100),
        "cifar10 not augmented": replace(ten, pad=0, flip=False),
        "digits": offbeat.data.open("digits"),
        "large digits": offbeat.data.open("digits", shape=(1, 16, 24)),
        "synthetic": offbeat.data.open("synthetic", samples=500, shape=(3, 16, 16)),
        "odd synthetic": offbeat.data.open("synthetic", samples=101, shape=(2, 6, 9), classes=3),
    }


@pytest.fixture(params=SETS)
def data(request: pytest.FixtureRequest, sets: dict[str, DataSet]) -> DataSet:
    return sets[request.param]


def moved(data: DataSet, device: str = "cpu", **options: Any) -> Resident:
    there, note = on_device(data, device, **options)
    assert note is None
    assert isinstance(there, Resident)
    return there


def assert_same(made: Any, expected: Any) -> None:
    """Bit for bit, and laid out alike; -0.0 is not 0.0 here."""
    for (images, labels), (right, its_labels) in itertools.zip_longest(made, expected, fillvalue=(None, None)):
        assert images is not None
        assert right is not None
        assert (images.dtype, images.shape, images.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(images.cpu().view(torch.int32), right.view(torch.int32))
        assert labels.dtype == torch.int64
        assert torch.equal(labels.cpu(), its_labels)


def sample_bytes(data: DataSet) -> int:
    return 4 * int(np.prod(data.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [7, 32, 10_000])
def test_batches_are_those_of_the_host_path_bit_for_bit(data: DataSet, size: int, device: str) -> None:
    there = moved(data, device, piece=100 * sample_bytes(data))  # several pieces an epoch
    for seed, epoch in [(0, 0), (0, 1), (7, 3)]:
        asked = {"batch_size": size, "seed": seed, "epoch": epoch}
        assert_same(there.train(**asked), data.train(**asked))
    assert_same(there.test(batch_size=size), data.test(batch_size=size))


@pytest.mark.parametrize("device", DEVICES)
def test_resuming_in_mid_epoch_gives_the_same_bits(data: DataSet, device: str) -> None:
    there = moved(data, device, piece=70 * sample_bytes(data))
    for start in [0, 1, 2, 3, data.train_samples // 30, data.train_samples // 30 + 1, 1000]:
        for share in ((0, 1), (1, 2)):
            asked = {"batch_size": 30, "seed": 2, "epoch": 5, "skip": 30 * start, "share": share}
            assert_same(there.train(**asked), data.train(**asked))


@pytest.mark.parametrize("batches", [0, 1, 3, 100])
def test_the_size_of_the_pieces_changes_nothing(sets: dict[str, DataSet], batches: int) -> None:
    data = sets["cifar10"]
    there = moved(data, piece=batches * 16 * sample_bytes(data))
    assert_same(there.train(batch_size=16, seed=0, epoch=0), data.train(batch_size=16, seed=0, epoch=0))


def test_what_the_sets_tell_about_themselves_is_kept(data: DataSet) -> None:
    there = moved(data)
    for attribute in ("name", "shape", "classes", "train_samples", "test_samples"):
        assert getattr(there, attribute) == getattr(data, attribute)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["cifar10", "synthetic"])
def test_another_type_and_channels_last_are_what_a_conversion_would_give(
    sets: dict[str, DataSet], name: str, dtype: torch.dtype
) -> None:
    there = moved(sets[name], dtype=dtype, channels_last=True)
    asked = {"batch_size": 64, "seed": 1, "epoch": 1}
    for (images, _), (right, _) in zip(there.train(**asked), sets[name].train(**asked), strict=True):
        assert torch.equal(images, right.to(dtype))
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_no_global_random_state_changes(data: DataSet) -> None:
    there, before = moved(data), torch.get_rng_state()
    list(there.train(batch_size=50, seed=0, epoch=0))
    list(there.test(batch_size=50))
    assert torch.equal(before, torch.get_rng_state())


def test_bad_sizes_are_refused_when_the_epoch_is_requested(sets: dict[str, DataSet]) -> None:
    there = moved(sets["digits"])
    with pytest.raises(UserError, match="batch_size=0"):
        there.train(batch_size=0, seed=0, epoch=0)
    with pytest.raises(UserError, match="batch_size=0"):
        there.test(batch_size=0)
    with pytest.raises(UserError, match="skip=-1"):
        there.train(batch_size=4, seed=0, epoch=0, skip=-1)


def test_batches_of_a_piece_lie_in_one_memory_and_each_begins_at_an_even_place(data: DataSet) -> None:
    for size in (16, 5):
        batches = list(moved(data).train(batch_size=size, seed=0, epoch=0))
        assert all(t.data_ptr() % ALIGNMENT == 0 for batch in batches for t in batch)
    if 5 * sample_bytes(data) % ALIGNMENT == 0:
        assert len({images.untyped_storage().data_ptr() for images, _ in batches}) == 1


def test_batches_may_be_changed_in_place_and_no_other_notices(data: DataSet) -> None:
    there = moved(data)

    def every() -> list[tuple[Tensor, Tensor]]:
        return [*there.train(batch_size=10, seed=0, epoch=0), *there.test(batch_size=10)]

    before, changed = every(), every()
    for images, labels in changed[::2]:
        images.fill_(7)
        labels.fill_(7)
    for (images, labels), (old, its_labels) in list(zip(changed, before, strict=True))[1::2]:
        assert torch.equal(images, old)
        assert torch.equal(labels, its_labels)
        assert images._version == labels._version == 0
    assert_same(every(), before)


def test_a_network_may_change_its_input_while_an_earlier_batch_is_in_flight(
    sets: dict[str, DataSet],
) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 10))
    outputs = [model(images) for images, _ in moved(sets["digits"]).train(batch_size=500, seed=0, epoch=0)]
    sum(output.sum() for output in outputs).backward()
    gradient = model[2].weight.grad
    images = torch.cat([images for images, _ in sets["digits"].train(batch_size=500, seed=0, epoch=0)])
    torch.testing.assert_close(gradient, images.relu().flatten(1).sum(0).expand(10, -1), rtol=1e-4, atol=1e-2)


def test_pieces_are_made_one_ahead_and_freed_when_no_batch_is_left(
    sets: dict[str, DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, pieces = sets["cifar10"], []
    there = moved(data, piece=100 * sample_bytes(data))
    finished = resident._Images._finished

    def watched(*given: Any) -> Tensor:
        made = finished(*given)
        pieces.append(weakref.ref(made.untyped_storage()))
        return made

    monkeypatch.setattr(resident._Images, "_finished", watched)
    made, alive = [], []
    for _ in there.train(batch_size=50, seed=0, epoch=0):
        made.append(len(pieces))
        alive.append(sum(piece() is not None for piece in pieces))
    assert made == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6]  # 600 samples: six pieces of two batches
    assert max(alive) <= 3


def test_a_set_that_does_not_fit_stays_in_host_memory_and_is_reported(data: DataSet) -> None:
    there, note = on_device(data, "cpu", limit=1000)
    assert there is data
    assert note is not None
    assert note.startswith(f"{data.name} needs ")
    assert note.endswith("on cpu, where data may take 0 MiB: it stays in host memory, and every batch is copied")


def test_the_limit_counts_the_bytes_that_stay_and_those_of_the_work(sets: dict[str, DataSet]) -> None:
    data = sets["cifar10"]
    needed = (600 + 203) * (3072 + 8) + resident.PEAK_PIECES * 100 * sample_bytes(data)
    assert on_device(data, "cpu", limit=needed, piece=100 * sample_bytes(data))[0] is not data
    assert on_device(data, "cpu", limit=needed - 1, piece=100 * sample_bytes(data))[0] is data


def test_a_quarter_of_a_cuda_devices_free_memory_is_the_limit(
    sets: dict[str, DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**20, 2**37))
    there, note = on_device(sets["cifar10"], "cuda")
    assert there is sets["cifar10"]
    assert note == (
        "cifar10 needs 45 MiB on cuda, where data may take 2 MiB: it stays in host memory, and every batch is copied"
    )


def open_small_folder(folder: Path, *, workers: int = 0) -> DataSet:
    """Three images of each of two classes, in both splits."""
    from PIL import Image

    for seed, (split, kind, number) in enumerate(itertools.product(("train", "val"), ("cat", "dog"), range(3))):
        (folder / split / kind).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / split / kind / f"{number}.png")
    return offbeat.data.open("imagefolder", folder=folder, shape=(3, 16, 16), workers=workers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 2])
def test_image_folders_are_copied_as_bytes_and_normalised_on_the_device(
    tmp_path: Path, device: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_small_folder(tmp_path, workers=workers)
    wanted = {"batch_size": 4, "seed": 1, "epoch": 2}
    trained, tested = list(folder.train(**wanted)), list(folder.test(batch_size=4))
    half, _ = on_device(folder, device, dtype=torch.bfloat16, channels_last=True)
    there, note = on_device(folder, device)
    assert note is None
    assert (there.name, there.shape, there.classes) == (folder.name, folder.shape, folder.classes)
    assert (there.train_samples, there.test_samples) == (folder.train_samples, folder.test_samples)
    with monkeypatch.context() as patch:
        patch.setattr(imagefolder, "normalise", None)  # workers give bytes
        assert_same(there.train(**wanted), trained)
        assert_same(there.test(batch_size=4), tested)
        assert_same(there.train(**wanted, skip=4), trained[1:])
        images, labels = next(half.test(batch_size=4))
    assert {images.device.type, labels.device.type} == {torch.device(device).type}
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images.cpu(), tested[0][0].bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_test_images_of_a_folder_are_decoded_once_where_they_fit(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_small_folder(tmp_path)
    tested, size = list(folder.test(batch_size=4)), folder.test_samples * 3 * 16 * 16
    there, _ = on_device(folder, device, limit=size)
    next(there.test(batch_size=4))  # a pass that is not completed keeps nothing
    assert_same(there.test(batch_size=4), tested)
    decoded = []
    original = imagefolder.testing_pixels
    monkeypatch.setattr(imagefolder, "testing_pixels", lambda *given: decoded.append(given) or original(*given))
    assert_same(there.test(batch_size=4), tested)
    assert not decoded
    assert_same(there.test(batch_size=3), folder.test(batch_size=3))  # other batches are decoded
    assert len(decoded) == 2 * folder.test_samples
    small, _ = on_device(folder, device, limit=size - 1)
    for _ in range(2):
        assert_same(small.test(batch_size=4), tested)
    assert len(decoded) == 4 * folder.test_samples


def test_synthetic_images_of_imagenet_size_are_made_a_piece_at_a_time() -> None:
    data = offbeat.data.open("synthetic", shape=(3, 224, 224), classes=1000, samples=5000)
    there = moved(data, limit=2**29)
    asked = {"batch_size": 8, "seed": 0, "epoch": 0, "skip": 8 * 620}
    assert_same(there.train(**asked), data.train(**asked))


def test_a_run_moves_its_data_only_off_the_cpu(sets: dict[str, DataSet], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, digits = make_recipe(data="digits", model="mlp"), sets["digits"]
    assert move_data(recipe, digits) == (digits, [])
    assert move_data(replace(recipe, device="cuda"), None) == (None, [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    there, notes = move_data(replace(recipe, device="cuda"), digits)
    assert there is digits
    assert len(notes) == 1
    assert notes[0].startswith("digits needs ")


def test_a_run_on_moved_data_ends_with_the_same_weights_and_prints_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        data="digits", model="mlp", method="adl", K=2, M=2, epochs=1, batch_size=100, engine="simulate"
    )
    train_here(recipe, tmp_path / "host", show=False)

    def move(recipe: Recipe, data: DataSet | None) -> tuple[DataSet | None, list[str]]:
        assert data is not None
        return moved(data), ["a note of the data"]

    monkeypatch.setattr("offbeat.runs.build.move_data", move)
    train_here(recipe, tmp_path / "moved", show=True)
    printed = capsys.readouterr()
    assert "a note of the data" in printed.out + printed.err
    host, there = (load_file(tmp_path / run / "model.safetensors") for run in ("host", "moved"))
    assert all(torch.equal(host[name], there[name]) for name in host)
