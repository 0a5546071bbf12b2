"""What is installed: training needs few packages, extras bring the others, and a missing one is named in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from command import check_refused

from offbeat.errors import OPTIONAL, print_once

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SMALL = ("--data", "synthetic", "--samples", "48", "--shape", "1,8,8", "--model", "mlp")
RUN = ("train", *SMALL, "--epochs", "1", "--engine", "simulate", "--out", "r")
README = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[0]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("module", OPTIONAL)
def test_the_extra_that_an_error_names_installs_the_package(module):
    package, extra = OPTIONAL[module]
    carried = {"tokenizers": "transformers"}  # which requires it
    assert carried.get(package, package) in names(EXTRAS[extra])
    assert package not in names(PROJECT["dependencies"])
    assert extra in re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(",")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("sklearn", ("train", "--data", "digits", "--model", "mlp")),
        ("PIL", ("train", "--data", "imagefolder", "--data-dir", ".", "--model", "mlp")),
        ("transformers", ("train", "--model", "hf:.", "--data", "text")),
        ("tokenizers", ("train", "--model", "gpt", "--data", "text", "--tokenizer", "t.json")),
        ("jinja2", ("report", ".")),
    ],
)
def test_a_missing_package_is_refused_in_one_line_with_its_extra(offbeat, monkeypatch, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    package, extra = OPTIONAL[module]
    check_refused(
        offbeat, arguments, f"the package {package}, which is not installed", f"`pip install 'offbeat[{extra}]'`"
    )


def test_training_without_tensorboard_prints_one_line_and_writes_the_rest(offbeat, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    print_once.cache_clear()
    done = offbeat(*RUN)
    assert done.code == 0
    assert done.err.count("no events for TensorBoard") == 1
    assert "`pip install 'offbeat[tensorboard]'`" in done.err
    assert Path("r/metrics.jsonl").exists()
    assert not list(Path("r").glob("events*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_quick_start_in_a_clean_environment(tmp_path):
    """With the packages that training needs, and then with all extras."""

    def run(*command: object, code: int = 0) -> str:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env={**inherited, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("offbeat-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python, offbeat = tmp_path / "env/bin/python", tmp_path / "env/bin/offbeat"
    install = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*install, wheel)
    assert run(python, "-c", "import offbeat; print(offbeat.__file__)").startswith(str(tmp_path / "env"))
    blocks = "[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(4)]"
    loader = "[(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(24)]"
    given = f"import torch\nmodel = torch.nn.Sequential(*{blocks})\nloader = {loader}\n"
    (tmp_path / "readme.py").write_text(given + README)
    run(python, "-W", "error", "readme.py")
    assert "offbeat[tensorboard]" in run(offbeat, *RUN)
    assert "offbeat[report]" in run(offbeat, "report", "r", code=2)
    assert "offbeat[digits]" in run(offbeat, "demo", code=2)
    run(*install, f"offbeat[all] @ {wheel.as_uri()}")
    run(offbeat, "train", "--data", "digits", "--model", "mlp", "--epochs", "1", "-K", "2", "--out", "s")
    assert list((tmp_path / "s").glob("events*"))
    run(offbeat, "report", "s")
    assert (tmp_path / "report.html").stat().st_size > 10_000
