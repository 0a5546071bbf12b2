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
from preloaded import PYTHON

import offbeat

ROOT = Path(__file__).resolve().parents[2]


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpt():
    return example("small_gpt")


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
        [PYTHON, "-W", "error", str(ROOT / "examples/timm_models.py"), *args],
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


# ---- other libraries


@pytest.fixture
def trainer(monkeypatch):
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed, which the Trainer needs: pip install accelerate"
    )
    monkeypatch.setattr(sys, "argv", ["huggingface_trainer.py"])
    return example("huggingface_trainer")


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


def test_the_trainer_of_hugging_face_gives_the_same_weights_with_bp(trainer, tmp_path):
    """Optimizer, weight decay, schedule and order of the data are those of the Trainer."""
    data, changes = trainer.pieces()[:40], {"gradient_accumulation_steps": 1, "num_train_epochs": 2, "warmup_steps": 3}
    plain = trainer.Trainer(trainer.build(), trainer.arguments(tmp_path / "a", **changes), train_dataset=data)
    ours = trainer.PipelineTrainer(
        trainer.build(), trainer.arguments(tmp_path / "b", **changes), train_dataset=data, K=2, method=offbeat.BP()
    )
    logs = []
    for each in (plain, ours):
        each.train()
        logs.append([(line["loss"], line["learning_rate"]) for line in each.state.log_history if "loss" in line])
    assert same_weights(plain.model, ours.model)
    assert not same_weights(plain.model, trainer.build())
    assert logs[0] == logs[1]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["checkpoint-10", "checkpoint-5"]


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL1F1B(M=2)], ids=lambda method: method.name)
def test_the_trainer_of_hugging_face_gives_the_weights_of_a_loop_over_steps(trainer, tmp_path, method):
    ours = trainer.PipelineTrainer(
        trainer.build(),
        trainer.arguments(tmp_path, max_grad_norm=0.5),
        train_dataset=trainer.pieces()[:48],
        K=2,
        method=method,
    )
    seen, step = [], ours.training_step

    def training_step(model, inputs, *rest):
        seen.append(inputs)
        return step(model, inputs, *rest)

    ours.training_step = training_step
    ours.train()
    model, updates = trainer.build(), len(seen) // 2
    pipe = offbeat.Pipeline(
        model,
        K=2,
        method=method,
        optimizer=ours.stage_optimizer,
        scheduler=lambda made: trainer.get_scheduler("linear", made, 0, updates),
        clip_norm=0.5,
    )
    for inputs in seen:
        pipe.step(dict(inputs))
    assert same_weights(ours.model, pipe.drain())
    assert [stage.mean for stage in ours.pipe.staleness] == [stage.mean for stage in pipe.staleness]
    assert ours.pipe.staleness[0].mean > 0


def test_the_trainer_with_another_accumulation_than_the_method_is_refused(trainer, tmp_path):
    with pytest.raises(offbeat.UserError, match="M=4 with gradient_accumulation_steps=2"):
        trainer.PipelineTrainer(trainer.build(), trainer.arguments(tmp_path), K=2, method=offbeat.ADL(M=4))


@pytest.mark.slow
def test_the_example_for_the_trainer_of_hugging_face_runs(trainer, capsys):
    trainer.main()
    before, after = re.search(r"held-out loss ([0-9.]+) before, ([0-9.]+) after", capsys.readouterr().out).groups()
    assert float(after) < float(before) - 1


@pytest.mark.slow
def test_accelerate_starts_a_process_per_stage_with_the_same_results(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    printed = []
    for way in ([], ["-m", "accelerate.commands.launch", *options.split()]):
        done = subprocess.run(
            [sys.executable, *way, str(ROOT / "examples/accelerate_launch.py")],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
    (here, result), (apart, same) = printed
    assert (here, apart) == ("stages in this process: 2 of 2", "stages in this process: 1 of 2")
    assert result == same


@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, no logger
def test_a_lightning_module_gives_the_weights_of_a_loop_over_steps(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    monkeypatch.chdir(tmp_path)
    made = example("lightning_module")
    batches = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(7)]
    module = made.PipelineModule(made.build(), K=2, method=offbeat.ADL1F1B(M=2), lr=0.05)
    runner = made.trainer(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    runner.fit(module, made.Batches(lambda _: iter(batches)))
    other = made.PipelineModule(made.build(), K=2, method=offbeat.ADL1F1B(M=2), lr=0.05)
    losses = [other.pipe.step(*batch) for batch in batches * 2]
    assert same_weights(module.model, other.pipe.drain())
    assert not same_weights(module.model, made.build())
    assert torch.equal(runner.callback_metrics["train_loss"], losses[-1])
    assert runner.global_step == 14
    (file,) = tmp_path.rglob("*.ckpt")  # of the last epoch, before the batches in flight
    saved = torch.load(file, weights_only=False)["state_dict"]
    assert saved.keys() == {f"model.{name}" for name in module.model.state_dict()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_for_lightning_runs(capsys):
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    example("lightning_module").main()
    assert float(re.search(r"test error ([0-9.]+) %", capsys.readouterr().out)[1]) < 45  # guessing: 90
