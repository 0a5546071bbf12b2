"""`offbeat.train`: one recipe from Python, into a run folder, to a result; nothing goes through the environment."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from preloaded import PYTHON
from processes import START, two_processes
from run_folders import run as copied_run
from safetensors.torch import load_file

import offbeat
from offbeat.checkpoint import ls
from offbeat.errors import UserError
from offbeat.runs import launch
from offbeat.runs.recipe import configured, make_recipe
from offbeat.runs.record import lines

PACKAGE = Path(offbeat.__file__).parent
SMALL: dict[str, Any] = {
    "model": "resnet8",
    "data": "synthetic",
    "shape": (3, 8, 8),
    "samples": 64,
    "batch_size": 8,
    "K": 2,
    "M": 2,
    "epochs": 1,
    "threads_per_stage": 1,
}


def config(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["recipe"]


def test_a_recipe_is_trained_into_a_run_folder_and_the_result_returned(tmp_path, capsys):
    recipe = make_recipe(**SMALL, engine="simulate")
    result = offbeat.train(recipe, out=tmp_path / "run")
    (record,) = (line for line in lines(tmp_path / "run") if line["kind"] == "result")
    assert result == {name: value for name, value in record.items() if name not in ("kind", "time")} | {
        "out": str(tmp_path / "run")
    }
    assert config(tmp_path / "run")["K"] == 2
    assert capsys.readouterr() == ("", "")


def test_an_epoch_in_which_no_batch_reaches_the_last_stage_has_no_training_loss(tmp_path, capsys):
    recipe = make_recipe(**{**SMALL, "samples": 8, "M": None}, method="dgl-async", engine="simulate")
    offbeat.train(recipe, out=tmp_path / "run", show=True)
    (record,) = (line for line in lines(tmp_path / "run") if line["kind"] == "epoch")
    assert record["train_loss"] is None
    (printed,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch"))
    assert printed.startswith("epoch 1/1  test loss")


@pytest.mark.usefixtures("forked_children")
def test_the_records_of_a_run_show_what_the_auto_corrector_chose(tmp_path, capsys):
    given = {**SMALL, "optimizer": "adamw"}
    offbeat.train(make_recipe(**given, engine="processes", corrector="auto"), out=tmp_path / "auto")
    offbeat.train(make_recipe(**given, engine="simulate", corrector="lookahead:least=1+sc"), out=tmp_path / "by-hand")
    (record,) = (line for line in lines(tmp_path / "auto") if line["kind"] == "correctors")
    assert record["stages"] == ["lookahead:least=1+sc", "none"]
    auto, by_hand = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", "by-hand"))
    assert all(auto[name].equal(by_hand[name]) for name in by_hand)
    offbeat.train(make_recipe(**given, engine="simulate", corrector="auto"), out=tmp_path / "shown", show=True)
    assert "corrector auto: stage 1 lookahead:least=1+sc, stage 2 none" in capsys.readouterr().err


def test_a_run_resumes_from_python_with_other_settings(tmp_path):
    run = str(tmp_path / "run")
    offbeat.train(make_recipe(**SMALL, engine="simulate", checkpoint_every="1e"), out=run)
    offbeat.train(resume=run, epochs=2)
    assert [line["epoch"] for line in lines(tmp_path / "run") if line["kind"] == "epoch"] == [0, 1]
    assert config(tmp_path / "run")["epochs"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": "3"}, "epochs='3': use an integer"),
        ({"settings": 5}, "settings=5: use a dict"),
        ({"method": offbeat.ADL(M=2)}, "method is a Method"),
    ],
)
def test_changes_of_a_wrong_type_are_refused(change, message, tmp_path):
    """They ended in a TypeError."""
    made = copied_run(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        offbeat.train(resume=made, **change)


@pytest.mark.parametrize("name", ["a\0b", ""])
def test_a_folder_whose_name_no_disk_takes_is_refused(name):
    with pytest.raises(UserError, match="give the name of a folder"):
        offbeat.train(make_recipe(**SMALL), out=name)


def test_a_finished_run_without_checkpoints_can_be_extended(tmp_path):
    constant = {
        **SMALL,
        "engine": "simulate",
        "milestones": (),
        "warmup": 0.0,
    }  # a rate that is the same for all epochs
    offbeat.train(make_recipe(**constant), out=tmp_path / "run")
    assert [(each.checkpoint.t, each.checkpoint.mode) for each in ls(tmp_path / "run")] == [(8, "drained")]
    offbeat.train(resume=tmp_path / "run", epochs=2)
    drained = {**constant, "epochs": 2, "checkpoint_every": "1e", "checkpoint_mode": "drained"}
    offbeat.train(make_recipe(**drained), out=tmp_path / "whole")
    extended, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(extended[name].equal(whole[name]) for name in whole)
    assert len([line for line in lines(tmp_path / "run") if line["kind"] == "result"]) == 1


def test_a_run_clips_by_the_norm_of_the_model(tmp_path):
    weights = {}
    for name, options in {
        "whole": {"K": 1},
        "model": {"K": 3, "clip_over": "model"},
        "stage": {"K": 3},
    }.items():
        given = {**SMALL, "method": "bp", "clip_norm": 0.05, "engine": "simulate", **options}
        offbeat.train(make_recipe(**given), out=tmp_path / name)
        weights[name] = load_file(tmp_path / name / "model.safetensors")
        recipe = config(tmp_path / name)
        assert recipe["clip_over"] == options.get("clip_over", "stage")
    close = {
        name: all(found[key].allclose(tensor, atol=1e-6) for key, tensor in weights["whole"].items())
        for name, found in weights.items()
    }
    assert close == {"whole": True, "model": True, "stage": False}
    del recipe["clip_over"]  # as earlier versions wrote it
    (tmp_path / "earlier.json").write_text(json.dumps({"recipe": recipe}))
    assert configured(tmp_path / "earlier.json", {}).clip_over == "stage"


def test_keep_0_leaves_no_checkpoint(tmp_path):
    offbeat.train(make_recipe(**SMALL, engine="simulate", keep=0), out=tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(UserError, match=r"no valid checkpoint to resume from.*without keep=0"):
        offbeat.train(resume=tmp_path / "run", epochs=2)
    with pytest.raises(UserError, match="keep=0 with checkpoint_every='1e'"):
        offbeat.train(make_recipe(**SMALL, engine="simulate", keep=0, checkpoint_every="1e"), out=tmp_path / "other")


@pytest.mark.usefixtures("forked_children")
def test_worker_processes_train_the_same_and_this_environment_stays(tmp_path):
    def environment() -> dict[str, str]:  # torch's launcher sets variables of its own
        return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}

    before = environment()
    offbeat.train(make_recipe(**SMALL, engine="processes"), out=tmp_path / "processes", silence=120)
    assert environment() == before
    offbeat.train(make_recipe(**SMALL, engine="simulate"), out=tmp_path / "simulate")
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("processes", "simulate"))
    assert all(there[name].equal(here[name]) for name in here)


def test_the_record_of_a_script_names_the_script_as_its_command(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        f"import offbeat\n"
        f"recipe = offbeat.make_recipe(**{SMALL!r}, engine='simulate')\n"
        f"print(offbeat.train(recipe, out={str(tmp_path / 'run')!r})['out'])\n"
    )
    done = subprocess.run([PYTHON, script, "once"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path / "run"), done.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["provenance"]["command"] == ["study.py", "once"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no recipe: give train a recipe"),
        ({"epochs": 2}, "epochs=2 without resume="),
        ({"recipe": "adl"}, "recipe is of type str: give one that offbeat.make_recipe(K=2, M=4) makes"),
        ({"resume": "nowhere"}, "resume='nowhere' holds no config.json"),
        ({"resume": "nowhere", "out": "x"}, "resume='nowhere' names the run folder: leave out recipe= and out="),
    ],
)
def test_arguments_that_name_no_run_are_refused(arguments, message):
    with pytest.raises(offbeat.UserError) as refused:
        offbeat.train(**arguments)
    assert message in str(refused.value)


def test_the_silence_allowed_reaches_worker_processes_on_their_command_line(tmp_path, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "launch", lambda K, arguments, **_: started.append(arguments))
    assert offbeat.train(make_recipe(**SMALL, engine="processes"), out=tmp_path / "run", silence=7.5) is None
    assert started[0][-2:] == ["--silence", "7.5"]


RESUMED = """
import sys, offbeat
result = offbeat.train(resume={run!r}, epochs=2, momentum=0.5, silence=120)
assert (result is None) == (__import__("os").environ["RANK"] == "1")
__import__("os")._exit(0)
"""


def test_resuming_under_torchrun_writes_the_changed_recipe(tmp_path):
    run = tmp_path / "run"
    offbeat.train(make_recipe(**SMALL, engine="simulate", checkpoint_every="1e"), out=run)
    with two_processes(RESUMED.format(run=str(run))) as started:
        for process in started:
            assert process.wait(START) == 0, process.communicate()
    assert (config(run)["epochs"], config(run)["momentum"], config(run)["engine"]) == (2, 0.5, "processes")
    assert json.loads((run / "config-1.json").read_text())["recipe"]["epochs"] == 1
    assert [line["epoch"] for line in lines(run) if line["kind"] == "epoch"] == [0, 1]


# ---- the environment is no way to pass an argument

FOR_LIBRARIES = {  # files that set variables for gloo and CUDA; and the server of bench, in a process that it forked
    "core/links/network.py",
    "engines/processes.py",
    "engines/stage_streams.py",
    "studies/bench/fork_server.py",
}


def sets_environment(node: ast.AST) -> bool:
    """Whether it assigns to os.environ, or calls what changes it."""
    if isinstance(node, ast.Assign | ast.Delete):
        return any(
            isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ" for target in node.targets
        )
    changes = ("update", "setdefault", "pop", "clear", "popitem")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "os.putenv",
        "os.unsetenv",
        *(f"os.environ.{name}" for name in changes),
    )


def test_no_function_passes_an_argument_through_the_environment():
    setting = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(map(sets_environment, ast.walk(ast.parse(path.read_text()))))
    }
    assert setting == FOR_LIBRARIES


@pytest.mark.parametrize(
    "variable", ["OFFBEAT_DATA_DIR", "OFFBEAT_TEXT", "OFFBEAT_SILENCE", "OFFBEAT_COMMIT", "OFFBEAT_PAYLOADS"]
)
def test_each_variable_that_users_set_is_read_in_one_file(variable):
    reading = [path for path in PACKAGE.rglob("*.py") if f'"{variable}"' in path.read_text()]
    assert len(reading) == 1


@pytest.mark.parametrize(("replicas", "given", "count"), [(1, "K=9", 9), (3, "K=3 with replicas=3", 9)])
def test_more_processes_than_can_share_the_cores_are_refused_before_the_folder(
    replicas, given, count, tmp_path, monkeypatch
):
    """54 stages on 2 cores used up the memory of the machine."""
    monkeypatch.setattr(launch, "cores", lambda: 1)
    settings = {**SMALL, "K": count // replicas, "replicas": replicas, "engine": "processes"}
    with pytest.raises(UserError) as refused:
        offbeat.train(make_recipe(**settings), out=tmp_path / "run")
    assert str(refused.value) == (
        f"{given}: 9 processes on 1 core, use 8 or fewer (8 per core), engine='simulate', which gives the same "
        "numbers, or a machine with more cores"
    )
    assert not (tmp_path / "run").exists()
    launch.check_cores(8)
