"""Engine `streams` without a GPU gives the bits of `simulate`, by method, options and model. Recordings run anew at
every call.

What only a GPU can show (that captured graphs do the same, and that nothing races) is in tests/gpu.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from captured import capture
from selected import only, some
from stream_cases import ALIKE, CPU, K, N, batches, check_same, network, on_device, pipeline, recorded, sgd, train
from torch import nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat.engines.streams import Streams
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.methods import named, parsed, with_settings
from offbeat.models.gpt import gpt
from offbeat.runs.build import cross_entropy
from offbeat.runs.optimizers import OPTIMIZERS


@pytest.mark.parametrize("phases", ["3", "bp@2+adl-1f1b@3", "bp@4"])
@pytest.mark.parametrize("captured", only([True], [False, True]))
def test_methods_that_follow_each_other_are_each_recorded(monkeypatch, phases, captured):
    if captured:
        capture(monkeypatch, 1)
    method = with_settings(*parsed(f"adl:M=2,corrector=sc,staleness_warmup={phases}"))
    check_same(method, drains=(25,), optimizer=lambda p: sgd(p, fused=True), data=lambda: batches(40))
    pipe = pipeline(method)
    train(pipe, batches(40))
    assert [stage.eager for stage in recorded(pipe)] == [None] * K


@pytest.mark.parametrize("epoch", some([2, 3, 5, 7, 9], of=2))
@pytest.mark.parametrize("captured", [False, True])
def test_epochs_shorter_than_the_rings_give_the_bits_of_simulate(monkeypatch, captured, epoch):
    """Short batches are in flight when the backwards of all slots are recorded."""
    if captured:
        capture(monkeypatch)
    whole, short = batches(12 * epoch, short=False), batches(12 * epoch)[-1]

    def data() -> list:
        return [
            tuple(part.clone() for part in (short if t % epoch == epoch - 1 else batch))
            for t, batch in enumerate(whole)
        ]

    check_same(offbeat.ADL(M=4), optimizer=lambda p: sgd(p, fused=True), data=data)


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), named("2bw")], ids=lambda method: method.name)
def test_a_tool_that_holds_what_functions_work_on_changes_nothing(monkeypatch, method):
    """As compute-sanitizer does with the frames of Python in which work was launched."""
    capture(monkeypatch)
    held = []
    pipe = pipeline(method, optimizer=lambda p: sgd(p, fused=True))
    sys.setprofile(lambda frame, event, _: held.append(frame) if "/graphs/" in frame.f_code.co_filename else None)
    try:
        train(pipe, batches())
    finally:
        sys.setprofile(None)
    assert len(held) > N
    assert [stage.irregular for stage in recorded(pipe)] == [1] * K


@pytest.mark.parametrize("name", some(ALIKE))
def test_every_lagged_method_gives_the_bits_of_simulate(name):
    check_same(named(name), drains=(8,))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize("window", ["count", "aligned"])
def test_adl_gives_the_bits_of_simulate(M, weights, window):
    pipe = check_same(offbeat.ADL(M=M, weights=weights, window=window), drains=(5, 12))
    if window == "count":
        assert [stage.irregular for stage in recorded(pipe)] == [1] * K, "the short batch alone"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("corrector", ["sc", "lwp+sc", "dc"])
def test_correctors_and_recorded_updates_give_the_bits_of_simulate(corrector, fused):
    pipe = check_same(offbeat.ADL(M=2, corrector=corrector), optimizer=lambda p: sgd(p, fused=fused))
    assert all(isinstance(stage.optimization.operation, RecordedOperation) == fused for stage in recorded(pipe))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_bfloat16_gives_the_bits_of_simulate(weights):
    check_same(offbeat.ADL(M=2, weights=weights), precision="bf16", drains=(8,))


def test_schedules_and_clipping_give_the_bits_of_simulate():
    check_same(
        offbeat.ADL(M=2),
        clip_norm=0.3,
        optimizer=lambda p: sgd(p, fused=True),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
    )


def test_an_evaluation_during_training_sees_all_updates_so_far(monkeypatch):
    capture(monkeypatch)

    def losses(engine: str) -> list[float]:
        pipe = pipeline(offbeat.ADL(M=1), engine, optimizer=lambda p: sgd(p, fused=True))
        data = batches(20, short=False)
        for x, y in data[:12]:
            pipe.step(x, y)
        found, left = [], iter(data[12:])
        evaluation = pipe.evaluating([data[0]] * 4)
        while True:
            try:
                next(evaluation)
            except StopIteration as over:
                return [*found, over.value["loss"]]
            pipe.step(*next(left))

    assert losses("simulate") == pytest.approx(losses("streams"), rel=1e-6)


def test_training_continues_during_an_evaluation():
    pipes = [pipeline(offbeat.ADL(M=2), engine) for engine in ("simulate", "streams")]
    seen = []
    for pipe in pipes:
        for t, (x, y) in enumerate(batches()):
            if t == 9:
                seen.append(pipe.evaluate(batches(4)))
            pipe.step(x, y)
        pipe.drain()
    assert seen[0] == seen[1]
    assert all(map(torch.equal, pipes[0].model.parameters(), pipes[1].model.parameters()))


class BySize(nn.Module):
    """Parameters of which some get no gradient in some windows."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(x) if len(x) == 6 else self.short(x)


@pytest.mark.parametrize(
    ("M", "fused", "loaded"),
    [  # torch's fused one wants all of them in its first step
        (1, False, False),
        (2, False, False),
        (2, False, True),
        (2, True, False),
        (2, True, True),
    ],
)
def test_parameters_without_a_gradient_in_a_window_are_left_alone(M, fused, loaded):
    def trained(engine, loaded: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = [
            offbeat.Pipeline(
                nn.Sequential(BySize(), nn.Linear(4, 3)),
                2,
                method=offbeat.ADL(M=M),
                cuts=[1],
                engine=engine(),
                loss=nn.functional.cross_entropy,
                optimizer=lambda p: sgd(p, fused=fused),
            )
            for _ in range(2)
        ]
        pipe, generator = made[0], torch.Generator().manual_seed(1)
        for t, size in enumerate([6, 3, 6, 6, 3, 6, 6, 3, 3, 3, 6, 6, 6, 6, 6, 3, 6, 6]):
            pipe.step(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
            if loaded and t in (3, 6, 9, 10):
                state = pytree.tree_map_only(torch.Tensor, torch.clone, pipe.stage_states())
                pipe.drain()
                pipe = made[1] if pipe is made[0] else made[0]  # the other one may have trained, too
                pipe.load_stage_states(state, batches=t + 1)
        pipe.drain()
        return list(pipe.model.parameters())

    expected = trained(lambda: "simulate")
    assert all(map(torch.equal, expected, trained(lambda: "simulate", loaded)))
    assert all(map(torch.equal, expected, trained(lambda: Streams(2, CPU), loaded)))


def test_a_stage_that_changes_nothing_sends_gradients_of_its_own():
    models = [network(), network()]
    for model in models:
        model[2] = nn.Identity()
    one, other = pipeline(offbeat.ADL(M=2), "simulate", model=models[0]), pipeline(offbeat.ADL(M=2), model=models[1])
    assert train(one, batches()) == train(other, batches())
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_a_gpt_with_an_optimizer_of_a_gpu_gives_the_bits_of_simulate(monkeypatch, optimizer):
    capture(monkeypatch)
    monkeypatch.setattr(sys.modules["torch.optim.nadam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])
    kind = OPTIMIZERS[optimizer]
    make = partial(getattr(torch.optim, kind.title), lr=1e-2, **kind.fixed, **kind.on_gpu)
    given = torch.Generator().manual_seed(7)
    data = [torch.randint(256, (2, 4, 8), generator=given) for _ in range(24)]

    def trained(engine: Streams | str) -> tuple[offbeat.Pipeline, list[str]]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            gpt(layers=2, width=16, heads=2, context=8),
            4,
            method=offbeat.ADL(M=2),
            cuts=[1, 2, 3],
            loss=cross_entropy,
            optimizer=partial(on_device, make=make),
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda s: 0.9**s),
            engine=engine,
        )
        losses = [pipe.step(x.clone(), y.clone()) for x, y in data]
        pipe.drain()
        return pipe, [loss.item().hex() for loss in losses]

    (one, losses), (other, streamed) = trained("simulate"), trained(Streams(4, CPU))
    assert losses == streamed
    assert all(isinstance(stage.optimization.operation, RecordedOperation) for stage in other.stages.values())
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
