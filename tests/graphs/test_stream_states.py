"""States that are saved and loaded in engine `streams`."""

from __future__ import annotations

import pytest
import torch
from stream_cases import K, batches, pipeline, train
from torch.utils import _pytree as pytree

import offbeat


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("into", ["streams", "simulate"])
def test_a_state_saved_in_flight_resumes_bit_for_bit_in_either_engine(weights, into):
    method = offbeat.ADL(M=2, weights=weights)
    whole, saved, again = pipeline(method), pipeline(method), pipeline(method, into)
    train(whole, batches())
    for t, (x, y) in enumerate(batches()[:14]):
        if t == 14 - 2 * K:
            saved.keep()
        saved.step(x, y)
    again.load_stage_states(saved.stage_states(), batches=14)
    train(again, batches()[14:])
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))


@pytest.mark.parametrize("into", ["simulate", "streams"])
def test_copies_of_one_version_are_one_after_loading_too(into):
    """A drain in the middle of an aligned window leaves copies of a version in several places."""
    method = offbeat.ADL(M=4, window="aligned")
    one, other, data = pipeline(method), pipeline(method, into), batches(40, short=False)
    for t, (x, y) in enumerate(data[:12]):
        if t == 5:
            one.drain()
        one.step(x, y)
    other.load_stage_states(pytree.tree_map_only(torch.Tensor, torch.clone, one.stage_states()), batches=12)
    for pipe in (one, other):
        for x, y in data[12:]:
            pipe.step(x, y)
        pipe.drain()
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


def test_a_pipeline_that_has_trained_can_be_loaded_too():
    whole, other = pipeline(offbeat.ADL(M=2)), pipeline(offbeat.ADL(M=2))
    train(whole, batches())
    for x, y in batches()[:10]:
        other.step(x, y)
    early = {k: {part: _copied(tree) for part, tree in trees.items()} for k, trees in other.stage_states().items()}
    for x, y in batches()[10:14]:
        other.step(x, y)
    other.drain()
    other.load_stage_states(early, batches=10)
    train(other, batches()[10:])
    assert all(map(torch.equal, whole.model.state_dict().values(), other.model.state_dict().values()))


def _copied(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)
