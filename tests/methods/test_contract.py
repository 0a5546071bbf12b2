"""What every method keeps to, whatever it does: one contract, run for all that are listed."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

import offbeat
from offbeat.clock import ticks
from offbeat.engines.simulate import Simulate
from offbeat.methods import METHODS, named, settings_of, with_settings
from offbeat.ops import Backward, Barrier, Drop, Forward, Take, Teach, Update

K, N, CLASSES = 3, 13, 4
WHOLE = {name for name, make in METHODS.items() if make().limit and make().limit(K)}  # one stage only


# Batches held, weight versions and mean staleness of stages 1, 2, 3, from the papers and by hand, not from the code.
# A method that is not here is compared with its own declaration alone.
LATE_4, LATE_2 = (5, 3, 1), (3, 2, 1)
TABLE = {
    "bp": ((1, 1, 1), (1, 1, 1), (0, 0, 0)),
    "gpipe": ((4, 4, 4), (1, 1, 1), (0, 0, 0)),  # micro-batches
    "ddg": (LATE_2, (3, 2, 1), (2, 1, 0)),
    "fr": (LATE_2, (1, 1, 1), (2, 1, 0)),
    "fdg": (LATE_4, (5, 3, 1), (4, 2, 0)),
    "dsp": (LATE_4, (1, 1, 1), (4, 2, 0)),
    "adl": (LATE_4, (2, 2, 1), (1, 0.5, 0)),  # M = 4
    "adl-1f1b": (LATE_2, (2, 2, 1), (0.5, 0.25, 0)),  # M = 4
    "pipedream": (LATE_2, (3, 2, 1), (2, 1, 0)),
    "nag-async": (LATE_2, (3, 2, 1), (2, 1, 0)),
    "2bw": (LATE_2, (2, 2, 2), (1, 1, 1)),
    "pipemare": (LATE_4, (1, 1, 1), (4, 2, 0)),
    "pb": (LATE_4, (1, 1, 1), (4, 2, 0)),
    "spectrain": (LATE_2, (1, 1, 1), (2, 1, 0)),
    "asgd": ((4,), (4,), (3,)),  # N = 4
    "dc-asgd": ((4,), (4,), (3,)),
}
TABLE |= dict.fromkeys(("dgl", "dgl-async", "dni", "mostafa", "pred", "sim", "predsim"), TABLE["bp"])


def stages_of(name: str) -> int:
    return 1 if name in WHOLE else K


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    def block(wide: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())

    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(6, CLASSES))
    return nn.Sequential(block(3, 6), block(6, 6), block(6, 6), head).to(dtype)


def batches(n: int = N) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [6] * (n - 1) + [3]
    return [
        (torch.randn(b, 3, 6, 6, generator=generator), torch.randint(CLASSES, (b,), generator=generator)) for b in sizes
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-3)


def pipeline(name: str, **options) -> offbeat.Pipeline:
    stages = stages_of(name)
    return offbeat.Pipeline(
        network(),
        stages,
        method=named(name),
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        cuts=[1, 2][: stages - 1],
        sample=batches()[0][0],
        seed=3,
        **options,
    )


def train(name: str, **options) -> offbeat.Pipeline:
    pipe = pipeline(name, **options)
    for x, y in batches():
        pipe.step(x, y)
    pipe.drain()
    return pipe


@cache
def trained(name: str) -> offbeat.Pipeline:
    """For tests that only look at it."""
    return train(name)


def operations(name: str, k: int, n: int = N) -> list:
    program = named(name).program(k, stages_of(name), range(n))
    return [operation for iteration in program for operation in iteration]


@pytest.mark.parametrize("name", METHODS)
def test_operations_of_each_batch_come_in_a_legal_order(name):
    method, stages = named(name), stages_of(name)
    for k in range(1, stages + 1):
        done = operations(name, k)
        forwards = [op.t for op in done if isinstance(op, Forward)]
        backwards = [op.t for op in done if isinstance(op, Backward)]
        assert sorted(forwards) == sorted(backwards)
        if method.order is None:
            assert sorted(forwards) == list(range(N * method.m)), "every batch once, none lost in the drain"
        elif k == 1:
            assert forwards == list(range(N))
        open_batches, window, buffer, taught = Counter(), 0, set(), []
        for op in done:
            if isinstance(op, Forward):
                assert method.order is None or k == 1 or op.t in buffer
                open_batches[op.t] += 1
            elif isinstance(op, Backward):
                open_batches[op.t] -= 1
                assert open_batches[op.t] == 0, "forward first"
                window += 1
            elif isinstance(op, Update):
                assert window > 0 or method.window == "aligned"
                window = 0
            elif isinstance(op, Teach):
                taught.append(op.t)
            elif isinstance(op, Take):
                buffer.add(op.t)
            elif isinstance(op, Drop):
                buffer.remove(op.t)
            assert sum(open_batches.values()) <= method.held(k, stages)
        assert window == 0, "no gradient is left unapplied"
        if method.feedback == "synthesiser":
            assert taught == (backwards if k < stages else [])


@pytest.mark.parametrize("name", METHODS)
def test_barriers_are_met_equally_often_by_all_stages(name):
    counts = {sum(isinstance(op, Barrier) for op in operations(name, k)) for k in range(1, stages_of(name) + 1)}
    assert len(counts) == 1


@pytest.mark.parametrize("name", METHODS)
def test_programs_drain_on_the_clock_for_any_number_of_batches(name):
    for n in (1, 2, 3, 7, 20):
        events = [event for tick in ticks(named(name), stages_of(name), range(n)) for event in tick]
        assert events


@pytest.mark.parametrize("name", METHODS)
def test_random_interleavings_change_no_bit_and_the_parameters_of_every_stage_move(name):
    plain = trained(name)
    before = network().state_dict()
    for k, stage in plain.stages.items():
        own = [parameter for parameter in stage.parameters if not parameter.startswith("head.")]
        assert all(not torch.equal(plain.model.state_dict()[p], before[p]) for p in own), f"stage {k}"
    other = train(name, engine=Simulate(stages_of(name), shuffle=1)).model.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in plain.model.state_dict().items())


@pytest.mark.parametrize("name", METHODS)
def test_staleness_batches_and_versions_held_are_those_declared(name):
    method, stages = named(name), stages_of(name)
    pipe = pipeline(name)
    most = dict.fromkeys(pipe.stages, 0)
    versions = dict.fromkeys(pipe.stages, 0)
    for x, y in batches(3 * N):
        pipe.step(x, y)
        for k, stage in pipe.stages.items():
            most[k] = max(most[k], stage.figures.most_held)
            versions[k] = max(versions[k], stage.weights.versions())
    pipe.drain()
    for k in range(1, stages + 1):
        assert (method.held(k, stages), method.versions(k, stages)) == (most[k], versions[k]), f"stage {k}"
        assert method.staleness(k, stages) == pytest.approx(pipe.staleness[k - 1].mean), f"stage {k}"
    if name in TABLE:
        assert (tuple(most.values()), tuple(versions.values())) == TABLE[name][:2]
        assert [stage.mean for stage in pipe.staleness] == pytest.approx(TABLE[name][2])


def test_the_table_names_methods_that_there_are():
    assert set(TABLE) <= set(METHODS)
    assert len(TABLE) >= 23


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_counts_every_training_batch_once(name):
    pipe = trained(name)
    for k, stage in pipe.stages.items():
        expected = sum(isinstance(op, Forward) for op in operations(name, k)) // named(name).m
        counters = [b for n, b in stage.network.module.named_buffers() if n.endswith("num_batches_tracked")]
        assert all(int(counter) == expected for counter in counters)


@pytest.mark.parametrize("name", METHODS)
def test_training_continues_after_a_drain_and_an_evaluation(name):
    pipe = pipeline(name)
    data = batches()
    for t, (x, y) in enumerate(data):
        if t in (3, 8):
            pipe.drain()
            assert not any(stage.in_flight or stage.feedback.lessons for stage in pipe.stages.values())
        if t == 5:
            before = {key: value.clone() for key, value in pipe.model.state_dict().items()}
            assert pipe.evaluate(data)["samples"] == sum(len(y) for _, y in data)
            assert all(torch.equal(value, before[key]) for key, value in pipe.model.state_dict().items())
        pipe.step(x, y)
    pipe.drain()
    assert pipe.evaluate(data)["loss"] < 3


@pytest.mark.parametrize("name", METHODS)
def test_heads_are_trained_and_counted_but_not_part_of_the_model(name):
    method = named(name)
    pipe = pipeline(name)
    names = set(network().state_dict())
    assert set(pipe.model.state_dict()) == names
    for k, stage in pipe.stages.items():
        assert (stage.feedback.head is not None) == (method.head is not None and k < stages_of(name))
        if stage.feedback.head is None:
            continue
        before = [p.detach().clone() for p in stage.feedback.head.parameters()]
        for x, y in batches(6):
            pipe.step(x, y)
        trained = [p for p in stage.feedback.head.parameters() if p.requires_grad]
        assert any(not torch.equal(p, b) for p, b in zip(trained, before)) or not trained
        assert stage.memory() > sum(p.numel() * p.element_size() for p in stage.network.module.parameters())
        break
    pipe.drain()
    assert set(pipe.model.state_dict()) == names


@pytest.mark.parametrize("name", METHODS)
def test_every_method_describes_itself(name):
    method = named(name)
    assert method.name == name
    assert method.title
    assert method.reference
    text = sys.modules[METHODS[name].__module__].__doc__ or ""
    assert "| F0" in text, "a drawn timeline"
    for fact in ("Lock", "Staleness", "Time per batch", "version"):
        assert fact in " ".join(text.split()), fact


def test_staleness_of_2bw_is_one_also_in_stages_without_parameters():
    layers = [torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)]
    pipe = offbeat.Pipeline(
        layers,
        method=offbeat.TwoBW(M=4),
        loss=torch.nn.functional.mse_loss,
        engine="simulate",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    for _ in range(16):
        pipe.step(torch.ones(2, 2), torch.zeros(2, 1))
    pipe.drain()
    assert [dict(stage) for stage in pipe.staleness] == [{1: 12}] * 5


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_hold_several_batches_on_stashed_weights_take_recompute(name):
    stages = stages_of(name)
    several_held = {"bp": {"M": 4, "pipelined": True}, "pb": {"weights": "stash"}, "spectrain": {"version": 2}}
    stashed = several_held.get(name, {})
    method = with_settings(name, stashed)
    several = max(method.held(k, stages) for k in range(1, stages + 1)) > 1
    assert ("recompute" in settings_of(name)) == (several and method.weights == "stash")
    if "recompute" in settings_of(name):
        repeating = with_settings(name, {**stashed, "recompute": True})
        for k in range(1, stages + 1):
            assert repeating.replays(k, stages) == (method.held(k, stages) > 1)
            assert repeating.versions(k, stages) == method.versions(k, stages)
            assert repeating.staleness(k, stages) == method.staleness(k, stages)
