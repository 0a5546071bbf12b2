"""Pipelines with the optimizers for late gradients: resumed and recorded runs give the same bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from captured import capture
from torch import Tensor
from torch.utils import _pytree as pytree

import offbeat
from offbeat.engines.streams import Streams
from offbeat.errors import UserError
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.models.gpt import gpt
from offbeat.optim import Muon, RotatedAdam
from offbeat.runs.build import cross_entropy

CPU = torch.device("cpu")
MAKE = {"muon": Muon, "rotated-adam": partial(RotatedAdam, block=12)}


def pipeline(make, engine: str | Streams = "simulate") -> offbeat.Pipeline:
    torch.manual_seed(0)
    return offbeat.Pipeline(
        gpt(layers=2, width=16, heads=2, context=8),
        3,
        method=offbeat.ADL(M=2),
        cuts=[1, 2],
        loss=cross_entropy,
        optimizer=partial(make, lr=3e-3),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda s: 0.99**s),
        engine=engine,
    )


def tokens(n: int) -> list[Tensor]:
    given = torch.Generator().manual_seed(7)
    return [torch.randint(4, (2, 4, 8), generator=given) for _ in range(n)]


def trained(pipe: offbeat.Pipeline, data: list[Tensor]) -> list[float]:
    losses = [pipe.step(x.clone(), y.clone()) for x, y in data]
    pipe.drain()
    return [loss.item() for loss in losses]


def check_equal(one: offbeat.Pipeline, other: offbeat.Pipeline) -> None:
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_pipeline_learns_and_a_saved_state_continues_bit_for_bit(make):
    whole, saved, again = (pipeline(make) for _ in range(3))
    data = tokens(40)
    losses = trained(whole, data)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for x, y in data[:21]:
        saved.step(x, y)
    again.load_stage_states(pytree.tree_map_only(Tensor, torch.clone, saved.stage_states()), batches=21)
    assert trained(again, data[21:]) == losses[21:]
    check_equal(whole, again)


def on_device(make, parameters, lr: float) -> torch.optim.Optimizer:
    """With learning rates as tensors, as a pipeline sets them on a GPU."""
    made = make(parameters, lr, capturable=True)
    for group in made.param_groups:
        group.update(initial_lr=group["lr"], lr=torch.tensor(group["lr"]), compensation=1.5, keep_direction=True)
    return made


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_recorded_updates_give_the_bits_of_simulate(monkeypatch, make):
    capture(monkeypatch)
    one, other = (pipeline(partial(on_device, make), engine) for engine in ("simulate", Streams(3, CPU)))
    assert trained(one, tokens(24)) == trained(other, tokens(24))
    assert all(isinstance(stage.optimization.operation, RecordedOperation) for stage in other.stages.values())
    check_equal(one, other)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_recorded_run_continues_from_a_saved_state(monkeypatch, make):
    capture(monkeypatch)
    whole, saved, again = (pipeline(partial(on_device, make), Streams(3, CPU)) for _ in range(3))
    data = tokens(30)
    losses = trained(whole, data)
    for x, y in data[:17]:
        saved.step(x, y)
    again.load_stage_states(pytree.tree_map_only(Tensor, torch.clone, saved.stage_states()), batches=17)
    assert trained(again, data[17:]) == losses[17:]
    check_equal(whole, again)


def saved_by(make) -> list:
    pipe = pipeline(make)
    trained(pipe, tokens(8))
    return pytree.tree_map_only(Tensor, torch.clone, pipe.stage_states())


def test_a_state_of_adamw_is_refused_by_rotated_adam():
    with pytest.raises(UserError, match="this state is of another optimizer than RotatedAdam"):
        pipeline(RotatedAdam).load_stage_states(saved_by(torch.optim.AdamW), batches=8)


def test_a_state_with_other_hidden_matrices_is_refused():
    alone = partial(Muon, hidden=lambda name, p: "mlp" in name and p.ndim == 2)
    with pytest.raises(UserError, match="has other parameter groups than this Muon: make the same ones"):
        pipeline(alone).load_stage_states(saved_by(Muon), batches=8)


def test_what_correctors_set_is_not_loaded():
    pipe = pipeline(partial(on_device, Muon))
    pipe.load_stage_states(saved_by(Muon), batches=8)
    for stage in pipe.stages.values():
        for group in stage.optimization.optimizer.param_groups:
            assert (group["keep_direction"], group["compensation"]) == (True, 1.5)
