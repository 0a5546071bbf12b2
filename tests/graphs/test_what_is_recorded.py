"""Which stages, updates and predictions are recorded, and what is reported of others, which run eagerly."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from captured import capture
from stream_cases import ALIKE, CPU, K, N, batches, check_same, network, on_device, pipeline, recorded, sgd, train
from torch import nn

import offbeat
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import NotRecorded, UserError
from offbeat.graphs import recorder
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.graphs.recorder import Recorder
from offbeat.methods import METHODS, named


def test_a_backward_that_cannot_be_recorded_leaves_no_version(monkeypatch):
    capture(monkeypatch)
    record, stages = Recorder.record, []

    def refusing(recorder, work, pool=None):
        if recorder is stages[0].recorder and "SlotRecordings.backward" in repr(work):
            raise RuntimeError("not here")
        return record(recorder, work, pool)

    def noting(stage, *given, original=RecordedStage.__init__, **options):
        original(stage, *given, **options)
        stages.append(stage)

    monkeypatch.setattr(RecordedStage, "__init__", noting)
    monkeypatch.setattr(Recorder, "record", refusing)
    with pytest.warns(offbeat.NotRecorded, match="stage 1 is not recorded and runs eagerly: not here"):
        check_same(offbeat.ADL(M=2), data=lambda: batches(60), optimizer=lambda p: sgd(p, fused=True))


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (sgd, "SGD has fused=False: give fused=True"),
        (torch.optim.Adam, "Adam has capturable=False: give capturable=True"),
        (lambda parameters: torch.optim.Adagrad(parameters), "Adagrad has fused=False: give fused=True"),
    ],
)
def test_an_optimizer_whose_updates_are_not_recorded_is_reported(monkeypatch, optimizer, why):
    capture(monkeypatch)
    monkeypatch.setattr(recorder, "captures", lambda device: True)
    pipe = pipeline(offbeat.ADL(M=2), optimizer=optimizer)
    with pytest.warns(NotRecorded) as told:
        train(pipe, batches())
    line = f"updates are not recorded, so that stages wait for them: {why}"
    assert [str(one.message) for one in told] == [line] * K  # of which Python shows one


@pytest.mark.parametrize("weights", ["stash", "hybrid"])
def test_predictions_at_rates_that_the_host_computes_are_not_recorded(monkeypatch, weights):
    capture(monkeypatch, seed=1)
    method = offbeat.ADL(M=2, weights=weights, corrector="lwp+t1:updates=8+sc")
    pipe = check_same(method, drains=(20,), optimizer=on_device, data=lambda: batches(60))
    assert [stage.eager for stage in recorded(pipe)] == [None] * K


class Gated(nn.Module):
    """Has a parameter that only batches of 6 use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.whole = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.always(x) + self.whole(x) if len(x) == 6 else self.always(x)


def test_an_update_of_other_parameters_than_recorded_is_recorded_anew(monkeypatch):
    """Adam's bias corrections are shared by parameters that have been stepped equally often."""
    capture(monkeypatch)

    def run(engine) -> tuple[offbeat.Pipeline, list]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            [nn.Linear(4, 4), Gated()],
            method=offbeat.ADL(M=1, corrector="lwp+sc"),
            engine=engine,
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, capturable=True),
        )
        generator, operations = torch.Generator().manual_seed(1), []
        for t in range(40):
            size = 3 if t in (17, 18) else 6
            pipe.step(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
            operations.append(getattr(pipe.stages[2].optimization, "operation", None))
        pipe.drain()
        return pipe, operations

    (here, _), (there, operations) = run("simulate"), run(Streams(2, CPU))
    assert all(map(torch.equal, here.model.parameters(), there.model.parameters()))
    assert isinstance(operations[16], RecordedOperation)
    assert isinstance(operations[-1], RecordedOperation)
    assert operations[16] is not operations[-1]


@pytest.mark.parametrize("other", range(2, 9))
def test_no_recorded_update_is_kept_after_one_of_other_parameters(monkeypatch, other):
    """Also not those of other places of the rates, where the one of the next place is not recorded yet."""
    capture(monkeypatch)
    pipe = offbeat.Pipeline(
        [nn.Linear(4, 4), Gated()],
        method=offbeat.ADL1F1B(M=1),
        engine=Streams(2, CPU),
        loss=nn.functional.cross_entropy,
        optimizer=partial(on_device, make=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, capturable=True)),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda s: 0.9**s),
    )
    for t in range(other + 1):
        before = list(pipe.stages[2].optimization.operations) if t else []
        size = 3 if t == other else 6
        pipe.step(torch.ones(size, 4), torch.zeros(size, dtype=torch.int64))
    pipe.engine.settle()
    assert not {id(each) for each in before if each} & {id(each) for each in pipe.stages[2].optimization.operations}


def test_skipping_bad_batches_reads_every_loss_and_records_nothing():
    with pytest.warns(offbeat.NotRecorded, match=r"stage . is not recorded and runs eagerly: on_nan='skip'"):
        pipe = check_same(offbeat.ADL(M=2), on_nan="skip", data=lambda: batches(poisoned=(6,)))
    assert all("on_nan" in stage.eager for stage in recorded(pipe))


def test_a_stage_that_draws_random_numbers_runs_eagerly_and_reports_why():
    torch.manual_seed(5)
    pipe = pipeline(offbeat.ADL(M=2), model=network(dropout=0.5))
    one = pipeline(offbeat.ADL(M=2), "simulate", model=network(dropout=0.5))
    with pytest.warns(offbeat.NotRecorded, match="stage 4 is not recorded and runs eagerly: it draws random numbers"):
        assert train(pipe, batches()) == train(one, batches())
    assert [stage.eager for stage in recorded(pipe)] == [None, None, None, "it draws random numbers"]
    assert recorded(pipe)[3].irregular == N


def test_a_batch_of_the_wrong_shape_raises_the_usual_error():
    with pytest.warns(offbeat.NotRecorded), pytest.raises(UserError, match="stage 1 cannot take batch 0 of shape"):
        pipeline(offbeat.ADL(M=2)).step(torch.randn(5, 3, 4, 4), torch.zeros(5, dtype=torch.int64))


def test_streams_need_a_gpu_and_methods_whose_iterations_are_alike():
    with pytest.raises(UserError, match="engine='streams' on device 'cpu': it runs the stages on streams of one GPU"):
        offbeat.Pipeline(network(), 2, loss=nn.CrossEntropyLoss(), optimizer=sgd, engine="streams")
    assert {name for name in METHODS if named(name).why_not_capturable()} == {
        "gpipe",
        "dgl",
        "dgl-async",
        "dni",
        "mostafa",
        "pred",
        "sim",
        "predsim",
    }


@pytest.mark.parametrize("name", [name for name in ALIKE if name not in ("asgd", "dc-asgd")])
def test_work_that_is_done_only_when_it_is_recorded_raises_nowhere(monkeypatch, name):
    """As on a GPU, where autograd sees the capture and nothing else: forwards of all slots at the first batch,
    backwards of all slots at the first gradient, when weights and inputs of some have been written again."""

    class Captured(recorder.Recorded):
        def __init__(self, work, **_: object) -> None:
            work()
            self.repeat = lambda: None

    monkeypatch.setattr(recorder, "Recorded", Captured)
    monkeypatch.setattr(recorder, "captures", lambda device: True)
    pipe = pipeline(named(name), optimizer=lambda p: sgd(p, fused=True))
    train(pipe, batches(40, short=False), drains=(20,))
    assert all(stage.eager is None for stage in recorded(pipe))


def test_a_method_with_irregular_iterations_is_reported_and_simulated():
    with pytest.warns(offbeat.NotRecorded, match="gpipe splits batches into micro-batches: its stages are not"):
        pipe = offbeat.Pipeline(
            network(), 2, method="gpipe", loss=nn.CrossEntropyLoss(), optimizer=sgd, device="cuda", engine="streams"
        )
    assert type(pipe.engine) is Simulate
