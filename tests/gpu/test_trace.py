"""Traces and diagnoses on a GPU: time is that of the streams, and no bit depends on them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import offbeat
from offbeat.engines.streams import Streams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
K, N, GPU = 4, 60, torch.device("cuda")
RESOLUTION = 2.0  # microseconds, of what two events tell


def pipeline(engine: str, method: offbeat.Method) -> offbeat.Pipeline:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(given, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        for given in (3, 16, 16)
    ]
    model = nn.Sequential(*blocks, nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)))
    return offbeat.Pipeline(
        model,
        K,
        method=method,
        cuts=[1, 2, 3],
        loss=nn.functional.cross_entropy,
        seed=3,
        device=GPU,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        engine=Streams(K, GPU) if engine == "streams" else engine,
    )


def train(pipe: offbeat.Pipeline) -> list[str]:
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(N):
        x, y = torch.randn(32, 3, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
        losses.append(pipe.step(x.to(GPU), y.to(GPU)))
    pipe.drain()
    return [loss.item().hex() for loss in losses]


@pytest.mark.parametrize("engine", ["simulate", "streams"])
def test_a_trace_is_by_the_clock_of_the_streams_and_changes_no_bit(engine, tmp_path):
    plain, traced = (pipeline(engine, offbeat.ADL(M=2)) for _ in range(2))
    traced.trace(20, tmp_path / "trace.json")
    assert train(plain) == train(traced)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["turns"] == 20
    stages = {k: [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == k] for k in range(1, K + 1)}
    for events in stages.values():
        assert {"forward", "backward", "update"} <= {event["cat"] for event in events}
        assert all(event["dur"] >= 0 for event in events)
        for one, two in pairwise(events):
            assert one["ts"] + one["dur"] <= two["ts"] + RESOLUTION
    ends = {(e["cat"], e["args"]["batch"]): e["ts"] + e["dur"] for e in stages[1]}
    for event in stages[2]:
        if event["cat"] == "forward" and ("forward", event["args"]["batch"]) in ends:
            assert ends["forward", event["args"]["batch"]] <= event["ts"] + RESOLUTION


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_a_diagnosis_changes_no_bit_and_both_engines_see_the_same(weights):
    found = []
    for engine in ("simulate", "streams"):
        plain, looked_at = (pipeline(engine, offbeat.ADL(M=2, weights=weights)) for _ in range(2))
        looked_at.diagnose(3)
        assert train(plain) == train(looked_at)
        found.append([line for report in looked_at.reports() for line in report.diagnosis])
    assert len(found[0]) == len(found[1]) > K
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
