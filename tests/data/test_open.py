"""Opening by name: what is refused, in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat.data
from offbeat.errors import UserError


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        offbeat.data.open(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_unknown_name_gets_its_nearest_match() -> None:
    assert "did you mean 'cifar10'?" in refusal("cifar-10")
    assert offbeat.data.names() == ["cifar10", "cifar100", "imagefolder", "digits", "synthetic", "text"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagefolder"])
def test_a_data_set_of_files_needs_a_folder_that_exists(name: str, tmp_path: Path) -> None:
    layout = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary", "imagefolder": "train/<class>"}[name]
    assert layout in refusal(name)
    gone = refusal(name, folder=tmp_path / "gone")
    assert "does not exist" in gone
    assert layout in gone
    assert layout in refusal(name, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("cifar10", "shape"),
        ("cifar100", "classes"),
        ("cifar10", "samples"),
        ("imagefolder", "classes"),
        ("imagefolder", "samples"),
        ("digits", "classes"),
        ("digits", "samples"),
        ("digits", "folder"),
        ("synthetic", "folder"),
    ],
)
def test_an_option_that_the_data_set_cannot_take_is_refused(name: str, option: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path} if name in ("cifar10", "cifar100", "imagefolder") else {}
    options[option] = {"shape": (3, 8, 8), "folder": tmp_path}.get(option, 5)
    assert f"{name} takes no {option}" in refusal(name, **options)


@pytest.mark.parametrize("shape", [(3, 8), (0, 8, 8), (1, 8.0, 8), (1, 8, -8)])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    assert "channels, height, width" in refusal("synthetic", shape=shape)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 12, 8), (1, 8, 4)])
def test_digits_refuse_a_shape_that_is_no_multiple_of_their_grid(shape: tuple[int, int, int]) -> None:
    assert "multiples of 8" in refusal("digits", shape=shape)


@pytest.mark.parametrize("option", ["classes", "samples"])
def test_synthetic_data_need_at_least_one(option: str) -> None:
    assert f"0 {option}" in refusal("synthetic", **{option: 0})


def test_importing_the_package_loads_neither_pillow_nor_scikit_learn() -> None:
    code = "import sys, offbeat.data; print([name for name in ('PIL', 'sklearn') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
