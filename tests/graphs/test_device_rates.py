"""Learning rates on the device: schedules have the state, and updates the bits, of torch's own steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from captured import capture
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import offbeat
from offbeat.callbacks import LearningRateMonitor
from offbeat.engines.streams import Streams
from offbeat.graphs.launch_queue import RecordedOperation

K, SAVED, BATCHES = 3, 13, 30
SCHEDULES = {
    "one function": lambda made: lr_scheduler.LambdaLR(made, lambda s: 0.9**s),
    "one per group": lambda made: lr_scheduler.LambdaLR(made, [lambda s: 1 / (1 + s), lambda s: torch.tensor(0.5**s)]),
    "of the rate before": lambda made: lr_scheduler.ExponentialLR(made, 0.9),
    "steps": lambda made: lr_scheduler.LambdaLR(made, lambda s: 0.1 ** (s // 4)),
}


def two_groups(parameters, *, initial: type = float) -> torch.optim.Optimizer:
    """Rates as on a GPU; `initial`: the type of the rates that schedules start from."""
    weights = {name: [p for n, p in parameters if n.endswith(name)] for name in ("weight", "bias")}
    groups = [{"params": weights["weight"], "lr": 0.05}, {"params": weights["bias"], "lr": 0.3}]
    made = torch.optim.SGD(groups, momentum=0.9, fused=True)
    for group in made.param_groups:
        rate = group["lr"]
        group["initial_lr"] = rate if initial is float else torch.tensor(rate)
        group["lr"] = torch.tensor(rate)
    return made


def pipeline(
    engine: str, schedule: str, M: int = 1, method: offbeat.Method | None = None, **options
) -> offbeat.Pipeline:
    torch.manual_seed(0)
    return offbeat.Pipeline(
        [nn.Linear(4, 4) for _ in range(K)],
        method=method or offbeat.ADL(M=M),
        loss=nn.functional.cross_entropy,
        optimizer=partial(two_groups, **options),
        scheduler=SCHEDULES[schedule],
        engine=Streams(K, torch.device("cpu")) if engine == "streams" else engine,
    )


def train(pipe: offbeat.Pipeline, begin: int = 0, end: int = BATCHES) -> None:
    random = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 4, generator=random), torch.randint(4, (2,), generator=random)) for _ in range(BATCHES)]
    for x, y in data[begin:end]:
        pipe.step(x, y)


def rates(pipe: offbeat.Pipeline) -> list[list]:
    """What each stage tells of its schedule, with the rates of the optimizer."""
    pipe.engine.settle()
    found = []
    for stage in pipe.stages.values():
        optimizer, scheduler = stage.optimization.optimizer, stage.optimization.scheduler
        assert scheduler.get_last_lr() is scheduler.state_dict()["_last_lr"]
        found.append([scheduler.state_dict(), [group["lr"] for group in optimizer.param_groups]])
    return found


def check_equal(one, other) -> None:
    ours, theirs = pytree.tree_flatten(one), pytree.tree_flatten(other)
    assert ours[1] == theirs[1]
    for here, there in zip(ours[0], theirs[0], strict=True):
        assert type(here) is type(there)
        if isinstance(here, torch.Tensor):
            torch.testing.assert_close(here, there, rtol=0, atol=0)
        else:
            assert here == there


@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_has_the_state_that_torch_gives_it(monkeypatch, schedule, M):
    capture(monkeypatch)
    one, other = pipeline("simulate", schedule, M), pipeline("streams", schedule, M)
    for begin in range(0, BATCHES, 5):
        for pipe in (one, other):
            train(pipe, begin, begin + 5)
        check_equal(rates(one), rates(other))
    for pipe in (one, other):
        pipe.drain()
    check_equal(rates(one), rates(other))
    check_equal(one.model.state_dict(), other.model.state_dict())
    assert all(isinstance(stage.optimization.operation, RecordedOperation) for stage in other.stages.values())


def test_rates_that_a_schedule_has_on_the_device_stay_there(monkeypatch):
    capture(monkeypatch)
    one, other = (pipeline(engine, "one function", initial=torch.Tensor) for engine in ("simulate", "streams"))
    for pipe in (one, other):
        train(pipe)
        pipe.drain()
    check_equal(rates(one), rates(other))
    check_equal(one.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize("into", ["streams", "simulate"])
@pytest.mark.parametrize("schedule", ["one per group", "of the rate before"])
def test_a_schedule_continues_from_a_saved_state_in_either_engine(monkeypatch, schedule, into):
    capture(monkeypatch)
    whole, saved, again = pipeline("streams", schedule), pipeline("streams", schedule), pipeline(into, schedule)
    train(whole)
    train(saved, 0, SAVED)
    again.load_stage_states(saved.stage_states(), batches=SAVED)
    train(again, SAVED)
    check_equal(rates(whole), rates(again))
    for pipe in (whole, again):
        pipe.drain()
    check_equal(whole.model.state_dict(), again.model.state_dict())


@pytest.mark.parametrize("M", [1, 2, 3])
def test_updates_of_one_launch_have_rates_of_their_own(monkeypatch, M):
    """Four ticks are launched at once, and each update has the rate that it has in a simulation."""
    launched = capture(monkeypatch, seed=3)
    pipes = [pipeline(engine, "one per group", method=offbeat.ADL1F1B(M=M)) for engine in ("simulate", "streams")]
    for pipe in pipes:
        for _ in range(3):
            train(pipe)
            pipe.drain()
    check_equal(rates(pipes[0]), rates(pipes[1]))
    check_equal(pipes[0].model.state_dict(), pipes[1].model.state_dict())
    stages = pipes[1].stages.values()
    assert {len(stage.optimization.rates.ring) for stage in stages} == {-(-4 // M)}
    assert all(isinstance(each, RecordedOperation) for stage in stages for each in stage.optimization.operations)
    assert sum(pieces >= 4 * 2 * K for pieces in launched) >= 3


def test_other_options_than_the_rate_are_noticed(monkeypatch):
    """A recorded update has fixed them, so that later ones are made eagerly."""
    capture(monkeypatch)
    pipe = pipeline("streams", "one function")
    train(pipe, 0, 20)
    pipe.engine.settle()
    for stage in pipe.stages.values():
        stage.optimization.optimizer.param_groups[1]["momentum"] = 0.5
    train(pipe, 20)
    assert not any(isinstance(stage.optimization.operation, RecordedOperation) for stage in pipe.stages.values())


@pytest.mark.parametrize("method", [offbeat.ADL(M=1), offbeat.ADL1F1B(M=1), offbeat.BP(M=2)], ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", ["one per group", "of the rate before"])
def test_callbacks_get_the_rates_of_the_next_update(monkeypatch, schedule, method):
    capture(monkeypatch)
    monitors = []
    for engine in ("simulate", "streams"):
        monitors.append(LearningRateMonitor())
        data = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))] * BATCHES
        pipeline(engine, schedule, method=method).fit(data, callbacks=[monitors[-1]])
    assert monitors[0].history == monitors[1].history


@pytest.mark.parametrize("schedule", ["one function", "of the rate before"])
def test_rates_for_the_delay_of_a_stage_begin_with_its_method_as_in_simulate(monkeypatch, schedule):
    def by_delay(parameters, stage) -> torch.optim.Optimizer:
        rate = torch.tensor(0.3 / (1 + stage.delay))
        return offbeat.optim.Muon(parameters, rate, capturable=True)

    def trained(engine: str | Streams) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            [nn.Linear(4, 4) for _ in range(K)],
            method=offbeat.ADL(M=2),
            staleness_warmup="bp@3+adl-1f1b@4",
            loss=nn.functional.cross_entropy,
            optimizer=by_delay,
            scheduler=SCHEDULES[schedule],
            engine=engine,
        )
        train(pipe)
        weights = list(pipe.drain().parameters())
        return [stage.optimization.learning_rates()[0] for stage in pipe.stages.values()], weights

    expected = trained("simulate")
    capture(monkeypatch)
    found = trained(Streams(K, torch.device("cpu")))
    assert found[0] == expected[0]
    assert [rate / expected[0][-1] for rate in expected[0]] == pytest.approx([1 / 3, 1 / 2, 1])
    assert all(map(torch.equal, found[1], expected[1]))
