"""One function chooses the engine; an engine answers for itself how its stages are made and run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from captured import capture
from torch import nn

import offbeat
from offbeat.core.stage import Stage
from offbeat.engines.choose import choose_engine
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import UserError
from offbeat.graphs.recorded_stage import RecordedStage

CPU = torch.device("cpu")
PACKAGE = Path(offbeat.__file__).parent
CLASSES = {"Simulate", "Processes", "Streams", "RecordedStage"}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline(**options) -> offbeat.Pipeline:
    torch.manual_seed(0)
    given = {"method": offbeat.ADL(M=2), "loss": nn.functional.mse_loss, "optimizer": sgd, **options}
    return offbeat.Pipeline([nn.Linear(3, 4), nn.Linear(4, 2)], **given)


def test_without_a_name_one_process_on_a_cpu_simulates():
    engine = choose_engine(None, 2, method=offbeat.ADL(), device=CPU)
    assert type(engine) is Simulate
    assert list(engine.here) == [1, 2]


def test_without_a_name_a_process_of_a_group_takes_one_stage(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="2 stages but 3 processes"):
        choose_engine(None, 2, method=offbeat.ADL(), device=CPU)


def test_silence_reaches_the_engine_of_a_group(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="silence=-3: use a number of seconds above 0"):
        choose_engine("processes", 1, method=offbeat.ADL(), device=CPU, silence=-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream", "unknown engine 'stream': did you mean 'streams'"),
        ("streams", "engine='streams' on device 'cpu': .* use device='cuda', or engine='simulate' or 'processes'"),
        ("processes", "2 stages but 1 process: .*torchrun --nproc-per-node 2"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as refused:
        choose_engine(name, 2, method=offbeat.ADL(), device=CPU)
    assert "\n" not in str(refused.value)


def test_nobody_outside_of_engines_asks_which_engine_or_stage_it_has():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("engines", "graphs"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not names & CLASSES, f"{path.name}:{node.lineno}"
        if path.parent.name == "pipeline" or path.name == "train.py":
            assert not any(f"import {name}" in path.read_text() for name in CLASSES), path


def test_an_engine_of_another_device_or_number_of_stages_is_refused():
    with pytest.raises(UserError, match="device 'cuda', but an engine on cpu"):
        pipeline(engine=Streams(2, CPU), device="cuda")
    with pytest.raises(UserError, match="K=2, but an engine for 3 stages"):
        pipeline(engine=Simulate(3))


def test_the_pipeline_computes_on_the_device_of_its_engine():
    assert pipeline(engine=Streams(2, CPU)).device == CPU
    assert pipeline(engine=Simulate(2), device="cpu").device == CPU


def test_each_engine_executes_operations_in_its_own_way():
    kinds = {}
    for name, engine in {"simulate": Simulate(2), "streams": Streams(2, CPU)}.items():
        kinds[name] = {type(worker.executor) for worker in pipeline(engine=engine).workers}
    assert kinds == {"simulate": {Stage}, "streams": {RecordedStage}}
    irregular = pipeline(method="gpipe", engine=Streams(2, CPU))  # its iterations are not alike
    assert {type(worker.executor) for worker in irregular.workers} == {Stage}


def test_an_engine_defers_where_work_waits_to_be_launched_with_that_of_others(monkeypatch):
    assert not pipeline(engine=Simulate(2)).engine.defers
    assert not pipeline(engine=Streams(2, CPU)).engine.defers  # without a GPU a recording is the work itself
    capture(monkeypatch)
    assert pipeline(engine=Streams(2, CPU)).engine.defers
    assert not pipeline(engine=Streams(2, CPU), method="gpipe").engine.defers


@pytest.mark.parametrize("deferring", [False, True])
def test_the_loss_of_a_step_stays_as_it_is_when_later_steps_are_done(monkeypatch, deferring):
    if deferring:
        capture(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)) for _ in range(12)]
    expected, found = pipeline(), pipeline(engine=Streams(2, CPU))
    at_once = [float(expected.step(*batch)) for batch in batches]
    losses = [found.step(*batch) for batch in batches]
    assert [float(loss) for loss in losses] == at_once
