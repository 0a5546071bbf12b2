"""Tied weights: one stage owns the parameter, the others receive it with every batch and send its gradient back."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest
import tied
import torch
from captured import capture
from preloaded import PYTHON
from selected import some
from tied import batches, network, pipeline, sgd
from torch import nn

import offbeat
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import UserError

ABOVE = ["bp", "adl:M=2", "adl:M=2,weights=hybrid", "adl:M=2,weights=replay", "adl:M=2,corrector=lwp", "2bw:M=4"]
ABOVE += ["gpipe:m=2", "ddg", "fr", "fdg", "dsp", "pipedream", "pipemare", "spectrain"]
TABLE = "embedding.weight"


def equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs by {(tensor - other[name]).abs().max()}"


def close(found: dict, expected: dict) -> None:
    """Within 1e-12, under all names that are expected."""
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-12, name


def plainly(model: nn.Module, data: list, M: int = 1) -> dict:
    """The unsplit model by plain PyTorch."""
    optimizer = sgd(model.parameters())
    for t, (x, y) in enumerate(data):
        (tied.loss(model(x), y) / M).backward()
        if t % M == M - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(pipe: offbeat.Pipeline, data: list) -> dict:
    for x, y in data:
        pipe.step(x, y)
    return {name: tensor.clone() for name, tensor in pipe.drain().state_dict().items()}


# ---- what it computes


@pytest.mark.parametrize("K", [2, 3, 4])
def test_back_propagation_is_that_of_the_unsplit_model_bit_for_bit(K):
    pipe = pipeline(network(), K, "bp")
    held = [[name for name, _ in part.named_parameters()] for part in pipe.parts]
    assert [TABLE in names for names in held] == [True] + [False] * (K - 1)
    assert not any("scores.weight" in names for names in held)
    equal(train(pipe, batches(8)), plainly(network(), batches(8)))
    assert pipe.model.scores.weight is pipe.model.embedding.weight


@pytest.mark.parametrize(("K", "M"), [(2, 1), (3, 2), (4, 1), (4, 4)])
def test_adl_is_the_literal_serial_computation(K, M):
    pipe = pipeline(network(), K, offbeat.ADL(M=M))
    assert TABLE in dict(pipe.parts[0].named_parameters())
    expected = tied.adl(network(), pipe.parts, M, batches(18))
    close(train(pipe, batches(18)), expected)
    assert pipe.staleness[0].mean == 2 * (K - 1) / M


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("K", [2, 4])
def test_batches_on_one_version_have_the_whole_gradient_under_all_weights(weights, K):
    found = train(pipeline(network(), K, offbeat.ADL(M=5, weights=weights)), batches(5))
    close(found, plainly(network(), batches(5), M=5))


def test_micro_batches_split_the_samples_and_not_the_table():
    close(train(pipeline(network(), 4, "gpipe:m=2"), batches(6)), plainly(network(), batches(6)))


def test_bf16_stages_train_as_the_unsplit_model_in_bf16():
    one, other = (train(pipeline(network().float(), K, "bp", precision="bf16"), batches(6)) for K in (1, 3))
    equal(one, other)


def test_a_frozen_table_stays_and_gets_no_gradients():
    model = network()
    model.embedding.weight.requires_grad_(False)
    expected = plainly(copy.deepcopy(model), batches(6))
    before = model.embedding.weight.clone()
    equal(train(pipeline(model, 3, "bp"), batches(6)), expected)
    assert torch.equal(model.embedding.weight, before)


def test_evaluation_uses_the_newest_table_in_every_stage():
    pipe = pipeline(network(), 4, offbeat.ADL(M=1))
    data = batches(9)
    for x, y in data:
        pipe.step(x, y)
    found = pipe.evaluate(data[:1])["loss"]
    with torch.no_grad():
        assert found == tied.loss(pipe.gather().eval()(data[0][0]), data[0][1]).item()


# ---- where it runs


@pytest.mark.parametrize("method", some(ABOVE, of=3))
def test_shuffled_and_recorded_stages_train_the_bits_of_the_simulator(monkeypatch, method):
    K = 3
    expected = train(pipeline(network(), K, method), batches(17))
    equal(train(pipeline(network(), K, method, engine=Simulate(K, shuffle=1)), batches(17)), expected)
    capture(monkeypatch, 1)
    pipe = pipeline(network(), K, method, engine=Streams(K, torch.device("cpu")))
    equal(train(pipe, batches(17)), expected)
    assert [getattr(worker.executor, "eager", None) for worker in pipe.workers] == [None] * K


METHODS = ["bp", "adl:M=2", "adl:weights=hybrid", "dsp"]


def test_processes_train_the_bits_of_the_simulator(tmp_path):
    script = str(Path(tied.__file__))
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", script]
    done = subprocess.run([*command, str(tmp_path), "3", *METHODS], capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    expected = {
        f"{method} {way}": tied.trained(method, 3, tied=way) for method in METHODS for way in ("shared", "copies")
    }
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_a_state_with_batches_in_flight_continues_bit_for_bit(weights):
    data, method = batches(17), offbeat.ADL(M=2, weights=weights)
    expected = train(pipeline(network(), 3, method), data)
    pipe = pipeline(network(), 3, method)
    pipe.keep()
    for x, y in data[:9]:
        pipe.step(x, y)
    saved = copy.deepcopy(pipe.stage_states())
    other = pipeline(network(seed=5), 3, method)
    other.load_stage_states(saved, 9)
    equal(train(other, data[9:]), expected)


# ---- what users see


def test_a_sequence_that_ties_two_entries_is_cut_between_layers():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    layers[3].weight = layers[0].weight
    data = [(torch.randn(4, 6), torch.randint(6, (4,))) for _ in range(5)]
    expected = copy.deepcopy(layers)
    optimizer = sgd(expected.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    pipe = offbeat.Pipeline(layers, 2, method="bp", loss=nn.functional.cross_entropy, optimizer=sgd)
    equal(train(pipe, data), expected.state_dict())


@pytest.mark.parametrize("method", ["dgl", "dni"])
def test_methods_without_gradients_from_above_refuse_shared_parameters(method):
    with pytest.raises(UserError, match=rf"{TABLE} of stage 1 is .* whose gradients {method} does not send back"):
        pipeline(network(), 3, method, sample=batches(1)[0][0])


def test_an_unknown_way_to_tie_is_refused():
    with pytest.raises(UserError, match="tied 'clone'"):
        pipeline(network(), 2, "bp", tied="clone")


def test_copies_are_the_models_parameters_under_its_names():
    names = list(network().state_dict())
    pipe = pipeline(network(), 2, offbeat.ADL(M=1), tied="copies", cuts=["blocks.2"])
    state = train(pipe, batches(9))
    assert list(state) == names
    assert not torch.equal(state["scores.weight"], state[TABLE])
    assert pipe.parts[1].get_parameter("scores.weight") is pipe.model.scores.weight
    again = network(seed=1)
    again.scores.weight = nn.Parameter(again.scores.weight.clone())
    again.load_state_dict(state)
    x = batches(1)[0][0]
    assert torch.equal(again(x), pipe.model(x))
    assert torch.equal(pipe.parts[1](pipe.parts[0](x)), pipe.model(x))
    network().load_state_dict(state)


def test_shared_names_survive_a_round_trip_of_the_state():
    pipe = pipeline(network(), 4, offbeat.ADL(M=1))
    state = train(pipe, batches(9))
    assert list(state) == list(network().state_dict())
    again = network(seed=1)
    again.load_state_dict(state)
    x = batches(1)[0][0]
    assert torch.equal(again(x), pipe.model(x))
