"""The page that compares libraries: its code runs, in one process and in four, and its lines are counted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from preloaded import PYTHON

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TOP, *SECTIONS = re.split(r"^## (?=\d+\. )", PAGE, flags=re.MULTILINE)
((_, COMMON),) = BLOCK.findall(TOP)
TASKS = {section.split("\n")[0]: BLOCK.findall(section) for section in SECTIONS}
ROWS = dict(re.findall(r"^\| \[(\d+\. [^\]]+)\]\(#[^)]+\) \| ([^|]+) \|", PAGE, re.MULTILINE))
COMMANDS = [line for blocks in TASKS.values() for kind, code in blocks if kind == "sh" for line in code.splitlines()]
IN_FOUR = ("2. Train without waiting", "7. Losses, early stopping, averages", "10. Replicas of stages")


def code_of(task: str) -> str:
    return "".join(code for kind, code in TASKS[task] if kind == "python")


def counted(code: str) -> int:
    """Lines without blank ones, comments and imports; data of an example is not counted."""
    own = [line for line in code.splitlines() if line.strip() and not line.startswith(("#", "from ", "batch = "))]
    return len(own)


def test_every_task_is_in_the_table_with_its_lines():
    assert list(ROWS) == list(TASKS)
    assert len(TASKS) >= 10
    for task, lines in ROWS.items():
        if lines != "not supported":
            assert int(lines) == counted(code_of(task)), task
        else:
            assert not TASKS[task]


@pytest.mark.parametrize("task", [task for task in TASKS if code_of(task)])
def test_the_code_of_a_task_runs(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "comparison"}
    exec(compile(COMMON + code_of(task), "docs/comparison.md", "exec"), namespace)
    if task.startswith("5."):
        straight, ema = namespace["pipe"].model, namespace["ema"]
        assert all(map(torch.equal, straight.state_dict().values(), namespace["again"].model.state_dict().values()))
        assert namespace["again"].batches == 24
        assert ema.weights
    if task.startswith("6."):
        assert namespace["fewer"].batches == 24


def test_the_same_code_runs_in_four_processes(tmp_path):
    (command,) = [line for line in COMMANDS if line.startswith("torchrun")]
    (tmp_path / "train.py").write_text(COMMON + "".join(code_of(task) + "pipe.close()\n" for task in IN_FOUR))
    given = [PYTHON, "-m", "torch.distributed.run", "--standalone", *command.split()[1:]]
    done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = "".join(done.stdout.split())  # a process may print between the loss and the end of line of another
    loss = printed[: len(printed) // 4]
    assert printed == 4 * loss, "the same loss in every process"
    assert float(loss) > 0


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("offbeat methods")])
def test_the_schedule_is_printed(command, offbeat):
    done = offbeat(*command.split()[1:])
    assert (done.code, "F0@v0" in done.out) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("offbeat plan")])
def test_the_plan_is_printed(command, offbeat, tmp_path):
    done = offbeat(*command.split()[1:])
    assert done.code == 0
    assert (tmp_path / "plan.svg").exists()


def test_every_other_library_is_linked_in_its_own_documentation():
    links = re.findall(r"\((https://[^)]+)\)", PAGE)
    for place in ("huggingface.co/docs/accelerate", "lightning.ai/docs/fabric", "docs.pytorch.org", "deepspeed"):
        assert sum(place in link for link in links) >= 5, place
