"""Scripts under torchrun: checkpoints, resuming, evaluations that fail, and calls that differ between processes."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
import torchrun_script
from preloaded import PYTHON
from processes import ENVIRONMENT, last_line, two_processes
from torchrun_script import build, data, fingerprint, network, resumed, save_at

from offbeat.checkpoint import ls

SCRIPT = Path(torchrun_script.__file__)


def torchrun(folder: Path, *cases: str, nproc: int = 2) -> list[dict]:
    """What each process found in the last case."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(folder), *cases], capture_output=True, text=True, timeout=150, env=ENVIRONMENT, cwd=SCRIPT.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{cases[-1]}-{rank}.json").read_text()) for rank in range(nproc)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Of two processes."""
    folder = tmp_path_factory.mktemp("saved")
    torchrun(folder, "saved", "resumed", "outdated", "failing")
    return folder


def found(folder: Path, case: str) -> list[dict]:
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, str]:
    """The weights of one process without checkpoints, and of one that drains where the other saves."""
    whole, drained = build(2), build(2)
    whole.fit(data, 2)
    for t, (x, y) in enumerate([*data(0), *data(1)]):
        drained.step(x, y)
        if t + 1 == 30:
            drained.drain()
    return {"in-flight": fingerprint(whole.model), "drained": fingerprint(drained.drain())}


def test_checkpoints_of_processes_resume_in_processes_bit_for_bit(checkpoints, uninterrupted):
    assert ls(checkpoints / "in-flight")[0].checkpoint.mode == "in-flight"
    assert ls(checkpoints / "drained")[0].checkpoint.mode == "drained"
    assert found(checkpoints, "resumed") == [uninterrupted] * 2


def test_checkpoints_of_processes_resume_in_one_process_bit_for_bit(checkpoints, uninterrupted):
    assert resumed(checkpoints, 2) == uninterrupted


def test_checkpoints_of_one_process_resume_in_processes(tmp_path, uninterrupted):
    pipe = build(2)
    save_at(pipe, tmp_path / "in-flight", 30, drain=False)
    pipe.save(tmp_path / "drained", drain=True)
    assert torchrun(tmp_path, "resumed") == [uninterrupted] * 2


@pytest.mark.slow
def test_processes_resume_at_another_k_like_one_process(checkpoints):
    expected = resumed(checkpoints, 3)
    assert torchrun(checkpoints, "resumed", nproc=3) == [expected] * 3


def test_a_distributed_checkpoint_of_processes_has_the_whole_model(checkpoints):
    pipe, plain = build(2), network()
    pipe.load(checkpoints / "in-flight")
    loaded = {"model": plain.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on a load without a process group
        dcp.load(loaded, checkpoint_id=checkpoints / "dcp")
    assert fingerprint(plain) == fingerprint(pipe.model)


def test_a_model_that_is_not_the_newest_warns_once(checkpoints):
    assert found(checkpoints, "outdated") == [{"up_to_date": 0, "then": ["ModelOutdated"]}] * 2


def test_training_continues_after_an_evaluation_that_fails(checkpoints):
    first, second = found(checkpoints, "failing")
    assert (first["same"], second["same"]) == (True, True)
    assert first["errors"][0] == "OSError: no more files"
    there = r"UserError: evaluate failed in stage (\d) \((.*)\): correct it there; training can continue"
    assert re.fullmatch(there, second["errors"][0]).groups() == ("1", "OSError: no more files")
    assert first["errors"][1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert re.fullmatch(there, second["errors"][1])[1] == "1"
    assert second["errors"][2:] == ["KeyError: 'accuracy'", "ZeroDivisionError: division by zero"]
    assert [re.fullmatch(there, text).groups() for text in first["errors"][2:]] == [
        ("2", "KeyError: 'accuracy'"),
        ("2", "ZeroDivisionError: division by zero"),
    ]


def test_calls_that_differ_end_in_time_and_are_named_by_file_and_line(tmp_path):
    first, second = torchrun(tmp_path, "mismatch")
    lines = SCRIPT.read_text().splitlines()
    evaluate, drain = (
        next(number for number, line in enumerate(lines, start=1) if text in line)
        for text in ("in one process only", "            pipe.drain()")
    )
    calls = f"stage 1: evaluate (torchrun_script.py:{evaluate}), stage 2: drain (torchrun_script.py:{drain})"
    expected = (
        f"the processes have waited for each other for more than 3 s ({calls}): make the same calls in every process, "
        "or set a longer timeout="
    )
    assert [each["text"] for each in (first, second)] == [expected] * 2
    assert first["error"] == second["error"] == "CallTimeout"
    assert max(first["seconds"], second["seconds"]) < 15


def test_a_shorter_loop_is_named_by_the_process_that_waits(tmp_path):
    first, second = torchrun(tmp_path, "shorter")
    assert first == {}
    assert second["error"] == "StageLost"
    assert re.match(
        r"stage 1 is gone: it has stopped, after step \(torchrun_script.py:\d+\)"
        r".*while stage 2 was in step \(torchrun_script.py:\d+\)",
        second["text"],
    )


ALONE = """
import torch, offbeat
from offbeat.engines import processes

processes.PARTING = 0.5
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 2, cuts=[1], loss=loss, optimizer=torch.optim.SGD)
batches = [(torch.ones(1, 2), torch.ones(1, 2))] * 2
"""
FAILING = """
class Fails:
    def on_evaluate(self, step, result):
        if step.pipe.last:
            raise RuntimeError("mine")

pipe.fit(batches, callbacks=[Fails()], evaluate=batches)
"""
ENDING = """
pipe.step(*batches[0])
if pipe.last:
    pipe.gather()
"""


def test_a_process_that_fails_while_others_wait_together_ends_all_with_its_reason():
    with two_processes(ALONE + FAILING) as started:
        ends = [last_line(process) for process in started]
    assert [process.returncode for process in started] == [1, 1], "not ended by a signal"
    assert ends[0].endswith("StageLost: stage 2 failed: RuntimeError: mine")
    assert ends[1].endswith("RuntimeError: mine")


def test_a_process_that_ends_while_another_waits_for_all_is_named():
    with two_processes(ALONE + ENDING) as started:
        ends = [process.communicate(timeout=90)[1].strip() for process in started]
    assert ends[0] == ""
    assert "(stage 1: ended, after step (<string>:10), stage 2: gather (<string>:12))" in ends[1].splitlines()[-1]


FAILING_LOADER = """
import time

def loader(epoch):
    raise KeyError("label")

try:
    pipe.fit(loader)
except KeyError:
    time.sleep(60)  # lives on
"""


def test_a_loader_that_raises_at_first_stops_the_waiting_process_at_once():
    with two_processes(ALONE + FAILING_LOADER) as started:
        assert last_line(started[1]).endswith("StageLost: stage 1 failed: KeyError: 'label'")


FAILING_LOOP = """
def loader():
    yield batches[0]
    raise KeyError("label")

for batch in loader() if pipe.first else batches:
    pipe.step(*batch)
"""


def test_an_exception_that_ends_a_process_is_the_reason_in_the_others():
    with two_processes(ALONE + FAILING_LOOP) as started:
        ends = [last_line(process) for process in started]
    assert ends[0].endswith("KeyError: 'label'")
    assert ends[1].endswith("StageLost: stage 1 failed: KeyError: 'label'")


LONGER = """
for batch in batches * (2 if pipe.first else 1):
    pipe.step(*batch)
pipe.drain()
"""


def test_a_drain_after_other_numbers_of_batches_is_refused_in_all_processes():
    with two_processes(ALONE + LONGER) as started:
        ends = [last_line(process) for process in started]
    expected = "drain() after 4 batches in the process of stage 1, but after 2 in that of stage 2: call step() equally"
    assert all(expected in end for end in ends)


LOADING = """
import pathlib, tempfile
pipe = offbeat.Pipeline(layers, 2, loss=loss, optimizer=torch.optim.SGD)
alone = offbeat.Pipeline(layers, 2, cuts=[1], loss=loss, optimizer=torch.optim.SGD, engine="simulate")
folder = alone.save(tempfile.mkdtemp())
if pipe.{place}:
    pipe.load(folder)
pipe.step(*batches[0])
"""


@pytest.mark.parametrize(("place", "first", "second"), [("first", "load", "step"), ("last", "step", "load")])
def test_a_load_in_one_process_alone_names_the_calls_of_both(place, first, second):
    with two_processes(ALONE + LOADING.format(place=place)) as started:
        ends = [last_line(process) for process in started]
    lines = {"load": 15, "step": 16}
    calls = f"(stage 1: {first} (<string>:{lines[first]}), stage 2: {second} (<string>:{lines[second]}))"
    for end in ends:
        assert f"CallTimeout: the processes are in different calls {calls}: make the same calls" in end


@pytest.mark.slow
def test_a_process_that_does_something_else_is_named(tmp_path):
    first, second = torchrun(tmp_path, "waiting")
    assert first == {}
    assert second["error"] == "CallTimeout"
    assert "stage 1: none, after step (torchrun_script.py:" in second["text"]
