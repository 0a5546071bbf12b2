"""A pipeline put into a saved state goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from test_contract import batches, named, network, pipeline, sgd, stages_of
from torch import nn

import offbeat
from offbeat.core import state as stage_state
from offbeat.methods import METHODS

LENGTH = 14


def moved(tree):
    """The tree as it would come back from a file: no tensor shared with the pipeline that made it."""
    return copy.deepcopy(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree))


def finish(pipe, data):
    losses = [repr(pipe.step(x, y)) for x, y in data][1:]  # after a restart there is no loss before the first
    pipe.drain()
    return losses, {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}


def interrupted(make, at: tuple[int, ...], keep_from: int = 0):
    """What pipelines compute that go on from a run's states after so many batches, and what the run itself computes."""
    data, saved, resumed = batches(LENGTH), {}, {}
    first = make()
    losses = []
    for t, (x, y) in enumerate(data):
        if t == keep_from:
            first.keep()
        if t in at:
            saved[t] = moved(first.stage_states(keep_on=t < at[-1])), [report.as_dict() for report in first.reports()]
        losses.append(repr(first.step(x, y)))
    first.drain()
    for t, (state, reported) in saved.items():
        second = make()
        second.load_stage_states(state, batches=t)
        assert [report.as_dict() for report in second.reports()] == reported
        resumed[t] = finish(second, data[t:])
    return resumed, (losses[1:], first.model.state_dict())


def same(found, expected) -> bool:
    return found[0] == expected[0] and all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_from_every_batch(name):
    uninterrupted = finish(pipeline(name), batches(LENGTH))
    resumed, went_on = interrupted(lambda: pipeline(name), (3, 8))
    assert same(went_on, uninterrupted), "saving changed the run"
    for at, found in resumed.items():
        assert same(found, (uninterrupted[0][at:], uninterrupted[1])), f"resumed after {at} batches"


OPTIONS = {
    "adl-hybrid": {"method": offbeat.ADL(M=3, weights="hybrid")},
    "adl-replay": {"method": offbeat.ADL(M=3, weights="replay")},
    "adl-aligned": {"method": offbeat.ADL(M=3, window="aligned")},
    "adl-adam": {"method": offbeat.ADL(M=2), "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3)},
    "adl-scheduled": {
        "method": offbeat.ADL(M=2),
        "clip_norm": 0.5,
        "scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=50),
    },
    "adl-corrected": {"method": offbeat.ADL(M=2, corrector="lwp+sc")},
    "adl-weight-form": {"method": offbeat.ADL(M=1, corrector=offbeat.WeightPrediction(form="weight"))},
    "adl-bf16-messages": {"method": offbeat.ADL(M=2), "messages": "bf16"},
    "adl-int8-messages": {"method": offbeat.ADL(M=2), "messages": "int8"},
    "gpipe-int8-messages": {"method": offbeat.GPipe(m=2), "messages": "int8"},
    "dgl-int8-messages": {"method": offbeat.DGL(), "messages": "int8", "sample": batches(1)[0][0]},
    "adl-dc": {"method": offbeat.ADL(M=1, corrector=offbeat.DelayCompensation(2.0, adaptive=True))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_that_add_state_go_on_too(name):
    def make():
        options = {"optimizer": sgd, **OPTIONS[name]}
        return offbeat.Pipeline(network(), 3, loss=nn.functional.cross_entropy, cuts=[1, 2], seed=3, **options)

    expected = finish(make(), batches(LENGTH))
    resumed, went_on = interrupted(make, (2, 9))
    assert same(went_on, expected)
    for at, found in resumed.items():
        assert same(found, (expected[0][at:], expected[1]))


def test_hybrid_needs_to_keep_its_weights_for_as_long_as_a_batch_is_in_flight_only():
    def make():
        method = offbeat.ADL(M=1, weights="hybrid")
        return offbeat.Pipeline(
            network(), 3, method=method, loss=nn.functional.cross_entropy, cuts=[1, 2], optimizer=sgd
        )

    expected = finish(make(), batches(LENGTH))
    resumed, _ = interrupted(make, (12,), keep_from=12 - (named("adl").lag(1, 3) + 1))
    assert same(resumed[12], (expected[0][12:], expected[1]))


def test_stages_of_other_shapes_are_refused():
    pipe = pipeline("adl")
    for x, y in batches(4):
        pipe.step(x, y)
    saved = moved(pipe.stage_states())
    saved[2]["stage"]["model"].popitem()
    with pytest.raises(offbeat.UserError, match="not there in the checkpoint"):
        pipeline("adl").load_stage_states(saved, batches=4)
    assert stages_of("adl") == 3


@pytest.mark.parametrize("name", METHODS)
def test_forwards_run_on_weights_that_were_loaded_without_batches(name):
    """As when a run goes on with another K, M or precision."""
    for stage in pipeline(name).stages.values():
        model = {key: tensor.detach() + 1 for key, tensor in stage_state.tensors(stage).items()}
        stage_state.load_model(stage, model, {}, {})
        used = stage.weights.current().tensors or stage.parameters
        assert all(torch.equal(tensor, model[key]) for key, tensor in used.items() if key in model)
