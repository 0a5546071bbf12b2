"""Recorded stages that repeat forwards in their backwards (recompute)."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from captured import capture
from stream_cases import ALIKE, CPU, K, batches, check_same, network, pipeline, recorded, sgd, train
from torch import nn

import offbeat
from offbeat.engines.streams import Streams
from offbeat.errors import NotRecorded
from offbeat.methods import settings_of, with_settings

RECOMPUTING = [name for name in ALIKE if "recompute" in settings_of(name)]


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        pytest.param(name, captured, marks=[] if captured and name in ("bp", *RECOMPUTING[::3]) else pytest.mark.slow)
        for name, captured in product(RECOMPUTING, [False, True])
    ],
)
def test_forwards_are_repeated_by_the_recorded_backward_with_the_same_bits(monkeypatch, name, captured):
    if captured:
        capture(monkeypatch, 1)
    stashed = {"pb": {"weights": "stash"}, "spectrain": {"version": 2}, "bp": {"pipelined": True}}.get(name, {})
    method = with_settings(name, {**stashed, "recompute": True})
    optimizer = partial(sgd, fused=True)
    pipe = check_same(method, drains=(14,), optimizer=optimizer, data=lambda: batches(40))
    plain = pipeline(with_settings(name, stashed), "simulate", optimizer=optimizer)
    train(plain, batches(40), (14,))
    assert all(map(torch.equal, plain.model.state_dict().values(), pipe.model.state_dict().values()))
    for stage in recorded(pipe):
        assert stage.eager is None
        assert stage.irregular == 1, "the short batch alone"
        if stage.stage.weights.replays:
            assert not any(slot.batch.roots for slot in stage.slots), "no graph is held"
            assert stage.stage.network.batch_bytes < stage.stage.network.graph_bytes


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("stages", [[1], [2, 3]])
def test_some_stages_alone_may_repeat_their_recorded_forwards(monkeypatch, M, stages):
    capture(monkeypatch, M)
    pipe = check_same(offbeat.ADL(M=M, recompute=stages), data=lambda: batches(40), precision="bf16")
    assert [k for k, stage in pipe.stages.items() if stage.weights.replays] == stages
    assert [stage.irregular for stage in recorded(pipe)] == [1] * K


def test_recomputing_is_recorded_where_an_output_needs_no_gradient():
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, given):
            x, mask = given if isinstance(given, tuple) else (given, torch.ones(given.shape[0], 1))
            return self.linear(x) * mask, mask.detach()

    def model() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Pass(), Pass(), Pass(), nn.Sequential(Pass(), Take())]

    class Take(nn.Module):
        def forward(self, given):
            return given[0]

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(5, 3, generator=generator), torch.arange(5) % 3) for _ in range(20)]
    options = {"method": offbeat.ADL(M=2, recompute=True), "loss": nn.functional.cross_entropy, "optimizer": sgd}
    one, other = (offbeat.Pipeline(model(), engine=engine, **options) for engine in ("simulate", Streams(K, CPU)))
    assert train(one, [(x.clone(), y) for x, y in data]) == train(other, [(x.clone(), y) for x, y in data])
    assert [stage.eager for stage in recorded(other)] == [None] * K


def test_buffers_that_repeated_forwards_compute_with_are_not_recorded():
    def model() -> nn.Sequential:
        made = network()
        made[1][0] = nn.utils.parametrizations.spectral_norm(made[1][0])
        return made

    method = offbeat.ADL(M=2, recompute=True)
    one, other = (pipeline(method, engine, model=model()) for engine in ("simulate", "streams"))
    losses = train(one, batches())
    with pytest.warns(NotRecorded, match="stage 2 .*compute with buffers that it writes"):
        assert train(other, batches()) == losses
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))
    assert [stage.eager is None for stage in recorded(other)] == [True, False, True, True]


@pytest.mark.parametrize("into", ["streams", "simulate"])
def test_a_state_with_repeated_forwards_resumes_bit_for_bit_in_either_engine(into):
    method = offbeat.ADL(M=2, recompute=True)
    whole, saved, again = pipeline(method), pipeline(method), pipeline(method, into)
    train(whole, batches())
    for x, y in batches()[:14]:
        saved.step(x, y)
    again.load_stage_states(saved.stage_states(), batches=14)
    train(again, batches()[14:])
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))
