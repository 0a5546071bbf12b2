"""Runs that end badly: a worker or the launcher dies, Ctrl-C, a loss that is not finite, a stage that raises.

Always one line that names the cause, the run folder kept, nobody waiting, no process left behind. The scenarios are
independent; a few go at once, and each test looks at how its own ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from preloaded import PYTHON
from processes import (
    ENDLESS,
    ENVIRONMENT,
    START,
    STOP,
    Ended,
    Run,
    check_stopped,
    free_ports,
    listeners,
    processes_of,
    wait_for,
)

from offbeat import cli
from offbeat.runs import launch

AT_ONCE = 2
DEATHS = ((signal.SIGKILL, 7, 100), (signal.SIGKILL, 5, 130), (signal.SIGTERM, 6, 101))  # (signal, process, time)

# ---- what goes wrong


def kill_worker(out: Path, stage: int) -> Ended:
    run = Run(out, *ENDLESS, "-K", 2, "--json")
    run.begin()
    os.kill(run.worker(stage - 1), signal.SIGKILL)
    return run.end()


def kill_launcher(out: Path) -> Ended:
    run = Run(out, *ENDLESS, "-K", 2, "--json")
    run.begin()
    assert len(processes_of(out)) == 3
    run.process.kill()
    return run.end()


def kill_launcher_at_once(out: Path) -> Ended:
    """While its workers have barely started, before they can have looked who their parent is."""
    run = Run(out, *ENDLESS, "-K", 2, "--json")
    assert wait_for(lambda: len(processes_of(out)) == 3, START, every=0.005)
    run.process.kill()
    wait_for(lambda: not processes_of(out), STOP)  # what is being imported may be imported to the end
    return run.end()


def interrupt(out: Path, K: int) -> tuple[Ended, dict[str, set[str]]]:
    """How it ends, and on which addresses it listened before; an interface that is set for several machines, and is not
    there today, must not matter."""
    run = Run(out, *ENDLESS, "-K", K, "--json", GLOO_SOCKET_IFNAME="offbeat0")
    run.begin()
    pids = set(processes_of(run.out))
    assert len(pids) == (K + 1 if K > 1 else 1)
    found = listeners(pids)
    os.killpg(run.process.pid, signal.SIGINT)
    return run.end(), found


def diverge(out: Path) -> Ended:
    arguments = ("--data", "synthetic", "--model", "mlp", "-M", "1", "-K", 2, "--lr", "1e38", "--warmup", "0", "--json")
    run = Run(out, *arguments, "--cuts", "1")
    wait_for(lambda: run.process.poll() is not None, START)
    return run.end()


def diverge_in_group(out: Path) -> list[subprocess.CompletedProcess]:
    """The command in two processes that it did not start itself, as under torchrun."""
    arguments = ("--data", "synthetic", "--model", "mlp", "-M", "1", "-K", "2", "--lr", "1e38", "--warmup", "0")
    command = [PYTHON, "-m", "offbeat", "train", *arguments, "--json", "--out", str(out)]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}

    def member(rank: int) -> subprocess.CompletedProcess:
        surroundings = {**ENVIRONMENT, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.run(command, capture_output=True, text=True, timeout=START, check=False, env=surroundings)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, range(2)))


# ---- a library script in two processes, as torchrun starts them: each ends by itself, with its own last line

SCRIPT = '''
import os, signal, sys, time

import torch
import torch._dynamo  # which optimizers import, here once for all cases
from torch import nn

import offbeat
import offbeat.pipeline


class Trap(nn.Module):
    """Passes everything on; springs at batch 5."""

    def __init__(self, spring=None):
        super().__init__()
        self.spring, self.batches = spring, 0

    def forward(self, x):
        self.batches += 1
        if self.batches == 6 and self.spring and self.training:
            self.spring()
        return x


def apples():
    raise ArithmeticError("seven apples")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def batches(case):
    for t in range(50):
        if t == 5 and case == "loader":
            raise OSError("a page is torn")
        if t == 5 and case == "leaves":
            return
        yield torch.ones(3, 7 if t == 5 and case.startswith("shape") else 6), torch.zeros(3, 4)


def run(case, rank):
    springs = {"raises 1": (apples, None), "raises 2": (None, apples), "dies 1": (die, None), "dies 2": (None, die)}
    below, above = springs.get(case, (None, None))
    first = nn.Linear(6, 6) if case == "shape 1" else nn.PReLU()
    model = nn.Sequential(nn.Sequential(first, Trap(below)), nn.Sequential(Trap(above), nn.Linear(6, 4)))
    pipe = offbeat.Pipeline(model, 2, method="adl", M=2, cuts=[1], loss=nn.functional.mse_loss,
                            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    if case == "loader":
        pipe.fit(batches(case))
    elif rank == 0:
        for x, y in batches(case):
            pipe.step(x, y)
    else:
        for _ in range(50):
            pipe.step()


def main(out, rank, cases):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    for case, port in cases.items():
        if not (child := os.fork()):  # what was imported is imported in every case
            os.environ["MASTER_PORT"] = str(port)
            os.dup2(os.open(f"{out}/{case}-{rank}.stderr", os.O_CREAT | os.O_WRONLY), 2)
            return run(case, rank)
        deadline = time.monotonic() + 90
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        hung = not ended[0]
        if hung:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        code = "hung" if hung else os.waitstatus_to_exitcode(ended[1])
        print(case, code, time.time(), sep=":", flush=True)


main(sys.argv[1], int(sys.argv[2]), {case: port for case, port in zip(sys.argv[3::2], sys.argv[4::2])})
'''
CASES = ("raises 1", "raises 2", "shape 1", "shape 2", "dies 1", "dies 2", "loader", "leaves")


@dataclass(frozen=True)
class Last:
    code: str
    time: float
    stderr: str

    @property
    def line(self) -> str:
        """Without the rank that torch puts before every line of an uncaught exception."""
        return self.stderr.strip().splitlines()[-1].split("]: ")[-1] if self.stderr.strip() else ""


def script(out: Path) -> dict[str, tuple[Last, Last]]:
    """How each process of each case ended."""
    out.mkdir()
    file = out / "script.py"
    file.write_text(SCRIPT)
    cases = [part for pair in zip(CASES, map(str, free_ports(len(CASES)))) for part in pair]
    started = [
        subprocess.Popen(
            [PYTHON, str(file), str(out), str(rank), *cases], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        for rank in range(2)
    ]
    reported = [process.communicate(timeout=START + 100 * len(CASES))[0] for process in started]
    ended: dict[str, list[Last]] = {case: [] for case in CASES}
    for rank, text in enumerate(reported):
        for line in text.splitlines():
            case, code, when = line.split(":")
            ended[case].append(Last(code, float(when), (out / f"{case}-{rank}.stderr").read_text()))
    return {case: (first, second) for case, (first, second) in ended.items()}


def when_asked(scenario, *given) -> SimpleNamespace:
    """One that only slow tests look at."""
    return SimpleNamespace(result=cache(partial(scenario, *given)))


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> Iterator[dict[str, Future | SimpleNamespace]]:
    folder = tmp_path_factory.mktemp("failures")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            "worker 2": pool.submit(kill_worker, folder / "worker-2", 2),
            "launcher": pool.submit(kill_launcher, folder / "launcher"),
            "launcher at once": when_asked(kill_launcher_at_once, folder / "launcher-at-once"),
            "Ctrl-C, K=2": pool.submit(interrupt, folder / "interrupt-2", 2),
            "Ctrl-C, K=1": when_asked(interrupt, folder / "interrupt-1", 1),
            "diverge": when_asked(diverge, folder / "diverge"),
            "diverge in a group": pool.submit(diverge_in_group, folder / "group"),
            "script": pool.submit(script, folder / "script"),
        }


# ---- the command


def test_a_killed_worker_ends_the_run_in_a_line_that_names_its_stage(scenarios):
    check_stopped(scenarios["worker 2"].result(), "stage 2", "SIGKILL")


@pytest.mark.slow
def test_a_killed_first_worker_ends_the_run_too(tmp_path):
    check_stopped(kill_worker(tmp_path / "run", 1), "stage 1", "SIGKILL")


def test_workers_do_not_outlive_their_launcher(scenarios):
    ended = scenarios["launcher"].result()
    assert ended.left == {}
    assert ended.code == -signal.SIGKILL


@pytest.mark.slow
def test_workers_do_not_outlive_a_launcher_that_dies_while_they_start(scenarios):
    assert scenarios["launcher at once"].result().left == {}


@pytest.mark.parametrize("K", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_stops_cleanly_and_keeps_the_records(scenarios, K):
    ended, _ = scenarios[f"Ctrl-C, K={K}"].result()
    check_stopped(ended, "Ctrl-C", code=130, kind="interrupted")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's socket tables")
def test_a_run_on_one_machine_listens_on_the_loopback_address_alone(scenarios):
    _, found = scenarios["Ctrl-C, K=2"].result()
    assert found["tcp"] == {"127.0.0.1"}  # the store and the links
    assert found["tcp6"] <= {"::1"}


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_batch_and_stage_in_two_processes(scenarios):
    check_stopped(scenarios["diverge"].result(), "batch", "stage 2 of 2", "learning rate")


def test_a_loss_that_is_not_finite_under_torchrun_is_reported_by_every_process(scenarios):
    members = scenarios["diverge in a group"].result()
    for done in members:
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "uneven cuts" not in line]
        assert line.startswith("offbeat: ")
        assert "batch" in line
        assert "stage 2 of 2" in line
    out = Path(members[0].args[-1])
    assert (out / "config.json").exists()
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "failed"
    assert "stage 2 of 2" in last["reason"]


@pytest.mark.parametrize("how", [("-K", "1"), ("-K", "3", "--engine", "simulate")])
def test_a_loss_that_is_not_finite_names_batch_and_stage_in_one_process(monkeypatch, capsys, tmp_path, how):
    arguments = ("--data", "synthetic", "--samples", "640", "--model", "mlp", "-M", "1", "--lr=1e38", "--warmup", "0")
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["offbeat", "train", *arguments, *how, "--out", str(out), "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ended = Ended(exit.value.code, 0.0, printed.out, printed.err, lines, {}, out)
    check_stopped(ended, "batch", f"stage {how[1]} of {how[1]}", "learning rate")


# ---- the library


def check_told(scenarios: dict[str, Future], case: str, *, failing: int, reason: str) -> tuple[Last, Last]:
    """Both end by themselves, soon after each other; the other one's last line names the stage and the reason."""
    both = scenarios["script"].result()[case]
    culprit, other = both[failing - 1], both[2 - failing]
    assert "hung" not in (culprit.code, other.code), both
    assert abs(culprit.time - other.time) < STOP
    assert int(other.code) > 0
    assert f"stage {failing}" in other.line
    assert "StageLost" in other.line
    assert reason in other.line
    return culprit, other


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_raises_stops_the_other_process_with_the_reason(scenarios, stage):
    culprit, _ = check_told(scenarios, f"raises {stage}", failing=stage, reason="seven apples")
    assert culprit.line == "ArithmeticError: seven apples"
    assert int(culprit.code) > 0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_batch_that_a_stage_cannot_take_is_named_with_its_shape_in_both_processes(scenarios, stage):
    culprit, other = check_told(scenarios, f"shape {stage}", failing=stage, reason="(3, 7)")
    for last in (culprit, other):
        assert f"stage {stage} cannot take batch 5" in last.line
    assert "UserError" in culprit.line
    assert int(culprit.code) > 0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_whose_process_dies_is_named_by_the_other(scenarios, stage):
    culprit, _ = check_told(scenarios, f"dies {stage}", failing=stage, reason="died")
    assert int(culprit.code) == -signal.SIGKILL


def test_a_loader_that_raises_stops_the_other_process_with_the_reason(scenarios):
    culprit, _ = check_told(scenarios, "loader", failing=1, reason="a page is torn")
    assert culprit.line == "OSError: a page is torn"


def test_a_process_that_leaves_early_is_named_by_the_other(scenarios):
    check_told(scenarios, "leaves", failing=1, reason="stopped")


def test_the_worker_that_died_first_is_named_not_one_that_was_killed_later(tmp_path):
    died, killed, stopped = (SimpleNamespace(exitcode=-code, pid=pid, timestamp=t) for code, pid, t in DEATHS)
    failure = launch.failure_of(str(tmp_path), {0: killed, 1: stopped, 2: died}, 2, 2)
    assert failure.line == "stage 1 of replica 1 has died (SIGKILL, process 7)"
