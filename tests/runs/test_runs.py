"""Whole runs by the real command: one process, K processes and torchrun give the same bytes, in a complete folder.

The runs are independent, so two of them go at once; a test waits for those that it needs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from preloaded import PYTHON
from processes import free_ports
from safetensors.torch import load_file

from offbeat import cli, models
from offbeat.runs.recipe import load, make_recipe
from offbeat.studies import demo

AT_ONCE = 2
LIMIT = 200  # seconds; a run that hangs, not one that is slow
SMALL = ("--data", "digits", "--model", "resnet8", "-M", "2", "--epochs", "2", "--threads-per-stage", "1")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # runs that share cores must not spin on them
    "GLOO_SOCKET_IFNAME": "lo",
}

UNEVEN = (
    "--data",
    "digits",
    "--model",
    "mlp",
    "--method",
    "dgl-async",
    "-K",
    "3",
    "--epochs",
    "2",
    "--checkpoint-every",
    "20b",
    "--threads-per-stage",
    "1",
)

Completed = subprocess.CompletedProcess


def python(*arguments: object, program: str = PYTHON) -> Completed:
    command = [program, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, env=ENVIRONMENT, stdin=subprocess.DEVNULL
    )


def two_agents(out: Path) -> list[Completed]:
    (port,) = free_ports(1)
    train = ("-m", "offbeat", "train", *SMALL, "-K", "2", "--out", out, "--json")

    def agent(node: int) -> Completed:
        return python(
            "-m",
            "torch.distributed.run",
            "--nnodes",
            2,
            "--node-rank",
            node,
            "--nproc-per-node",
            1,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            *train,
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(agent, range(2)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def commands(folder) -> Iterator[dict[str, Future]]:
    """Every run in processes of its own, started in this order; wait for one with .result()."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        train = ("-m", "offbeat", "train")
        first = pool.submit(python, *train, *SMALL, "-K", 2, "--out", folder / "processes", program=sys.executable)

        @cache  # when it is asked for
        def repeated() -> Completed:
            first.result()
            config = folder / "processes" / "config.json"
            return python("-m", "offbeat", "train", "--config", config, "--out", folder / "repeated", "--json")

        yield {
            "processes": first,
            "agents": pool.submit(two_agents, folder / "agents"),
            "repeated": SimpleNamespace(result=repeated),
            "uneven": pool.submit(python, *train, *UNEVEN, "--out", folder / "uneven"),
        }


@pytest.fixture(scope="module")
def here(folder, commands) -> Iterator:
    """Run the command in this process, where a start costs nothing: the JSON that it prints."""
    patch = pytest.MonkeyPatch()
    for name in ("RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)

    def run(name: str, *arguments: object, capsys: pytest.CaptureFixture) -> dict:
        patch.setattr(sys, "argv", ["offbeat", "train", *map(str, arguments), "--out", str(folder / name), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        printed = capsys.readouterr()
        assert exit.value.code == 0
        assert printed.err == ""
        return json.loads(printed.out)

    yield run
    patch.undo()


@pytest.fixture
def simulated(here, folder, capsys) -> Path:
    """The reference: the same run by the engine simulate."""
    if not (folder / "simulated").exists():
        here("simulated", *SMALL, "-K", 2, "--engine", "simulate", capsys=capsys)
    return folder / "simulated"


def succeeded(done: Completed) -> Completed:
    assert done.returncode == 0, done.stderr[-3000:]
    ours = [line for line in done.stderr.splitlines() if "/elastic/agent/" not in line]  # torchrun's own, as it leaves
    assert not any("Traceback" in line for line in ours), done.stderr[-3000:]
    return done


def model_bytes(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def lines(run: Path, kind: str | None = None) -> list[dict]:
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if kind in (None, line["kind"])]


def recipe_of(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())["recipe"]


def mean_staleness(k: int, K: int, M: int) -> float:
    return sum(ceil((2 * (K - k) - j) / M) for j in range(M)) / M


# ---- the same bytes


def test_two_processes_write_the_same_model_as_one(commands, simulated, folder):
    succeeded(commands["processes"].result())
    assert model_bytes(folder / "processes") == model_bytes(simulated)
    found, expected = lines(folder / "processes", "result")[0], lines(simulated, "result")[0]
    for name in ("loss", "error", "top5", "staleness", "staleness_formula"):
        assert found[name] == expected[name]


def test_the_training_lines_of_two_processes_are_those_of_one(commands, simulated, folder):
    commands["processes"].result()
    measured_by_a_clock = ("time", "seconds", "samples_per_second", "out", "pause", "bytes")

    def recorded(run: Path) -> list[dict]:
        return [{name: line[name] for name in line if name not in measured_by_a_clock} for line in lines(run)]

    assert recorded(folder / "processes") == recorded(simulated)


@pytest.mark.slow
def test_a_config_repeats_its_run_bit_for_bit_in_processes_and_here(commands, here, simulated, folder, capsys):
    succeeded(commands["repeated"].result())
    assert model_bytes(folder / "repeated") == model_bytes(folder / "processes")
    assert recipe_of(folder / "repeated") == recipe_of(folder / "processes")
    here("again", "--config", simulated / "config.json", capsys=capsys)
    assert model_bytes(folder / "again") == model_bytes(simulated)
    here("elsewhere", "--config", folder / "processes" / "config.json", "--engine", "simulate", capsys=capsys)
    assert model_bytes(folder / "elsewhere") == model_bytes(simulated)
    here("other seed", "--config", simulated / "config.json", "--seed", 1, capsys=capsys)
    assert model_bytes(folder / "other seed") != model_bytes(simulated)


@pytest.mark.slow
def test_back_propagation_on_two_processes_writes_the_same_model_as_on_one_stage(here, folder, capsys):
    succeeded(python("-m", "offbeat", "train", *SMALL, "--method", "bp", "-K", 2, "--out", folder / "bp"))
    here("bp 1", *SMALL, "--method", "bp", capsys=capsys)
    assert model_bytes(folder / "bp") == model_bytes(folder / "bp 1")
    assert lines(folder / "bp", "result")[0]["staleness"] == [0, 0]


def test_two_torchrun_agents_write_the_same_model_as_one_process(commands, simulated, folder):
    first, second = commands["agents"].result()
    succeeded(first)
    succeeded(second)
    assert model_bytes(folder / "agents") == model_bytes(simulated)
    assert json.loads(first.stdout)["error"] == lines(simulated, "result")[0]["error"]
    assert second.stdout == ""


@pytest.mark.slow
def test_torchrun_writes_the_same_run_folder_as_the_command(commands, simulated, folder):
    commands["processes"].result()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = succeeded(python(*torchrun, "-m", "offbeat", "train", *SMALL, "-K", 2, "--out", folder / "torchrun"))
    assert model_bytes(folder / "torchrun") == model_bytes(simulated)
    assert recipe_of(folder / "torchrun") == recipe_of(folder / "processes")
    assert {path.name.split(".")[0] for path in (folder / "torchrun").iterdir()} == {
        "checkpoints",
        "config",
        "metrics",
        "events",
        "model",
    }
    assert done.stdout.count("test error") == 1, "one process reports"


def test_one_stage_runs_in_this_process_and_trains(here, folder, capsys):
    recorded = here("one", *SMALL, "-K", 1, "--lr", 0.2, "--warmup", 0, capsys=capsys)
    assert recorded["staleness"] == recorded["staleness_formula"] == [0]
    assert recorded["error"] < 50, "better than the 90 % of guessing"
    assert recipe_of(folder / "one")["engine"] == "simulate"


# ---- the run folder


@pytest.fixture
def run(commands, folder) -> Path:
    succeeded(commands["processes"].result())
    return folder / "processes"


def test_a_run_folder_holds_config_records_model_and_the_last_checkpoint(run):
    names = sorted(path.name for path in run.iterdir())
    assert [name.split(".")[0] for name in names] == ["checkpoints", "config", "events", "metrics", "model"]
    assert names[2].startswith("events.out.tfevents")


def test_the_config_is_complete(run):
    config = json.loads((run / "config.json").read_text())
    recipe, provenance = config["recipe"], config["provenance"]
    expected = make_recipe(data="digits", model="resnet8", K=2, M=2, epochs=2, threads_per_stage=1)
    assert recipe == json.loads(json.dumps(expected.as_dict())) | {"cuts": recipe["cuts"], "units": "blocks"}
    assert len(recipe["cuts"]) == 1
    assert recipe["seed"] == 0
    assert provenance["versions"]["torch"] == torch.__version__
    assert {"offbeat", "python", "numpy"} <= set(provenance["versions"])
    assert provenance["host"] == platform.node()
    assert "commit" in provenance
    assert provenance["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", provenance["commit"])
    assert provenance["command"][:2] == ["offbeat", "train"]
    assert load(run / "config.json")["K"] == 2


def test_the_training_lines_are_regular_and_sane(run):
    recorded = lines(run, "train")
    assert len(recorded) >= 20
    batches = [line["batch"] for line in recorded]
    assert batches == sorted(set(batches))
    assert batches[-1] == 2 * ceil(1437 / 32) - 1
    for line in recorded:
        assert line["epoch"] == line["batch"] // 45
        assert 0 < line["loss"] < 10
        assert 0 <= line["error"] <= 100
        assert 0 < line["lr"] <= recipe_of(run)["lr"]
        assert line["samples_per_second"] > 0
        assert len(line["staleness"]) == len(line["in_flight"]) == len(line["versions"]) == 2
        assert line["in_flight"] == [2, 0]  # 2(K-k)
        assert line["versions"][0] <= 2  # ceil(lag / M) + 1
        assert line["versions"][1] == 1
    times = [line["time"] for line in lines(run)]
    assert times == sorted(times)


def test_an_epoch_line_holds_the_epoch_and_the_test_after_it(run):
    recorded = lines(run, "epoch")
    assert [(line["epoch"], line["batches"]) for line in recorded] == [(0, 45), (1, 90)]
    assert recorded[1]["train_loss"] < recorded[0]["train_loss"]
    for line in recorded:
        assert line["seconds"] > 0
        assert line["samples_per_second"] == pytest.approx(1437 / line["seconds"])
        assert 0 <= line["test_top5"] <= line["test_error"] <= 100
    (result,) = lines(run, "result")
    assert result["error"] == recorded[1]["test_error"]
    assert lines(run)[-1] == result


def test_the_measured_staleness_is_the_formulas(run):
    formula = [mean_staleness(k, 2, 2) for k in (1, 2)]
    assert lines(run, "train")[-1]["staleness"] == formula
    assert [line["staleness"] for line in lines(run, "epoch")] == [formula, formula]
    (result,) = lines(run, "result")
    assert result["staleness"] == result["staleness_formula"] == formula


def test_tensorboard_reads_the_events_and_they_are_the_metrics(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    assert {"train/loss", "train/error", "train/lr", "test/loss", "test/error"} <= set(events.Tags()["scalars"])
    losses = [(point.step, pytest.approx(point.value, rel=1e-6)) for point in events.Scalars("train/loss")]
    assert losses == [(line["batch"], line["loss"]) for line in lines(run, "train")]
    errors = [pytest.approx(point.value, rel=1e-6) for point in events.Scalars("test/error")]
    assert errors == [line["test_error"] for line in lines(run, "epoch")]


def test_the_model_file_loads_into_the_unsplit_model(run):
    model = models.build("resnet8", shape=(1, 8, 8), classes=10)
    tensors = load_file(run / "model.safetensors")
    fresh = model.state_dict()
    assert set(tensors) == set(fresh)
    model.load_state_dict(tensors)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    changed = [name for name, tensor in fresh.items() if tensor.is_floating_point()]
    assert len(changed) > 10


# ---- what is printed


def test_the_command_prints_a_line_an_epoch_and_the_result(commands, run):
    done = commands["processes"].result()
    recorded = done.stderr.splitlines()
    assert [line.split("  ")[0] for line in recorded] == ["epoch 1/2", "epoch 2/2"], done.stderr
    for line in recorded:
        assert re.search(r"loss \d.*test error .*samples/s.*staleness 1\.00 0\.00", line)
    assert done.stdout.count("\n") == 1
    assert f"test error {lines(run, 'result')[0]['error']:.2f}%" in done.stdout
    assert str(run) in done.stdout


@pytest.mark.slow
def test_json_is_one_object_on_stdout_and_nothing_else(commands, folder):
    done = succeeded(commands["repeated"].result())
    assert done.stderr == ""
    recorded = json.loads(done.stdout)
    assert recorded == {**lines(folder / "repeated", "result")[0], "out": str(folder / "repeated")}
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(("load", "noted"), [(0.4, False), (7.9, True)])
def test_the_demo_notes_other_programs_that_use_the_machine(load, noted, monkeypatch):
    """BP on all cores was 75 times as slow as on one, and ADL then 179 times as fast."""
    monkeypatch.setattr(demo, "cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert bool(demo.busy()) == noted
    assert not noted or "(load 7.9 on 2 cores)" in demo.busy()


@pytest.mark.slow
def test_the_demo_ends_with_one_table_and_the_folder_of_three_runs(tmp_path):
    out = tmp_path / "demo"
    done = succeeded(python("-m", "offbeat", "demo", "--epochs", 1, "--out", out))
    runs = sorted(out.iterdir())
    assert len(runs) == 3
    for path in runs:
        assert (path / "model.safetensors").exists()
        assert lines(path, "result")
    assert done.stdout.splitlines()[-1].endswith(f": offbeat report {out}")
    succeeded(python("-m", "offbeat", "report", out, "--out", tmp_path / "report.html"))
    assert "<h1>3 runs: resnet20 on digits</h1>" in (tmp_path / "report.html").read_text()
    text = done.stdout[done.stdout.index("The same recipe") :]
    assert all(word in text for word in ("error", "samples/s", "x BP", "1 core", "cores", "staleness", "formula"))
    row = re.compile(r"^\W*((?:BP|ADL),.*?) {2,}\W*(\d+\.\d\d)%\W+([\d,]+)\W+(\d+\.\d\d)\W+(\d+\.\d\d)\W+(.*)$", re.M)
    cells = row.findall(text)
    assert [cell[0].partition(",")[0] for cell in cells] == ["BP", "BP", "ADL"], done.stdout
    for _, _, speed, over_one_core, over_all_cores, _ in cells:
        assert min(float(speed.replace(",", "")), float(over_one_core), float(over_all_cores)) > 0
    assert float(cells[0][3]) == 1.0, "BP on one core against itself"
    assert float(cells[1][4]) == 1.0, "BP on all cores against itself"
    staleness = [[float(level) for level in re.findall(r"\d+\.\d\d", cell[5])] for cell in cells]
    assert staleness == [[0, 0], [0, 0], [1, 0, 1, 0]], "measured, then by the formula"
    adl = next(path for path in runs if recipe_of(path)["method"] == "adl")
    assert (recipe_of(adl)["K"], recipe_of(adl)["engine"]) == (2, "processes")
    same = [{**recipe_of(path), "method": 0, "K": 0, "engine": 0, "cuts": 0, "threads_per_stage": 0} for path in runs]
    assert same[0] == same[1] == same[2], "the same recipe"


def test_stages_without_a_message_in_every_iteration_end_their_epochs_together(commands, folder, here, capsys):
    done = commands["uneven"].result()
    assert done.returncode == 0, done.stderr
    here("uneven-simulated", *UNEVEN, "--engine", "simulate", capsys=capsys)
    one, other = (load_file(folder / name / "model.safetensors") for name in ("uneven", "uneven-simulated"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
