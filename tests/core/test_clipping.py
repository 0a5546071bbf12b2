"""Clipping by the norm over all stages: exact without lag, and by older norms of the other stages with it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import callback_cases
import pytest
import torch
from callback_cases import data, hexed, network, pipeline, sgd
from clipping_cases import CASES, NORM, trained
from preloaded import PYTHON
from torch import nn

import offbeat
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import UserError

HERE = Path(__file__).parent.parent


def plain_loop(M: int, batches) -> tuple[nn.Module, int]:
    """Back-propagation with M gradients per update, clipped by the norm of the whole model."""
    model, clipped = callback_cases.network(), 0
    optimizer = sgd(model.parameters())
    for first in range(0, len(batches), M):
        window = batches[first : first + M]
        optimizer.zero_grad()
        for x, y in window:
            nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.div_(len(window))
        clipped += float(nn.utils.clip_grad_norm_(model.parameters(), NORM)) > NORM
        optimizer.step()
    return model, clipped


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_lag_the_norm_is_exactly_that_of_the_whole_model(M, dtype, monkeypatch):
    monkeypatch.setattr(callback_cases, "network", lambda: network().to(dtype))
    batches = [(x.to(dtype), y) for x, y in data(10)]
    model, clipped = plain_loop(M, batches)
    assert clipped > 1
    pipe = pipeline("bp", M=M, clip_norm=NORM, clip_over="model")
    pipe.fit(batches)
    assert hexed(pipe.model.state_dict()) == hexed(model.state_dict())
    by_stage = pipeline("bp", M=M, clip_norm=NORM)
    by_stage.fit(batches)
    assert hexed(by_stage.model.state_dict()) != hexed(model.state_dict())


def test_gpipe_clips_as_the_whole_model():
    model, _ = plain_loop(1, data(10))
    pipe = pipeline(offbeat.GPipe(m=2), M=None, clip_norm=NORM, clip_over="model")
    pipe.fit(data(10))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(pipe.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_late_method_clips_by_its_own_norm_and_the_newest_known_of_the_others(monkeypatch):
    """A literal second computation from the gradients of each update and the table of norms that has arrived."""
    from offbeat.core.clipping import Clipping

    clip, seen = Clipping.clip, []
    measured: dict[int, list[float]] = {1: [], 2: [], 3: []}

    def observed(clipping, parameters):
        parameters = list(parameters)
        before = [parameter.grad.clone() for parameter in parameters]
        clip(clipping, parameters)
        others = [norms[0] for k, (_, norms) in clipping.known.items() if k != clipping.k]
        own = torch.cat([gradient.flatten() for gradient in before]).norm()
        total = torch.cat([own[None], torch.tensor(others)]).norm()
        expected = min(1.0, NORM / (float(total) + 1e-6))
        for gradient, parameter in zip(before, parameters, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * expected)
        measured[clipping.k].append(float(own))
        for k, (updates, norms) in clipping.known.items():
            assert norms == [pytest.approx(measured[k][updates - 1])], "that of the update that it is said to be of"
        seen.append((clipping.k, clipping.updates, {k: updates for k, (updates, _) in clipping.known.items()}))

    monkeypatch.setattr(Clipping, "clip", observed)
    pipe = pipeline("adl", M=4, clip_norm=NORM, clip_over="model")
    pipe.fit(data(40), drain=False)
    assert {k: updates for k, updates, _ in seen} == {1: 9, 2: 9, 3: 10}, "of 36, 38 and 40 gradients"
    steady = [(k, updates, known) for k, updates, known in seen if updates > 4]
    for k, updates, known in steady:
        assert set(known) == {1, 2, 3}
        for j, others in known.items():
            assert updates - others <= (0 if j == k else 2), "a window old, or as old as the lag requires"


@pytest.mark.parametrize("name", CASES)
def test_interleaving_stages_at_random_changes_no_bit(name):
    K = CASES[name].get("K", 3)
    assert trained(name, engine=Simulate(K, replicas=CASES[name].get("replicas", 1), shuffle=1)) == trained(name)


@pytest.mark.parametrize("name", ["bp", "adl", "hybrid", "2bw"])
def test_streams_clip_as_the_simulator_bit_for_bit(name):
    assert trained(name, engine=Streams(3, torch.device("cpu"))) == trained(name)


@pytest.mark.parametrize("size", [3, 4])
def test_processes_clip_as_the_simulator_bit_for_bit(size, tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    done = subprocess.run(
        [*command, str(HERE / "clipping_cases.py"), str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found
        for name, weights in found.items():
            assert weights == trained(name), name


def test_the_known_norms_are_in_the_state():
    straight = pipeline("adl", M=2, clip_norm=NORM, clip_over="model")
    straight.fit(data(20))
    first, x = pipeline("adl", M=2, clip_norm=NORM, clip_over="model"), data(1)[0][0]
    first.fit(data(20)[:9], drain=False)
    second = pipeline("adl", M=2, clip_norm=NORM, clip_over="model", sample=x)
    states = first.stage_states()
    second.load_stage_states(states, 9)
    second.fit(data(20)[9:])
    assert hexed(second.model.state_dict()) == hexed(straight.model.state_dict())


def test_a_gradient_that_is_not_finite_skips_the_update_of_all_stages():
    batches = data(6)
    batches[3][0][0] = torch.nan
    pipe = pipeline("bp", M=1, clip_norm=NORM, clip_over="model", on_nan="skip")
    pipe.fit(batches)
    without = pipeline("bp", M=1, clip_norm=NORM, clip_over="model")
    without.fit([batch for t, batch in enumerate(batches) if t != 3])
    assert hexed(pipe.model.state_dict()) == hexed(without.model.state_dict())


def test_clipping_over_the_model_is_refused_where_norms_do_not_arrive():
    with pytest.raises(UserError, match=r"clip_over='model' with dgl, .* use clip_over='stage'"):
        pipeline("dgl", M=None, clip_norm=1.0, clip_over="model")
    with pytest.raises(UserError, match="unknown clip_over='modle': did you mean 'model'"):
        pipeline(clip_norm=1.0, clip_over="modle")
    with pytest.raises(UserError, match="clip_over='model' needs clip_norm=, the largest norm"):
        pipeline(clip_over="model")
