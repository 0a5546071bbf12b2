"""The tutorial does what it says: its code in order, its scripts and commands as they stand."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fixed_times import few_laps

import offbeat
from offbeat import data

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TOLD = BLOCK.findall((ROOT / "docs/tutorial.md").read_text())
PYTHON = [code for language, code in TOLD if language == "python"]
SCRIPTS = {found[1]: code for code in PYTHON if (found := re.match(r"# (\w+\.py)\n", code))}
COMMANDS = [line for language, code in TOLD if language == "sh" for line in code.splitlines()]
# The commands of an environment that need not be active here
PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "offbeat": ["-m", "offbeat"]}


def shell(command: str, folder: Path) -> str:
    program, *arguments = command.split()
    surroundings = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**surroundings, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_block_is_one_that_is_run_here():
    assert {language for language, _ in TOLD} == {"python", "sh"}
    assert len(SCRIPTS) == 1


@pytest.mark.parametrize("samples", [320, pytest.param(None, marks=pytest.mark.slow)])
def test_the_code_runs_from_top_to_bottom(samples, tmp_path, monkeypatch, capsys):
    """With the first samples of the digits and times of few laps, or all of them."""
    opened = data.open

    def open_some(*given, **options):
        whole = opened(*given, **options)
        some = {"train_images": whole.train_images[:samples], "train_labels": whole.train_labels[:samples]}
        return dataclasses.replace(whole, **some)

    monkeypatch.setattr(data, "open", open_some)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "tutorial"}
    with few_laps() if samples else nullcontext():
        for code in PYTHON:
            if code not in SCRIPTS.values():
                exec(compile(code, "docs/tutorial.md", "exec"), namespace)
    assert "test error" in capsys.readouterr().out


def test_the_code_of_the_readme_runs():
    (code,) = [code for language, code in BLOCK.findall((ROOT / "README.md").read_text()) if language == "python"]
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(4)]
    loader = [(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(24)]
    namespace = {"__name__": "readme", "torch": torch, "model": torch.nn.Sequential(*blocks), "loader": loader}
    exec(compile(code, "README.md", "exec"), namespace)
    assert [stage.mean for stage in namespace["pipe"].staleness] == [1.5, 1.0, 0.5, 0.0]


def test_the_code_of_the_questions_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/faq.md").read_text()
    blocks = BLOCK.findall(text)
    assert blocks
    assert {language for language, _ in blocks} <= {"python", "sh"}
    assert "\n\n    " not in text  # no block that is only indented
    namespace = {"__name__": "faq"}
    for language, code in blocks:
        if language == "python":
            exec(compile(code, "docs/faq.md", "exec"), namespace)
    resumed = namespace["pipe"].model
    straight = namespace["build"]()
    straight.fit(namespace["batches"])
    for one, other in zip(resumed.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_bp_in_one_stage_has_the_bits_of_the_loop_only_without_dropout(p):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(p), torch.nn.Linear(8, 3))

    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    loss, plain = torch.nn.functional.cross_entropy, build()
    pipe = offbeat.Pipeline(
        build(), 1, method=offbeat.BP(), loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss(plain(x), y).backward()
        optimizer.step()
        pipe.step(x, y)
    pairs = zip(plain.parameters(), pipe.drain().parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs) == (p == 0)


def test_the_pipeline_takes_a_few_lines():
    pipeline = PYTHON[1].split("torch.manual_seed(0)\n")[1]
    assert pipeline.count("\n") <= 11


@pytest.mark.slow
def test_scripts_and_commands_run_and_one_process_prints_what_two_do(offbeat, tmp_path):
    for name, code in SCRIPTS.items():
        (tmp_path / name).write_text(code)
    printed = {}
    for command in COMMANDS:
        if "--dry-run" in command or command.startswith("offbeat report "):  # which start no processes
            done = offbeat(*command.split()[1:])
            assert done.code == 0, done.err
        else:
            printed[command] = shell(command, tmp_path)
    alone, in_two = (printed[command] for command in COMMANDS if command.endswith("train.py"))
    assert alone.count("test error") == 2
    assert alone == in_two
    shown = (tmp_path / "first.html").read_text()
    assert all(title in shown for title in ("As recorded", "As planned", "Late against fresh gradients"))


def test_no_line_needs_scrolling():
    assert max(len(line) for _, code in TOLD for line in code.splitlines()) <= 120
