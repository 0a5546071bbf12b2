"""Runs of language models on text: the same bits in all engines, resumed in flight, recorded with their own metric."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, check_refused, train_here, weights
from run_folders import stopped
from torch.nn import functional

import offbeat
from offbeat import data
from offbeat.core import state as stage_state
from offbeat.data.text import open_text
from offbeat.runs.begin import begin
from offbeat.runs.build import check, cross_entropy, open_data
from offbeat.runs.recipe import Recipe, load, make_recipe
from offbeat.runs.record import lines
from offbeat.runs.task import LANGUAGE, bits_per_byte, task_of

GPT = "gpt:layers=2,width=16,heads=2,context=8"


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 6000, dtype=np.uint8)))
    return path


def recipe(letters: Path, **given: Any) -> Recipe:
    fixed = {
        "model": GPT,
        "data_dir": str(letters),
        "samples": 62,
        "batch_size": 4,
        "epochs": 2,
        "K": 2,
        "M": 2,
        "engine": "simulate",
        "threads_per_stage": 1,
    }
    return make_recipe(**{**fixed, **given})


def found(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(run) if line["kind"] == kind]


def test_the_loss_is_the_mean_over_all_tokens_and_that_of_torch_for_images():
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    each = [functional.cross_entropy(logits[b], tokens[b]) for b in range(3)]
    assert torch.allclose(cross_entropy(logits, tokens), torch.stack(each).mean())
    scores, labels = torch.randn(4, 7), torch.randint(7, (4,))
    assert torch.equal(cross_entropy(scores, labels), functional.cross_entropy(scores, labels))


def test_text_is_the_only_data_of_the_language_task():
    assert [name for name in data.names() if task_of(name) is LANGUAGE] == ["text"]


def test_a_run_records_bits_per_byte_tokens_per_second_and_the_text(letters, tmp_path):
    result = offbeat.train(recipe(letters), out=tmp_path / "run")
    (text,), epochs = found(tmp_path / "run", "text"), found(tmp_path / "run", "epoch")
    assert text["sha256"] == hashlib.sha256(letters.read_bytes()).hexdigest()
    assert (text["tokens"], text["vocabulary"], text["context"], text["bytes_per_token"]) == (6000, 256, 8, 1.0)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))
    assert (result["error"], result["top5"]) == (None, None)
    assert result["tokens_per_second"] == pytest.approx(8 * result["samples_per_second"])
    for line in epochs:
        assert line["test_bits_per_byte"] == pytest.approx(line["test_loss"] / math.log(2))
        assert line["train_bits_per_byte"] == pytest.approx(line["train_loss"] / math.log(2))
        assert line["test_error"] is line["train_error"] is None
    assert epochs[1]["test_bits_per_byte"] < epochs[0]["test_bits_per_byte"] < 8.2


def test_a_context_as_large_as_the_vocabulary_has_no_error_either(tmp_path):
    """Scores (b, 256, 256) look like those of 256 classes at 256 places."""
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 100)
    model = "gpt:layers=1,width=8,heads=1,context=256"
    result = offbeat.train(recipe(tmp_path / "text", model=model, samples=4, K=1, epochs=1), out=tmp_path / "run")
    assert (result["error"], result["top5"]) == (None, None)
    assert {line["error"] for line in found(tmp_path / "run", "train")} == {None}


def test_bits_per_byte_of_a_tokenizer_count_the_bytes_of_its_test_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "text").write_text("a\n" * 4500 + "bbbb\n" * 500)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "bbbb": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    opened = open_text(folder=tmp_path / "text", shape=(8,), tokenizer=tmp_path / "tokenizer.json")
    assert set(opened.testing) == {1}
    assert opened.bytes_per_token == 5.0  # with the end of the line
    assert bits_per_byte(math.log(2), opened.bytes_per_token) == pytest.approx(0.2)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("method", ["adl", "bp"])
def test_processes_train_a_gpt_to_the_bits_of_one_process(letters, tmp_path, method):
    for engine in ("simulate", "processes"):
        offbeat.train(recipe(letters, method=method, engine=engine), out=tmp_path / engine, silence=120)
    assert weights(tmp_path / "processes") == weights(tmp_path / "simulate")
    there, here = ([line["loss"] for line in found(tmp_path / engine, "train")] for engine in ("processes", "simulate"))
    assert there == here


@pytest.mark.parametrize(
    "given", [{"weights": "stash"}, {"weights": "hybrid"}, {"optimizer": "nadam"}], ids=["stash", "hybrid", "nadam"]
)
def test_a_gpt_resumes_in_flight_to_the_same_bits(letters, tmp_path, given):
    made = recipe(letters, K=3, checkpoint_every="7b", **given)
    offbeat.train(made, out=tmp_path / "whole")
    stopped(made, tmp_path / "broken", 17)
    offbeat.train(resume=tmp_path / "broken")
    assert found(tmp_path / "broken", "resumed")[-1] == {
        **found(tmp_path / "broken", "resumed")[-1],
        "batch": 14,
        "exact": True,
    }
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_another_cut_keeps_the_state_of_adamw(letters, tmp_path):
    made = recipe(letters, checkpoint_every="8b", checkpoint_mode="drained")
    stopped(made, tmp_path / "run", 9)
    (tmp_path / "before.json").write_text((tmp_path / "run/config.json").read_text())
    run = begin(
        check(make_recipe(**{**load(tmp_path / "before.json"), "K": 3, "cuts": None}))[0],
        tmp_path / "run",
        show=False,
        folder_ready=True,
        rewrite=True,
    )
    for stage in run.pipe.stages.values():
        for values in stage.optimization.optimizer.state.values():
            assert values["step"] == 4
            assert {"exp_avg", "exp_avg_sq"} <= values.keys()
    run.close()


def test_another_optimizer_begins_anew_and_says_so(letters, tmp_path, offbeat: Command):
    stopped(recipe(letters, checkpoint_every="7b"), tmp_path / "run", 9)
    train_here(offbeat, "--resume", tmp_path / "run", "--optimizer", "sgd")
    notes = [line["text"] for line in found(tmp_path / "run", "note")]
    assert "the state of the optimizer is lost by the change from adamw to sgd" in notes
    now = json.loads((tmp_path / "run/config.json").read_text())["recipe"]
    assert (now["optimizer"], now["momentum"], now["betas"], now["lr"]) == ("sgd", 0.9, None, 0.1 * 4 * 2 / 256)


def test_other_betas_apply_from_the_next_update_on(letters, tmp_path):
    stopped(recipe(letters, checkpoint_every="7b"), tmp_path / "run", 9)
    given = {**load(tmp_path / "run/config.json"), "betas": (0.8, 0.99)}
    run = begin(check(make_recipe(**given))[0], tmp_path / "run", show=False, folder_ready=True, rewrite=True)
    for stage in run.pipe.stages.values():
        assert [tuple(group["betas"]) for group in stage.optimization.optimizer.param_groups] == [(0.8, 0.99)]
    run.close()


def test_offbeat_text_names_the_text_of_recipes_without_one(letters, tmp_path, monkeypatch):
    (tmp_path / "other").write_bytes(b"0123456789" * 100)
    monkeypatch.setenv("OFFBEAT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("OFFBEAT_TEXT", str(letters))
    assert open_data(make_recipe(model=GPT)).sha256 == hashlib.sha256(letters.read_bytes()).hexdigest()
    assert len(open_data(recipe(tmp_path / "other")).training) == 900
    assert len(open_data(make_recipe(model=GPT), folder=str(tmp_path / "other")).training) == 900


def test_a_resumed_run_notes_that_the_text_has_changed(letters, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(letters.read_bytes())
    stopped(recipe(text, checkpoint_every="7b"), tmp_path / "run", 9)
    text.write_bytes(letters.read_bytes()[::-1])
    run = begin(check(make_recipe(**load(tmp_path / "run/config.json")))[0], tmp_path / "run", folder_ready=True)
    run.close()
    assert len({line["sha256"] for line in found(tmp_path / "run", "text")}) == 2


def test_a_text_run_warms_up_for_a_twentieth_and_decreases_to_a_tenth(letters, tmp_path):
    made = recipe(letters, samples=64, epochs=5, K=1, method="bp", M=2)  # 40 updates
    assert (made.schedule, made.floor, made.milestones, made.warmup) == ("cosine", 0.1, (), 0.25)
    stopped(made, tmp_path / "run", 4 * 16)
    run = begin(check(made)[0], tmp_path / "other", show=False)
    scheduled = run.pipe.stages[1].optimization.scheduler.lr_lambdas[0]
    wanted = [0.01, 0.505] + [0.1 + 0.9 * (1 + math.cos(math.pi * s / 38)) / 2 for s in range(39)]
    assert [scheduled(s) for s in range(41)] == pytest.approx(wanted)
    run.close()
    rates = {line["batch"]: line["lr"] for line in found(tmp_path / "run", "train")}
    assert rates
    assert rates == pytest.approx({batch: 1e-3 * scheduled((batch + 1) // 2) for batch in rates})


def test_a_new_schedule_applies_from_the_next_update_on(letters, tmp_path, offbeat: Command):
    stopped(recipe(letters, checkpoint_every="7b"), tmp_path / "run", 9)
    train_here(offbeat, "--resume", tmp_path / "run", "--schedule", "steps", "--warmup", 0)
    now = json.loads((tmp_path / "run/config.json").read_text())["recipe"]
    assert (now["schedule"], now["milestones"], now["floor"]) == ("steps", [0.8, 0.95], None)
    assert {line["lr"] for line in found(tmp_path / "run", "train") if 20 < line["batch"] < 24} == {1e-3}


def test_recipes_of_text_written_before_keep_their_steps(tmp_path, letters):
    now = recipe(letters, schedule="steps", warmup=0.02).as_dict()
    earlier = {name: value for name, value in now.items() if name not in ("schedule", "floor")}
    (tmp_path / "config.json").write_text(json.dumps({"recipe": earlier}))
    assert make_recipe(**load(tmp_path / "config.json")) == make_recipe(**now)


def test_the_weight_decay_of_nadam_is_decoupled_from_its_gradients(letters, tmp_path):
    run = begin(check(recipe(letters, optimizer="nadam", lr=0.5))[0], tmp_path / "run", show=False)
    optimizer = run.pipe.stages[1].optimization.optimizer
    assert isinstance(optimizer, torch.optim.NAdam)
    (group,) = optimizer.param_groups
    assert (group["decoupled_weight_decay"], group["weight_decay"], group["betas"]) == (True, 0.1, (0.9, 0.95))
    run.close()


def test_recipes_written_before_have_sgd_and_load_unchanged(tmp_path):
    now = make_recipe(K=2).as_dict()
    earlier = {name: value for name, value in now.items() if name not in ("optimizer", "betas", "tokenizer")}
    (tmp_path / "config.json").write_text(json.dumps({"recipe": earlier}))
    assert make_recipe(**load(tmp_path / "config.json")) == make_recipe(K=2)


def test_options_of_an_optimizer_on_a_gpu_are_not_those_of_a_cpu():
    """A state saved on a GPU can be loaded where neither fused nor capturable is possible."""

    def stage(**options: Any) -> Any:
        pipe = offbeat.Pipeline(
            torch.nn.Linear(2, 2),
            1,
            method="bp",
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **options),
        )
        pipe.step(torch.ones(1, 2), torch.ones(1, 2))
        return pipe.stages[1]

    saved, other = stage_state.save(stage(fused=True, capturable=True)), stage()
    stage_state.load(other, saved)
    (group,) = other.optimization.optimizer.param_groups
    assert (group["fused"], group["capturable"]) == (None, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", GPT, "--data", "digits"), f"{GPT} takes tokens, but --data digits has images: use --data text"),
        (("--model", "resnet8", "--data", "text"), "resnet8 takes images, but --data text has text: use --model gpt"),
        (("--model", GPT, "--shape", "16"), f"--shape 16, but {GPT} has a context of 8 tokens"),
        (("--model", GPT, "--shape", "3,8,8"), "--shape 3,8,8 of text: give tokens"),
        (("--model", GPT, "--method", "dgl", "-K", "2"), "--method dgl with --data text"),
        (("--model", GPT, "--method", "adl:corrector=nag"), "corrector nag with --optimizer adamw"),
        (("--model", GPT, "--momentum", "0.9"), "--momentum 0.9 with --optimizer adamw"),
        (("--model", "resnet8", "--betas", "0.9,0.95"), "--betas 0.9,0.95 with --optimizer sgd"),
        (("--model", GPT, "--betas", "0.9"), "--betas 0.9: use two numbers"),
        (("--model", GPT, "--betas", "0.9,1"), "use two numbers of at least 0 and below 1"),
        (("--model", GPT, "--optimizer", "adam"), "unknown optimizer 'adam'"),
        (("--model", GPT, "--schedule", "linear"), "unknown schedule 'linear'"),
        (("--model", GPT, "--schedule", "cosine", "--milestones", "0.5"), "--milestones 0.5 with --schedule cosine"),
        (("--model", GPT, "--schedule", "steps", "--floor", "0.5"), "--floor 0.5 with --schedule steps: it is for"),
        (("--model", GPT, "--floor", "1.5"), "--floor 1.5: use a number from 0 to 1"),
        (("--model", GPT, "--data-dir", "nowhere"), "folder nowhere does not exist"),
        (("--model", GPT, "--classes", "3"), "text takes no classes"),
        (("--model", GPT, "--tokenizer", "nowhere.json"), "tokenizer nowhere.json cannot be read"),
        (("--model", "resnet8", "--data", "synthetic", "--tokenizer", "a"), "synthetic takes no tokenizer"),
        (("--model", GPT, "--samples", "0"), "samples"),
        (("--model", GPT, "-K", "99"), "99 stages"),
        (("--model", "gpt:layers"), "give each setting once and with a value"),
        (("--model", "nowhere:build"), "cannot be imported"),
    ],
)
def test_misuse_is_refused_in_one_line(offbeat: Command, letters, arguments, words):
    given = arguments if {"--data", "--data-dir"} & set(arguments) else (*arguments, "--data-dir", letters)
    check_refused(offbeat, ("train", *given), words)


def test_a_function_of_the_user_is_trained_and_cut(offbeat: Command, letters, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Embedding(classes, 8), nn.Linear(8, classes)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.first(x).relu())\n"
        "def build(classes):\n    return Net(classes)\n"
    )
    arguments = ("--model", "mine:build", "--data", "text", "--data-dir", letters, "--shape", 8, "--samples", 16)
    train_here(offbeat, *arguments, "-K", 2, "--engine", "simulate", "--out", "run", "--batch-size", 4)
    assert set(weights(tmp_path / "run")) == {"first.weight", "last.weight", "last.bias"}


def test_the_command_prints_bits_per_byte_and_tokens_per_second(offbeat: Command, letters):
    outcome = offbeat("train", "--model", GPT, "--data-dir", letters, "--samples", 16, "--batch-size", 4)
    assert outcome.code == 0, outcome
    assert all("tokens/s" in printed for printed in (outcome.out, outcome.err))
    assert outcome.out.startswith("bits per byte ")
    assert "error" not in outcome.out + outcome.err
