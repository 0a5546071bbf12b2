"""What is measured of late gradients is what can be computed by hand, and measuring it changes nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON
from processes import ENVIRONMENT, KILLED
from torch import Tensor, nn

import offbeat as library
from offbeat.engines.streams import Streams
from offbeat.methods import METHODS, named
from offbeat.runs.record import Diagnoses

LATE = [name for name in METHODS if named(name).head is None]
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
    "2",
    "-K",
    "2",
    "-M",
    "2",
    "--shape",
    "3,8,8",
    "--threads-per-stage",
    "1",
    "--json",
]
FIELDS = {"stage", "update", "batch", "epoch", "gap", "norm", "gradient", "cosine", "lag", "turn"}
X, Y, LR, STEPS = 0.7, 1.3, 0.05, 12


class Product(nn.Module):
    """b a x: a stage whose gradients depend on its weights, so that they can grow stale."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.b * (self.a * x)


def by_hand(weights: str) -> list[dict[str, float]]:
    """ADL, K=2, M=1 on (c b a x - y)^2 in plain numbers: the first stage is late by 2, the second never."""
    a, b, c = 0.9, 0.4, 1.1
    forwarded: list[tuple[float, float]] = []
    sent: list[float] = []
    reported = []
    for t in range(STEPS + 2):
        if t < STEPS:
            forwarded.append((a, b))
            z = b * a * X
            error = c * z - Y
            sent.append(2 * error * c)
            c -= LR * 2 * error * z
        if t >= 2:
            (old_a, old_b), g = forwarded[t - 2], sent[t - 2]
            stale = {"stash": (old_b, old_a), "hybrid": (b, old_a), "replay": (b, a)}[weights]
            stale = (g * X * stale[0], g * X * stale[1])
            fresh = (g * X * b, g * X * a)
            reported.append(
                {
                    "gap": math.hypot(a - old_a, b - old_b),
                    "norm": math.hypot(a, b),
                    "gradient": math.hypot(*stale),
                    "cosine": (stale[0] * fresh[0] + stale[1] * fresh[1]) / (math.hypot(*stale) * math.hypot(*fresh)),
                    "lag": min(t - 2, 2),
                    "turn": min(t, STEPS - 1),
                    "batch": t - 2,
                    "update": t - 2,
                    "stage": 1,
                }
            )
            a, b = a - LR * stale[0], b - LR * stale[1]
    return reported


def scale(c: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, c)
    return layer


def diagnosed(pipe: library.Pipeline, data: list, every: int = 1) -> dict[int, list[dict[str, Any]]]:
    pipe.diagnose(every)
    for x, y in data:
        pipe.step(x, y)
    pipe.drain()
    return {report.k: report.diagnosis for report in pipe.reports()}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def products(engine: Any, **answers: Any) -> library.Pipeline:
    return library.Pipeline(
        [Product(0.9, 0.4), scale(1.1)],
        method=library.ADL(M=1, **answers),
        loss=mean_square,
        engine=engine,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR),
    )


@pytest.mark.parametrize("engine", ["simulate", "streams"])
@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_gap_and_cosine_are_those_computed_by_hand(weights, engine):
    pipe = products(Streams(2, torch.device("cpu")) if engine == "streams" else engine, weights=weights)
    batch = torch.full((1, 1), X, dtype=torch.float64), torch.full((1, 1), Y, dtype=torch.float64)
    found = diagnosed(pipe, [batch] * STEPS)
    expected = by_hand(weights)
    assert len(found[1]) == len(expected) == STEPS
    for line, wanted in zip(found[1], expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert all(line["gap"] > 0 for line in found[1][1:])
    assert (min(line["cosine"] for line in found[1]) < 1 - 1e-4) == (weights != "replay")
    for line in found[2]:
        assert (line["gap"], line["lag"]) == (0.0, 0)
        assert line["cosine"] == pytest.approx(1, abs=1e-12)


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for wide in (2, 4)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(4, 3)]
    return nn.Sequential(*blocks, nn.Sequential(*end))


def batches(n: int = 24) -> list:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 2, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(n)
    ]


def pipeline(method: library.Method, engine: str = "simulate", model: nn.Module | None = None, **options: Any):
    K = 1 if method.workers > 1 else 3
    return library.Pipeline(
        model or network(),
        K,
        method=method,
        cuts=[1, 2][: K - 1],
        loss=nn.functional.cross_entropy,
        seed=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        engine=Streams(K, torch.device("cpu")) if engine == "streams" else engine,
        **options,
    )


def check_unchanged(make: Any, every: int = 2) -> dict[int, list[dict[str, Any]]]:
    """Losses, weights, statistics and random numbers are those of a run that nobody looks at; what was found."""
    plain, looked_at = make(), make()
    looked_at.diagnose(every)
    lines: dict[int, list[dict[str, Any]]] = {}
    for t, (x, y) in enumerate(batches()):
        outside = torch.get_rng_state()
        assert torch.equal(plain.step(x.clone(), y), looked_at.step(x.clone(), y))
        assert torch.equal(torch.get_rng_state(), outside)
        if t == 11:
            plain.drain()
            looked_at.drain()
    plain.drain()
    looked_at.drain()
    for report in looked_at.reports():
        lines[report.k] = report.diagnosis
    for one, other in ((plain.model, looked_at.model), *zip(plain.parts, looked_at.parts, strict=True)):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    for k, stage in plain.stages.items():
        assert all(map(torch.equal, stage.network.random.state, looked_at.stages[k].network.random.state))
        assert stage.staleness == looked_at.stages[k].staleness
        assert lines[k], "something was measured"
    return lines


@pytest.mark.parametrize("name", some(LATE))
def test_no_bit_of_any_late_method_depends_on_a_diagnosis(name):
    method = named(name)
    lines = check_unchanged(lambda: pipeline(method, model=network(dropout=0.3)))
    for k, reported in lines.items():
        assert [line["update"] % 2 for line in reported] == [1] * len(reported)
        assert max(line["lag"] for line in reported) >= math.floor(method.staleness(k, len(lines)))
        for line in reported:
            assert 0 < line["norm"] < math.inf
            assert -1.000001 < line["cosine"] < 1.000001
            if line["lag"] == 0 and not method.correctors:
                assert line["gap"] == 0.0
                assert line["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_streams_engine_measures_what_simulate_does_and_changes_as_little(weights, precision):
    method = library.ADL(M=2, weights=weights)
    found = [
        check_unchanged(lambda engine=engine: pipeline(method, engine, precision=precision))
        for engine in ("simulate", "streams")
    ]
    assert found[0] == found[1]
    assert any(line["gap"] > 0 for line in found[0][1])


@pytest.mark.parametrize("corrector", ["sc", "lwp+sc", "dc"])
def test_diagnosis_calls_correctors_no_more_often(corrector):
    check_unchanged(lambda: pipeline(library.ADL(M=2, corrector=corrector)))


class Centred(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).mul_(3.0)


def test_a_network_that_changes_its_input_is_measured_on_what_it_was_given():
    def make() -> library.Pipeline:
        plain = network()
        return pipeline(library.ADL(M=2), model=nn.Sequential(nn.Sequential(Centred(), plain[0]), *plain[1:]))

    lines = check_unchanged(make, every=1)
    shifted = nn.Sequential(*network())
    pipe = pipeline(library.ADL(M=2), model=shifted)
    found = diagnosed(pipe, [((x - 0.5) * 3.0, y) for x, y in batches(12)])
    for one, other in zip(lines[1], found[1][:-1], strict=False):
        assert one["gradient"] == pytest.approx(other["gradient"], rel=1e-4)


def test_micro_batches_are_never_late():
    lines = check_unchanged(lambda: pipeline(library.GPipe(2)), every=5)
    for reported in lines.values():
        assert [(line["batch"], line["gap"], line["lag"]) for line in reported] == [(t, 0.0, 0) for t in (4, 9, 14, 19)]
        assert all(line["cosine"] == pytest.approx(1, abs=1e-6) for line in reported)


def test_a_batch_that_is_skipped_is_not_measured():
    pipe = pipeline(library.ADL(M=1), on_nan="skip", left_out=(3,))
    data = batches(10)
    data[6] = (data[6][0] * math.nan, data[6][1])
    found = diagnosed(pipe, data)
    assert [line["batch"] for line in found[3]] == [0, 1, 2, 4, 5, 7, 8, 9]
    assert all(line["cosine"] is not None for reported in found.values() for line in reported)


# ---- the run folder


def lines_of(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "diagnosis.jsonl").read_text().splitlines()]
    assert all(set(line) == FIELDS for line in found)
    return sorted(found, key=lambda line: (line["stage"], line["batch"]))


@pytest.mark.slow
def test_processes_write_the_lines_of_the_simulator_and_the_bits_of_a_plain_run(offbeat: Command, tmp_path):
    train_here(offbeat, *RUN, "--engine", "simulate", "--out", tmp_path / "plain")
    train_here(offbeat, *RUN, "--engine", "simulate", "--diagnose", 3, "--out", tmp_path / "simulate")
    command = [PYTHON, "-m", "offbeat", "train", *RUN, "--diagnose", "3", "--out", str(tmp_path / "processes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "plain") == weights(tmp_path / "simulate") == weights(tmp_path / "processes")
    assert not (tmp_path / "plain" / "diagnosis.jsonl").exists()
    found = lines_of(tmp_path / "simulate")
    assert found == lines_of(tmp_path / "processes")
    assert [(line["stage"], line["update"]) for line in found] == [(k, s) for k in (1, 2) for s in range(2, 40, 3)]
    assert [line["epoch"] for line in found] == [line["batch"] // 40 for line in found]
    assert {line["epoch"] for line in found} == {0, 1}
    assert all(line["batch"] == 2 * line["update"] for line in found)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "policy"), [("7b", "stash"), ("9b", "hybrid")])
def test_a_resumed_run_has_every_line_once(every, policy, offbeat: Command, tmp_path):
    small = [*RUN, "--engine", "simulate", "--diagnose", "1", "--checkpoint-every", every, "--weights", policy]
    train_here(offbeat, *small, "--out", tmp_path / "whole")
    command = [PYTHON, "-c", KILLED, "41", "train", *small, "--out", str(tmp_path / "broken")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with (tmp_path / "broken" / "diagnosis.jsonl").open("a") as file:
        file.write('{"stage": 1, "upd')  # killed while writing
    train_here(offbeat, "--resume", tmp_path / "broken", "--json")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert lines_of(tmp_path / "broken") == lines_of(tmp_path / "whole")


def test_lines_after_the_batch_at_which_a_run_resumes_are_removed(tmp_path):
    first = Diagnoses(tmp_path, 0)
    first.add([{"stage": k, "batch": t, "turn": t + 2 * (k == 1)} for t in range(6) for k in (1, 2)])
    second = Diagnoses(tmp_path, 4)
    left = [json.loads(line) for line in (tmp_path / "diagnosis.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["batch"]) for line in left] == [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2), (2, 3)]
    second.add([{"stage": 2, "batch": 3, "turn": 3}, {"stage": 2, "batch": 4, "turn": 4}])
    assert (tmp_path / "diagnosis.jsonl").read_text().count("\n") == 7
    assert os.listdir(tmp_path) == ["diagnosis.jsonl"]


# ---- misuse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diagnose", "0"], "--diagnose 0: use an integer of at least 1"),
        (["--diagnose", "-1"], "--diagnose -1: use an integer of at least 1"),
        (["--diagnose", "often"], "--diagnose"),
        (["--diagnose", "5", "--method", "dgl", "-K", "2"], "diagnose with dgl, whose stages learn from heads"),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat: Command, arguments, message, tmp_path):
    run = ("train", "--data", "digits", "--model", "resnet8", *arguments, "--dry-run", "--out", tmp_path / "x")
    check_refused(offbeat, run, message)


def test_misuse_of_the_pipeline_is_reported():
    for every in (0, -1, True, 2.5):
        with pytest.raises(library.UserError, match="use a whole number from 1 up"):
            pipeline(library.ADL(M=2)).diagnose(every)
    with pytest.raises(library.UserError, match="have no late gradients"):
        pipeline(library.DNI(), sample=batches(1)[0][0]).diagnose(3)
