"""What is measured of late gradients is what can be computed by hand, and measuring it changes nothing."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON
from processes import ENVIRONMENT, KILLED
from selected import some
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
FIELDS = {
    *("stage", "update", "batch", "epoch", "gap", "norm", "gradient", "cosine", "lag", "turn"),
    *("predicted_change", "fresh_change"),
}
X, Y, LR, STEPS = 0.7, 1.3, 0.05, 12


class Product(nn.Module):
    """b a x: a stage whose gradients depend on its weights, so that they can grow stale."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.b * (self.a * x)


def inputs() -> list[float]:
    return [X + 0.1 * math.sin(t) for t in range(STEPS)]


def dot(one: tuple[float, float], other: tuple[float, float]) -> float:
    return one[0] * other[0] + one[1] * other[1]


def by_hand(weights: str, M: int, momentum: float) -> list[dict[str, float]]:
    """ADL, K=2 on (c b a x - y)^2 in plain numbers: the first stage is late by 2 batches, the second never."""
    a, b, c, s = 0.9, 0.4, 1.1, 0
    velocity, velocity_c = (0.0, 0.0), 0.0
    forwarded: list[tuple[float, float, int]] = []
    sent: list[float] = []
    window: list[tuple[tuple[float, float], tuple[float, float]]] = []
    window_c: list[float] = []
    reported: list[dict[str, float]] = []
    for t in range(STEPS + 2):
        if t < STEPS:
            forwarded.append((a, b, s))
            z = b * a * inputs()[t]
            error = c * z - Y
            sent.append(2 * error * c)
            window_c.append(2 * error * z)
            if len(window_c) == M:
                velocity_c = momentum * velocity_c + sum(window_c) / M
                c -= LR * velocity_c
                window_c = []
        if t >= 2:
            (old_a, old_b, old_s), g, x = forwarded[t - 2], sent[t - 2], inputs()[t - 2]
            stale = {"stash": (old_b, old_a), "hybrid": (b, old_a), "replay": (b, a)}[weights]
            stale = (g * x * stale[0], g * x * stale[1])
            fresh = (g * x * b, g * x * a)
            if not window:
                line = {
                    "gap": math.hypot(a - old_a, b - old_b),
                    "norm": math.hypot(a, b),
                    "gradient": math.hypot(*stale),
                    "cosine": dot(stale, fresh) / (math.hypot(*stale) * math.hypot(*fresh)),
                    "lag": s - old_s,
                    "turn": min(t, STEPS - 1),
                    "batch": t - 2,
                    "update": s,
                    "stage": 1,
                }
            window.append((stale, fresh))
            if len(window) == M:
                late, now = (tuple(sum(part) / M for part in zip(*each, strict=True)) for each in zip(*window))
                velocity = (momentum * velocity[0] + late[0], momentum * velocity[1] + late[1])
                delta = (-LR * velocity[0], -LR * velocity[1])
                reported.append({**line, "predicted_change": dot(late, delta), "fresh_change": dot(now, delta)})
                a, b, s, window = a + delta[0], b + delta[1], s + 1, []
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


def products(engine: Any, *, M: int = 1, momentum: float = 0.0, **answers: Any) -> library.Pipeline:
    return library.Pipeline(
        [Product(0.9, 0.4), scale(1.1)],
        method=library.ADL(M=M, **answers),
        loss=mean_square,
        engine=engine,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=momentum),
    )


@pytest.mark.parametrize("engine", ["simulate", "streams"])
@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize(("M", "momentum"), [(1, 0.0), (3, 0.9)])
def test_every_figure_is_the_one_computed_by_hand(weights, engine, M, momentum):
    engine = Streams(2, torch.device("cpu")) if engine == "streams" else engine
    pipe = products(engine, M=M, momentum=momentum, weights=weights)
    y = torch.full((1, 1), Y, dtype=torch.float64)
    found = diagnosed(pipe, [(torch.full((1, 1), x, dtype=torch.float64), y) for x in inputs()])
    expected = by_hand(weights, M, momentum)
    assert len(found[1]) == len(expected) == STEPS // M
    for line, wanted in zip(found[1], expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert any(line["gap"] > 0 for line in found[1])
    late = weights != "replay"
    assert (min(line["cosine"] for line in found[1]) < 1 - 1e-4) == late
    assert any(abs(line["fresh_change"] / line["predicted_change"] - 1) > 1e-3 for line in found[1]) == late
    for line in found[2]:
        assert (line["gap"], line["lag"]) == (0.0, 0)
        assert line["cosine"] == pytest.approx(1, abs=1e-12)
        assert line["fresh_change"] == pytest.approx(line["predicted_change"], rel=1e-12)


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
        **{"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), **options},
        engine=Streams(K, torch.device("cpu")) if engine == "streams" else engine,
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
            assert math.isfinite(line["predicted_change"])
            assert math.isfinite(line["fresh_change"])


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


def doubles(n: int) -> list:
    return [(x.double(), y) for x, y in batches(n)]


@pytest.mark.parametrize("name", ["bp", "gpipe"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: library.optim.Muon(p, lr=0.01),
    ],
    ids=["sgd", "adamw", "muon"],
)
def test_without_staleness_every_stage_gets_what_it_predicts(name, optimizer):
    method = library.BP(M=3) if name == "bp" else library.GPipe(2)
    pipe = pipeline(method, model=network().double(), optimizer=optimizer, clip_norm=0.1)
    for reported in diagnosed(pipe, doubles(12)).values():
        assert len(reported) == 12 // method.M
        for line in reported:
            assert line["predicted_change"] != 0
            assert line["fresh_change"] == pytest.approx(line["predicted_change"], rel=1e-9)


def test_batches_count_in_the_change_of_the_loss_as_in_the_mean_of_the_window():
    pipe = pipeline(library.ADL(M=3), model=network().double(), left_out=(4,), weighting="samples")
    data = doubles(14)  # the last window is not full
    data[7] = (data[7][0][:2], data[7][1][:2])
    found = diagnosed(pipe, data)
    assert [line["batch"] for line in found[3]] == [0, 3, 6, 9, 12]
    for line in found[3]:  # which is never late
        assert line["fresh_change"] == pytest.approx(line["predicted_change"], rel=1e-9)
    assert any(abs(line["fresh_change"] / line["predicted_change"] - 1) > 1e-3 for line in found[1])


def resumed(method: library.Method, data: list, at: int) -> tuple[dict[int, Any], dict[int, Any]]:
    """The lines of a training that stops after some batches, and of another that continues with its state."""
    first, second = pipeline(method), pipeline(method)
    first.diagnose(1)
    first.keep()
    for x, y in data[:at]:
        first.step(x, y)
    saved = first.stage_states()
    before = {report.k: report.diagnosis for report in first.reports()}
    second.diagnose(1)
    second.load_stage_states(saved, batches=at)
    for x, y in data[at:]:
        second.step(x, y)
    second.drain()
    return before, {report.k: report.diagnosis for report in second.reports()}


@pytest.mark.parametrize("weights", ["stash", "hybrid"])
def test_a_state_saved_within_a_window_continues_its_measurement(weights):
    method, data = library.ADL(M=4, weights=weights), batches(20)
    whole = diagnosed(pipeline(method), data)
    before, after = resumed(method, data, 10)
    for k, lines in whole.items():
        assert after[k] == lines  # with those that the saved state had not reported yet
        assert before[k] == lines[: len(before[k])]


def test_a_replay_is_not_measured_where_the_weights_of_a_forward_were_not_saved():
    """Batches 6 to 9 are in flight in stage 1, and 8 and 9 in stage 2: their windows begin with batches 4 and 8."""
    method, data = library.ADL(M=4, weights="replay"), batches(20)
    whole = diagnosed(pipeline(method), data)
    _, after = resumed(method, data, 10)
    assert {line["batch"] for lines in whole.values() for line in lines} == {0, 4, 8, 12, 16}
    unknown = {"predicted_change": None, "fresh_change": None}
    assert after[1] == [line | (unknown if line["batch"] == 4 else {}) for line in whole[1] if line["batch"] != 8]
    assert after[2] == [line for line in whole[2] if line["batch"] != 8]
    assert after[3] == whole[3]


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


def test_the_summary_has_the_share_of_each_stage_also_in_a_resumed_run(tmp_path):
    first = Diagnoses(tmp_path, 0)
    assert first.summary() is None
    first.add([{"stage": 1, "batch": 0, "turn": 0}])  # of an earlier version
    assert first.summary() is None
    changes = {1: (-0.5, -0.25), 2: (-0.5, 0.125), 3: (0.5, 0.5)}
    first.add(
        [
            {"stage": k, "batch": t, "turn": t, "predicted_change": predicted, "fresh_change": fresh}
            for k, (predicted, fresh) in changes.items()
            for t in (1, 2)
        ]
    )
    first.add([{"stage": 1, "batch": 3, "turn": 3, "predicted_change": None, "fresh_change": None}])
    expected = "diagnosis: share of the predicted decrease of the loss that stages 1 to 3 get: 50 %, -25 %, -"
    assert first.summary() == Diagnoses(tmp_path, 2).summary() == expected


def test_updates_of_a_synchronous_start_do_not_count_in_the_share(tmp_path):
    """They did, with all that they predict: a stage that gets half of what it predicts had 75 %."""
    measured = [(0, -4.0, -4.0), (0, -2.0, -2.0), (2, -3.0, -1.0), (0, -1.0, -1.0), (2, -2.0, -1.0)]
    diagnoses = Diagnoses(tmp_path, 0)
    for t, (lag, predicted, fresh) in enumerate(measured):
        both = [{"stage": 1, "lag": lag, "fresh_change": fresh}, {"stage": 2, "lag": 0, "fresh_change": predicted}]
        diagnoses.add([{**line, "batch": t, "turn": t, "predicted_change": predicted} for line in both])
    for each in (diagnoses, Diagnoses(tmp_path, 9)):
        summary = each.summary()
        assert summary is not None
        assert summary.endswith("stages 1 to 2 get: 50 %, 100 %")


def test_training_prints_the_share_of_each_stage_at_its_end(offbeat: Command, tmp_path):
    arguments = [argument for argument in RUN if argument != "--json"]
    arguments[arguments.index("640")] = "96"
    done = offbeat("train", *arguments, "--engine", "simulate", "--diagnose", "1", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    (printed,) = re.findall(r"diagnosis: .* stages 1 to 2 get: (-?\d+) %, (-?\d+) %", done.out + done.err)
    found = lines_of(tmp_path / "run")
    assert [line["lag"] > 0 for line in found if line["stage"] == 1] == [False] + [True] * 5
    counted = [line for line in found if line["stage"] == 2 or line["lag"]]  # from the first late one on
    sums = [
        [sum(line[f"{of}_change"] for line in counted if line["stage"] == k) for k in (1, 2)]
        for of in ("fresh", "predicted")
    ]
    assert [int(share) for share in printed] == [round(100 * a / b) for a, b in zip(*sums, strict=True)]
    assert printed[1] == "100"


@pytest.mark.filterwarnings("always::offbeat.errors.ScheduleLength")
def test_a_diagnosis_that_the_run_does_not_reach_is_named(offbeat: Command):
    """Nothing was measured, without a word."""
    small = ["--data", "synthetic", "--model", "mlp", "--shape", "1,4,4", "--samples", 64, "--batch-size", 8]
    given = ["train", *small, "--epochs", 3, "-K", 2, "-M", 4, "--engine", "simulate", "--dry-run", "--diagnose"]
    words = "offbeat: --diagnose 7 with 6 updates in all: nothing is measured; use 6 or fewer\n"
    assert [offbeat(*given, every).err for every in (7, 6)] == [words, ""]


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
