"""Text as windows of tokens."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.data.text import Text, open_text, text_files
from offbeat.errors import UserError


@pytest.fixture
def letters(tmp_path) -> Path:
    path = tmp_path / "letters.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 5000, dtype=np.uint8)))
    return path


def starts(data: Text, *, seed: int, epoch: int) -> list[int]:
    """Where the windows of an epoch begin in the training text, found by their content."""
    text = data.training.tobytes()
    found = []
    for x, _ in data.train(batch_size=7, seed=seed, epoch=epoch):
        found += [text.index(bytes(window.to(torch.uint8).numpy())) for window in x]
    return found


def test_targets_are_the_tokens_after_the_inputs(letters):
    data = open_text(folder=letters, shape=(16,))
    text = data.training.tobytes()
    for x, y in data.train(batch_size=5, seed=0, epoch=0):
        assert x.dtype == y.dtype == torch.int64
        for window, target in zip(x, y):
            at = text.index(bytes(window.to(torch.uint8).numpy()))
            assert target.tolist() == list(text[at + 1 : at + 17])


def test_an_epoch_is_a_function_of_seed_and_epoch(letters):
    data = open_text(folder=letters, shape=(16,))
    assert starts(data, seed=0, epoch=1) == starts(open_text(folder=letters, shape=(16,)), seed=0, epoch=1)
    assert starts(data, seed=0, epoch=1) != starts(data, seed=0, epoch=2)
    assert starts(data, seed=0, epoch=1) != starts(data, seed=1, epoch=1)


@pytest.mark.parametrize("samples", [None, 100, 1000])
def test_each_pass_uses_every_window_once(letters, samples):
    data = open_text(folder=letters, shape=(16,), samples=samples)
    windows = open_text(folder=letters, shape=(16,)).train_samples
    assert data.train_samples == (samples or windows)
    found: list[int] = []
    while len(found) < 2 * windows:
        found += starts(data, seed=3, epoch=len(found) // data.train_samples)
    for a_pass in (found[:windows], found[windows : 2 * windows]):
        ordered = np.sort(a_pass)
        assert (np.diff(ordered) == 16).all()
    assert sorted(found[:windows]) != sorted(found[windows : 2 * windows])  # cut elsewhere


def test_an_epoch_goes_on_after_skipped_samples(letters):
    data = open_text(folder=letters, shape=(16,))
    whole = torch.cat([x for x, _ in data.train(batch_size=7, seed=0, epoch=0)])
    rest = torch.cat([x for x, _ in data.train(batch_size=7, seed=0, epoch=0, skip=21)])
    assert torch.equal(whole[21:], rest)


def test_test_windows_come_from_the_last_tenth_and_stay(letters):
    data = open_text(folder=letters, shape=(16,))
    first, second = (torch.cat([x for x, _ in data.test(batch_size=b)]) for b in (4, 100))
    assert torch.equal(first, second)
    assert len(first) == data.test_samples
    assert data.testing.tobytes() == letters.read_bytes()[4500:]


def test_without_a_file_the_text_is_the_source_of_torch():
    files = text_files(None)
    assert Path(torch.__file__) in files
    data = open_text(samples=4)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    assert data.sha256 == digest.hexdigest()
    assert (data.classes, data.shape, data.train_samples) == (256, (128,), 4)


def test_a_folder_is_its_text_files_in_order(tmp_path):
    for name, content in {"b.txt": b"b" * 90, "a/c.txt": b"c" * 90, "z.bin": b"\0" * 90, ".hidden": b"h"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in text_files(tmp_path)] == ["c.txt", "b.txt"]


def test_a_tokenizer_file_makes_the_tokens(tmp_path, letters):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.train_from_iterator(
        [letters.read_text()],
        tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False),
    )
    made.save(str(tmp_path / "tokenizer.json"))
    data = open_text(folder=letters, shape=(16,), tokenizer=tmp_path / "tokenizer.json")
    x, _ = next(iter(data.train(batch_size=2, seed=0, epoch=0)))
    assert data.classes == 60
    assert made.decode(x[0].tolist()).replace(" ", "") in letters.read_text()
    assert data.bytes_per_token == pytest.approx(5000 / (len(data.training) + len(data.testing)))


def test_unusable_text_is_refused_in_one_line(tmp_path, letters):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    for options, text in [
        ({"folder": tmp_path / "short.txt"}, "9 tokens"),
        ({"folder": tmp_path / "empty"}, "no text files"),
        ({"folder": letters, "shape": (3, 4)}, "shape="),
        ({"folder": letters, "samples": 0}, "samples=0"),
        ({"folder": letters, "tokenizer": letters}, "tokenizer.json"),
    ]:
        with pytest.raises(UserError, match=text) as error:
            open_text(**options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 15, 25, 200])
def test_a_short_text_names_windows_that_fit_if_there_are_any(tmp_path, length):
    file = tmp_path / "short.txt"
    file.write_bytes(b"a" * length)
    with pytest.raises(UserError, match="give a longer text") as error:
        open_text(folder=file, shape=(length or 1,))
    named = re.search(r"windows of at most (\d+) tokens", str(error.value))
    assert bool(named) == (length >= 25)
    if named:
        assert open_text(folder=file, shape=(int(named[1]),)).test_samples == 1
