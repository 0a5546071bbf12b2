"""A recording tells what happened, by one clock, and leaves no mark on the numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON
from processes import ENVIRONMENT, free_ports
from selected import some
from torch import nn

import offbeat as library
from offbeat.core.links import Message
from offbeat.core.links.local import Entrance
from offbeat.engines.streams import Streams
from offbeat.methods import METHODS, named
from offbeat.observe.tracing import (
    BACKWARD,
    DRAIN,
    FORWARD,
    SEND,
    UPDATE,
    WAIT,
    EventRecorder,
    HostWatch,
    TracedLink,
    _idle,
)
from offbeat.pipeline import evaluation

RUN = [
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    "640",
    "--batch-size",
    "16",
    "--epochs",
    "1",
    "-K",
    "2",
    "-M",
    "2",
    "--shape",
    "3,8,8",
    "--threads-per-stage",
    "1",
]
AHEAD = 1000  # seconds by which a clock is changed


def batches(n: int = 30) -> list:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 2, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(n)
    ]


def pipeline(method: library.Method, engine: str = "simulate", K: int = 3) -> library.Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for wide in (2, 4)]
    model = nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))
    K = 1 if method.workers > 1 else K
    return library.Pipeline(
        model,
        K,
        method=method,
        cuts=[1, 2][: K - 1],
        loss=nn.functional.cross_entropy,
        seed=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        sample=batches(1)[0][0],
        engine=Streams(K, torch.device("cpu")) if engine == "streams" else engine,
    )


def train(pipe: library.Pipeline, n: int = 30) -> list[str]:
    losses = [pipe.step(x, y) for x, y in batches(n)]
    pipe.drain()
    return [loss.item().hex() for loss in losses if loss is not None]


def spans(trace: dict, k: int, *kinds: str) -> list[dict]:
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == k and (not kinds or e["cat"] in kinds)]
    assert found == sorted(found, key=lambda event: event["ts"])
    return found


def check_one_after_the_other(trace: dict, K: int) -> None:
    for k in range(1, K + 1):
        for one, two in pairwise(spans(trace, k)):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-3, (one, two)


def check_order_of_messages(trace: dict, slack: float = 0.0) -> None:
    """Nobody has a message before it was sent: upwards, then downwards."""
    for source, target, made, used in ((1, 2, "forward", "forward"), (2, 1, "backward", "backward")):
        done = {e["args"]["batch"]: e["ts"] + e["dur"] for e in spans(trace, source, made)}
        begun = {e["args"]["batch"]: e["ts"] for e in spans(trace, target, used)}
        both = done.keys() & begun.keys()
        assert len(both) > 5
        assert all(done[t] <= begun[t] + slack for t in both)


@pytest.mark.parametrize("engine", ["simulate", "streams"])
def test_a_trace_holds_the_given_number_of_iterations_of_every_full_stage(engine, tmp_path):
    pipe, reported = pipeline(library.ADL(M=2), engine), []
    pipe.trace(8, tmp_path / "trace.json", notify=reported.append)
    start = 4 + 2 * 2
    for t, (x, y) in enumerate(batches()):
        pipe.step(x, y)
        assert (tmp_path / "trace.json").exists() == (t >= start + 7), "written when it is complete, not at the end"
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {k: f"stage {k} of 3" for k in (1, 2, 3)}
    assert min(e["ts"] for e in trace["traceEvents"] if e["ph"] == "X") == 0.0
    for k, lag in ((1, 4), (2, 2), (3, 0)):
        assert [e["name"] for e in spans(trace, k, "forward")] == [f"forward {start + i}" for i in range(8)]
        assert [e["args"]["batch"] for e in spans(trace, k, "backward")] == [start + i - lag for i in range(8)]
        assert [e["args"]["update"] for e in spans(trace, k, "update")] == [(start - lag) // 2 + i for i in range(4)]
        assert len(spans(trace, k, "send")) == {1: 8, 2: 16, 3: 8}[k]
        assert len(spans(trace, k, "wait")) == {1: 16, 2: 16, 3: 8}[k]
        assert spans(trace, k, "drain") == []
    check_one_after_the_other(trace, 3)
    other = trace["otherData"]
    assert {key: other[key] for key in ("K", "M", "method", "turns")} == {"K": 3, "M": 2, "method": "adl", "turns": 8}
    assert other["clock_uncertainty_us"] == [0.0] * 3
    assert all(0 < share < 1 for share in other["idle"])
    shown = " ".join(f"{100 * share:.0f} %" for share in other["idle"])
    assert reported == [f"trace: 8 iterations of 3 stages in {tmp_path / 'trace.json'}; idle {shown}"]


@pytest.mark.parametrize("name", some(METHODS))
def test_no_bit_of_any_method_depends_on_a_trace(name, tmp_path):
    method = named(name)
    plain, traced = (pipeline(method, K=3 if not method.limit or not method.limit(3) else 2) for _ in range(2))
    traced.trace(9, tmp_path / "trace.json")
    assert train(plain, 40) == train(traced, 40) != []  # with M=8 a trace begins at batch 24
    for key, value in plain.model.state_dict().items():
        assert torch.equal(value, traced.model.state_dict()[key]), key
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["turns"] == 9
    check_one_after_the_other(trace, plain.K)
    for k in range(1, plain.K + 1):
        assert {"forward", "backward", "update"} <= {event["cat"] for event in spans(trace, k)}


def test_the_streams_engine_gives_the_same_bits_with_a_trace(tmp_path):
    plain, traced = pipeline(library.ADL(M=2)), pipeline(library.ADL(M=2), "streams")
    traced.trace(9, tmp_path / "trace.json")
    assert train(plain) == train(traced)


def test_micro_batches_are_recorded_with_their_batch(tmp_path):
    pipe = pipeline(library.GPipe(2))
    pipe.trace(3, tmp_path / "trace.json")
    train(pipe, 8)
    forwards = spans(json.loads((tmp_path / "trace.json").read_text()), 2, "forward")
    assert [e["args"] for e in forwards] == [{"batch": t, "micro_batch": i} for t in (2, 3, 4) for i in (0, 1)]


def test_a_drain_ends_a_recording_and_is_its_last_event(tmp_path):
    pipe = pipeline(library.ADL(M=2))
    pipe.trace(100, tmp_path / "trace.json")
    train(pipe, 20)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert (trace["otherData"]["turns"], trace["otherData"]["asked"]) == (12, 100)
    for k in (1, 2, 3):
        assert spans(trace, k)[-1]["cat"] == "drain"
        assert len(spans(trace, k, "forward")) == 12
    assert pipe.tracing is None
    train(pipe, 5)  # nobody looks on any more


def test_a_drain_before_a_recording_makes_it_wait_for_full_stages_again(tmp_path):
    pipe = pipeline(library.ADL(M=2))
    pipe.trace(3, tmp_path / "trace.json")
    train(pipe, 6)
    assert not (tmp_path / "trace.json").exists()
    train(pipe, 20)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [e["args"]["batch"] for e in spans(trace, 1, "forward")] == [14, 15, 16]


def test_a_second_trace_can_follow(tmp_path):
    pipe = pipeline(library.ADL(M=2))
    pipe.trace(4, tmp_path / "one.json")
    with pytest.raises(library.UserError, match="a trace is being recorded"):
        pipe.trace(4, tmp_path / "two.json")
    train(pipe)
    pipe.trace(4, tmp_path / "two.json")
    train(pipe)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert [e["args"]["batch"] for e in spans(one, 1, "forward")] == [8, 9, 10, 11]
    assert [e["args"]["batch"] for e in spans(two, 1, "forward")] == [38, 39, 40, 41]


def test_the_time_of_an_evaluation_is_not_idle_time(tmp_path, monkeypatch):
    """By a clock that every look moves by 1 us, and a batch of an evaluation by 10 ms."""
    now = [0]

    def look() -> int:
        now[0] += 1_000
        return now[0]

    def slow_batches():
        for batch in batches(3):
            now[0] += 10_000_000
            yield batch

    monkeypatch.setattr(HostWatch, "now", staticmethod(look))
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter_ns=look))
    idle = {}
    for evaluates in (False, True):
        pipe = pipeline(library.ADL(M=2))
        pipe.trace(4, tmp_path / "trace.json")
        for t, (x, y) in enumerate(batches(14)):
            pipe.step(x, y)
            if t == 9 and evaluates:
                pipe.evaluate(slow_batches())
        idle[evaluates] = json.loads((tmp_path / "trace.json").read_text())["otherData"]["idle"]
    assert idle[True] == pytest.approx(idle[False], abs=0.01)


def test_a_trace_that_cannot_be_written_is_reported_and_training_continues(tmp_path):
    pipe, reported = pipeline(library.ADL(M=2)), []
    (tmp_path / "trace.json").mkdir()
    pipe.trace(4, tmp_path / "trace.json", notify=reported.append)
    assert train(pipe) == train(pipeline(library.ADL(M=2)))
    assert len(reported) == 1
    assert reported[0].startswith("trace failed (training continues)")


def test_the_idle_share_is_the_time_without_work_of_ones_own():
    rows = torch.tensor(
        [
            (WAIT, 0, 0, 10, 0),
            (FORWARD, 0, 10, 30, 0),
            (SEND, 0, 30, 35, 0),
            (WAIT, 0, 40, 45, 1),
            (BACKWARD, 0, 45, 80, 0),
            (UPDATE, 0, 80, 90, 0),
            (FORWARD, 1, 190, 200, 0),
            (DRAIN, -1, 200, 900, 0),
        ]
    )
    assert _idle(rows, away=100) == pytest.approx(1 - 85 / 100)
    assert _idle(rows, away=0) == pytest.approx(1 - 85 / 200)


def test_each_message_is_noted_once_and_marks_are_not():
    recorder, link = EventRecorder(HostWatch()), Entrance()
    traced = TracedLink(link, recorder)
    for message in (Message(1, kind="save"), Message(3, "x"), Message(4, "y")):
        link.send(message)
    assert [traced.peek().kind, traced.receive().kind] == ["save", "save"]
    assert [traced.peek().t, traced.peek().t, traced.receive().t, traced.receive().t] == [3, 3, 3, 4]
    traced.send(Message(5))
    traced.send(Message(6, kind="epoch"))
    assert Counter((kind, t) for kind, t, *_ in recorder.rows().tolist()) == {(WAIT, 3): 1, (WAIT, 4): 1, (SEND, 5): 1}


def test_the_command_reports_the_trace_in_one_line_and_a_resumed_run_keeps_it(offbeat: Command, tmp_path):
    run = tmp_path / "run"
    small = [*RUN, "--engine", "simulate", "--checkpoint-every", "1e"]
    printed = train_here(offbeat, *small, "--trace", 5, "--out", run)
    assert re.search(r"^trace: 5 iterations of 2 stages in .*trace.json; idle \d+ % \d+ %$", printed, re.MULTILINE), (
        printed
    )
    before = (run / "trace.json").read_bytes()
    train_here(offbeat, "--resume", run, "--epochs", "2", "--json")
    assert (run / "trace.json").read_bytes() == before
    printed = train_here(
        offbeat, *RUN, "--samples", "64", "--engine", "simulate", "--trace", 5, "--out", tmp_path / "short"
    )
    assert "trace: nothing was recorded, since the run ended before the pipeline was full" in printed
    assert not (tmp_path / "short" / "trace.json").exists()


@pytest.mark.slow
def test_processes_have_one_clock_and_the_bits_of_an_untraced_run(offbeat: Command, tmp_path):
    train_here(offbeat, *RUN, "--engine", "simulate", "--json", "--out", tmp_path / "plain")
    run = tmp_path / "run"
    command = [PYTHON, "-m", "offbeat", "train", *RUN, "--trace", "20", "--diagnose", "3", "--out", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert "trace: 20 iterations of 2 stages in" in done.stderr
    assert weights(run) == weights(tmp_path / "plain")
    trace = json.loads((run / "trace.json").read_text())
    check_one_after_the_other(trace, 2)
    check_order_of_messages(trace)
    for k in (1, 2):
        assert len(spans(trace, k, "forward")) == len(spans(trace, k, "backward")) == 20
        assert spans(trace, k, "wait")
        assert spans(trace, k, "send")
    assert trace["otherData"]["clock_uncertainty_us"] == [0.0, 0.0]


@pytest.mark.slow
def test_hosts_whose_clocks_differ_are_brought_to_one(tmp_path):
    elsewhere = ["unshare", "--time", "--monotonic", str(AHEAD), "--fork", "--kill-child"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot give a process a clock of its own")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "offbeat", "train", *RUN, "--json", "--trace", "20", "--out", str(run)]
    surroundings = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    started = [
        subprocess.Popen(
            [*(elsewhere if rank else []), *command],
            env={**surroundings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    trace = json.loads((run / "trace.json").read_text())
    one, other = trace["otherData"]["clock_uncertainty_us"]
    assert one == 0.0
    assert 0 < other < 1e6
    assert max(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X") < AHEAD * 1e6 / 2
    check_order_of_messages(trace, slack=other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "0"], "--trace 0: use an integer of at least 1"),
        (["--trace", "-5"], "--trace -5: use an integer of at least 1"),
        (["--trace", "100001"], "--trace 100001: use at most 100000 local iterations"),
        (["--trace", "many"], "--trace"),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat: Command, arguments, message, tmp_path):
    run = ("train", "--data", "digits", "--model", "resnet8", *arguments, "--dry-run", "--out", tmp_path / "x")
    check_refused(offbeat, run, message)


def test_misuse_of_the_pipeline_is_reported(tmp_path):
    pipe = pipeline(library.ADL(M=2))
    for turns in (0, -1, True, 2.5, 10**6):
        with pytest.raises(library.UserError, match="use a whole number from 1 to 100000"):
            pipe.trace(turns, tmp_path / "trace.json")
    with pytest.raises(library.UserError, match="there is no folder"):
        pipeline(library.ADL(M=2)).trace(5, tmp_path / "nowhere" / "trace.json")
    assert os.listdir(tmp_path) == []
