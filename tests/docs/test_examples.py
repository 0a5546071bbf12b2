"""What the examples for models of other libraries state; that all examples run in one process is in test_layout.py."""

from __future__ import annotations

import importlib.util
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offbeat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpt():
    spec = importlib.util.spec_from_file_location("small_gpt", ROOT / "examples/small_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pipeline(gpt, model) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        model,
        K=gpt.K,
        method=offbeat.ADL(M=gpt.M),
        loss=gpt.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=torch.zeros(2, gpt.CONTEXT, dtype=torch.long),
    )


def test_tied_weights_are_trained_by_the_first_stage_alone(gpt):
    parts = pipeline(gpt, gpt.GPT(11, tied=True)).parts
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert "embedding.weight" in names
    assert "scores.weight" not in names
    tied, untied = (sum(p.numel() for p in gpt.GPT(11, tied=tied).parameters()) for tied in (True, False))
    assert untied - tied == 11 * gpt.WIDTH
    assert len(pipeline(gpt, gpt.GPT(11)).parts) == gpt.K


def test_no_character_is_seen_before_its_turn(gpt):
    torch.manual_seed(0)
    model = gpt.GPT(11)
    text = torch.randint(11, (1, 20))
    changed = text.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 11
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("packed", [False, True])
def test_the_text_is_found_where_the_data_are(gpt, packed, tmp_path, monkeypatch):
    text = "To be, or not to be"
    if packed:
        (tmp_path / "tinyshakespeare.txt.xz").write_bytes(lzma.compress(text.encode()))
    else:
        (tmp_path / "tinyshakespeare.txt").write_text(text)
    monkeypatch.setenv("OFFBEAT_DATA_DIR", str(tmp_path))
    assert gpt.read_text() == text


def test_a_missing_text_file_is_reported_in_one_line(gpt, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpt, "HERE", tmp_path / "nothing")
    monkeypatch.delenv("OFFBEAT_DATA_DIR", raising=False)
    assert "def read_text" not in gpt.read_text()  # the package's, which examples are no part of
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.slow
def test_a_model_of_hugging_face_is_tuned_alike_in_one_process_and_two(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 300)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = []
    for way in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *way, str(ROOT / "examples/huggingface.py"), str(text)],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    alone, together = printed
    assert alone == together
    before, after = re.search(r": ([0-9.]+) before, ([0-9.]+) after", alone).groups()
    assert float(after) < float(before) / 5


OWN_MODEL = """
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return nn.functional.silu(self.norm(self.conv(x)), inplace=True)


def build(shape, classes):
    widths = [shape[0], 8, 16, 32, 32]
    blocks = [Block(*pair) for pair in zip(widths, widths[1:])]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))
"""


def image_example(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples/timm_models.py"), *args],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def check_trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^ +2 ", done.stdout, re.MULTILINE), done.stdout  # the second stage in the table
    before, after = re.search(r"test error: ([0-9.]+)% before, ([0-9.]+)% after", done.stdout).groups()
    assert float(after) < float(before) / 2


def test_the_example_for_image_models_trains_a_model_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    check_trained(image_example(tmp_path, "mine:build"))


@pytest.mark.slow
def test_the_example_for_image_models_trains_one_of_timm(tmp_path):
    pytest.importorskip("timm", reason="timm is not installed")
    check_trained(image_example(tmp_path))


def test_the_example_for_image_models_names_the_package_that_it_needs(tmp_path):
    if importlib.util.find_spec("timm"):
        pytest.skip("timm is installed")
    done = image_example(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "pip install timm" in done.stderr
