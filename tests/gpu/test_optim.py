"""Optimizers for late gradients on a GPU: recorded updates give the bits of simulate, without waiting for the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import offbeat
from offbeat.engines.streams import Streams
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.models.gpt import gpt
from offbeat.optim import Muon, RotatedAdam
from offbeat.runs.build import cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
K, GPU = 4, torch.device("cuda")


def tokens(n: int) -> list[torch.Tensor]:
    given = torch.Generator().manual_seed(7)
    return [torch.randint(4, (2, 8, 16), generator=given).to(GPU) for _ in range(n)]


def trained(engine: str | Streams, make, method: offbeat.Method, n: int = 40) -> tuple[offbeat.Pipeline, list[float]]:
    torch.manual_seed(0)
    pipe = offbeat.Pipeline(
        gpt(layers=3, width=32, heads=2, context=16),
        K,
        method=method,
        cuts=[1, 2, 3],
        loss=cross_entropy,
        optimizer=make,
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda s: 1 / (1 + s / 10)),
        device=GPU,
        engine=engine,
        seed=3,
    )
    losses = [pipe.step(x, y) for x, y in tokens(n)]
    pipe.drain()
    return pipe, list(map(float, losses))


def check_same(make, method: offbeat.Method) -> offbeat.Pipeline:
    (one, losses), (other, there) = trained("simulate", make, method), trained(Streams(K, GPU), make, method)
    assert losses == there
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    return other


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL1F1B(M=1), offbeat.BP(M=4)], ids=lambda m: m.name)
@pytest.mark.parametrize("scale", ["rms", "spectral"])
def test_recorded_muon_gives_the_bits_of_simulate(method, scale):
    pipe = check_same(partial(Muon, lr=3e-3, scale=scale, capturable=True), method)
    assert all(isinstance(worker.executor.optimization.operation, RecordedOperation) for worker in pipe.workers)


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL1F1B(M=1)], ids=lambda m: m.name)
def test_recorded_rotated_adam_gives_the_bits_of_simulate(method):
    pipe = check_same(partial(RotatedAdam, lr=3e-3, block=16, capturable=True), method)
    assert all(isinstance(worker.executor.optimization.operation, RecordedOperation) for worker in pipe.workers)


class SlowAdamW(Muon):
    """Its AdamW part, a branch of the recorded update, takes about a millisecond."""

    def adam_directions(self, group, parameters):
        torch.cuda._sleep(2_000_000)
        return super().adam_directions(group, parameters)


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL1F1B(M=1)], ids=lambda m: m.name)
def test_what_follows_a_recorded_update_waits_for_all_of_its_branches(method):
    check_same(partial(SlowAdamW, lr=3e-3, capturable=True), method)


def test_recorded_muon_keeps_directions():
    def make(parameters) -> Muon:
        made = Muon(parameters, 3e-3, capturable=True)
        for group in made.param_groups:
            group.update(keep_direction=True, compensation=1.5)
        return made

    one, _ = trained("simulate", make, offbeat.ADL(M=2))
    other, _ = trained(Streams(K, GPU), make, offbeat.ADL(M=2))
    for k, stage in one.stages.items():
        there = other.stages[k]
        for name, p in stage.parameters.items():
            found = stage.optimization.optimizer.direction(p)
            assert torch.equal(found, there.optimization.optimizer.direction(there.parameters[name])), name


@pytest.mark.parametrize("make", [Muon, RotatedAdam])
def test_a_capturable_step_does_not_wait_for_the_device(no_synchronization, make):
    torch.manual_seed(0)
    model = gpt(layers=2, width=32, heads=2, context=16).to(GPU)
    optimizer = make(model.named_parameters(), torch.tensor(1e-3, device=GPU), capturable=True)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    with no_synchronization():
        optimizer.step()


def test_steps_on_the_gpu_are_close_to_those_of_the_cpu():
    torch.manual_seed(0)
    here = gpt(layers=2, width=32, heads=2, context=16)
    there = gpt(layers=2, width=32, heads=2, context=16)
    there.load_state_dict(here.state_dict())
    there.to(GPU)
    start = {name: p.detach().clone() for name, p in here.named_parameters()}
    optimizers = [Muon(here.named_parameters(), 1e-2), Muon(there.named_parameters(), 1e-2, capturable=True)]
    given = torch.Generator().manual_seed(1)
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=given)
        q.grad = p.grad.to(GPU)
    for optimizer in optimizers:
        optimizer.step()
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        moved, expected = q.detach().cpu() - start[name], p.detach() - start[name]
        assert (moved - expected).norm() <= 0.05 * expected.norm(), name  # bfloat16 has 8 bits
