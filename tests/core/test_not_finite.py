"""Losses and gradients that are not finite: stopped and named, skipped, or left behind by going back."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Steep
from torch import nn

import offbeat
from offbeat.core.window import GradientWindow
from offbeat.errors import NotFinite, UserError
from offbeat.runs import build
from offbeat.runs.recipe import make_recipe
from offbeat.runs.record import lines
from offbeat.runs.train import MOST_ROLLBACKS, train


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(n: int, poisoned: tuple[int, ...] = ()) -> list:
    g = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(5, 4, generator=g, dtype=torch.float64), torch.randint(3, (5,), generator=g)) for _ in range(n)
    ]
    return [(x * math.nan if t in poisoned else x, y) for t, (x, y) in enumerate(made)]


def pipeline(method: offbeat.Method, **options) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        layers(),
        3,
        method=method,
        cuts=[2, 4],
        loss=nn.functional.cross_entropy,
        seed=1,
        sample=batches(1)[0][0],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        **options,
    )


def run(pipe: offbeat.Pipeline, data: list) -> list[torch.Tensor]:
    for x, y in data:
        pipe.step(x, y)
    pipe.drain()
    return [p.detach().clone() for p in pipe.model.parameters()]


def test_a_loss_that_is_not_finite_stops_and_is_named():
    with pytest.raises(NotFinite, match=r"the loss of batch 6 is nan .seen at stage 3 of 3") as raised:
        run(pipeline(offbeat.ADL(M=2)), batches(12, poisoned=(6,)))
    assert raised.value.batches == (6,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_finite_exactly_if_all_their_values_are(dtype):
    largest = torch.finfo(dtype).max
    for values, finite in {
        (1.0, -1.0): True,
        (largest, largest): True,  # their sum is not
        (largest, -largest): True,
        (math.inf, 1.0): False,
        (math.inf, -math.inf): False,
        (1.0, math.nan): False,
    }.items():
        parameters = {name: torch.zeros(2, 1, dtype=dtype, requires_grad=True) for name in "ab"}
        window = GradientWindow(parameters)
        assert window.finite()
        parameters["b"].grad = torch.tensor(values, dtype=dtype)[:, None]
        assert window.finite() is finite, values
        parameters["a"].grad = torch.ones(2, 1, dtype=dtype)
        assert window.finite() is finite, values


def test_micro_batches_are_named_by_their_batch():
    with pytest.raises(NotFinite, match="the loss of micro-batch 1 of 2 of batch 6"):
        run(pipeline(offbeat.GPipe(m=2)), batches(12, poisoned=(6,)))


def test_a_local_loss_is_watched_in_every_stage():
    with pytest.raises(NotFinite, match=r"the loss of batch 2 is nan .seen at stage 1"):
        run(pipeline(offbeat.Pred()), batches(5, poisoned=(2,)))


def test_a_gradient_that_is_not_finite_stops_and_is_named():
    pipe = pipeline(offbeat.ADL(M=2))
    stage, original = pipe.stages[1], pipe.stages[1].network.module.forward
    stage.network.module.forward = lambda x: Steep()(original(x))
    with pytest.raises(NotFinite, match=r"the gradient of stage 1 of 3 is not finite in update 0 \(batches 0 to 1\)"):
        run(pipe, batches(12))


@pytest.mark.parametrize(
    "method",
    [
        offbeat.ADL(M=2),
        offbeat.ADL(M=1, weights="hybrid"),
        offbeat.FR(),
        offbeat.DGL(),
        offbeat.GPipe(m=2),
        offbeat.BP(),
    ],
    ids=lambda m: m.name + m.weights,
)
def test_skipping_leaves_out_that_batch_and_nothing_else(method):
    pipe = pipeline(method, on_nan="skip")
    skipped = run(pipe, batches(14, poisoned=(6,)))
    assert all(torch.isfinite(p).all() for p in skipped)
    assert max(report.skipped for report in pipe.reports()) == method.m
    clean = run(pipeline(method, left_out=[6]), batches(14))
    assert all(map(torch.equal, skipped, clean)), "as if that batch had given no gradient"
    plain = run(pipeline(method), batches(14))
    assert not all(map(torch.equal, clean, plain))


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.FR(), offbeat.BP()], ids=lambda m: m.name)
def test_a_batch_that_is_skipped_leaves_no_trace_in_batch_norm(method):
    torch.manual_seed(0)
    net = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))]
    pipe = offbeat.Pipeline(
        net,
        method=method,
        loss=nn.functional.cross_entropy,
        on_nan="skip",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    for x, y in batches(8, poisoned=(3,)):
        pipe.step(x.float(), y)
    pipe.drain()
    for part in pipe.model:
        assert part[1].running_mean.isfinite().all()
        assert part[1].running_var.isfinite().all()
        assert int(part[1].num_batches_tracked) == 7


def test_a_batch_that_is_left_out_leaves_no_trace_in_batch_norm():
    def net() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Tanh(), nn.Linear(6, 3))]

    pipe = offbeat.Pipeline(
        net(),
        method=offbeat.ADL(M=1),
        loss=nn.functional.cross_entropy,
        left_out=[3],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    for x, y in batches(8, poisoned=(3,)):
        pipe.step(x.float(), y) if not x.isnan().any() else pipe.step(torch.full((5, 4), 1e6), y)
    pipe.drain()
    assert pipe.model[0][1].running_mean.abs().max() < 100
    assert int(pipe.model[0][1].num_batches_tracked) == 7


def test_a_synthesiser_learns_nothing_from_a_batch_that_is_not_finite():
    pipe = pipeline(offbeat.DNI(), on_nan="skip")
    trained = run(pipe, batches(14, poisoned=(6,)))
    heads = [
        p for stage in pipe.stages.values() if stage.feedback.head is not None for p in stage.feedback.head.parameters()
    ]
    assert all(torch.isfinite(p).all() for p in (*trained, *heads))
    assert [report.skipped for report in pipe.reports()] == [1, 1, 1], "that batch alone"


def test_a_batch_that_is_left_out_teaches_no_synthesiser():
    twice = [run(pipeline(offbeat.DNI(), left_out=[6]), batches(14, poisoned=poisoned)) for poisoned in ((), (6,))]
    assert all(map(torch.equal, *twice))


def test_micro_batches_that_are_left_out_leave_no_trace_in_deferred_statistics():
    torch.manual_seed(0)
    net = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Tanh(), nn.Linear(6, 3))]
    pipe = offbeat.Pipeline(
        net,
        method=offbeat.GPipe(m=2),
        loss=nn.functional.cross_entropy,
        left_out=[3],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    for t, (x, y) in enumerate(batches(8)):
        pipe.step(x.float() if t != 3 else torch.full((5, 4), 1e6), y)
    pipe.drain()
    assert pipe.model[0][1].running_mean.abs().max() < 100
    assert int(pipe.model[0][1].num_batches_tracked) == 7


@pytest.fixture
def poisoned(monkeypatch):
    """The eighth batch of the first epoch of real digits holds NaN."""
    opened = build.open_data

    def with_poison(recipe):
        data = opened(recipe)

        def epoch(*, batch_size, epoch, skip=0, **others):
            made = data.train(batch_size=batch_size, epoch=epoch, skip=skip, **others)
            for number, (x, y) in enumerate(made, skip // batch_size):
                yield (x * math.nan if (epoch, number) == (0, 7) else x), y

        facts = ("shape", "classes", "train_samples", "test_samples", "test")
        return SimpleNamespace(train=epoch, **{name: getattr(data, name) for name in facts})

    monkeypatch.setattr(build, "open_data", with_poison)


RECIPE = make_recipe(
    model="resnet8",
    data="digits",
    K=2,
    M=2,
    epochs=1,
    batch_size=64,
    engine="simulate",
    threads_per_stage=1,
    checkpoint_every="3b",
)


def test_a_run_that_stops_names_its_last_good_checkpoint(poisoned, tmp_path):
    with pytest.raises(NotFinite, match=r"the loss of batch 7 is nan.*last good checkpoint: .*000000006"):
        train(RECIPE, out=tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["kind"] == "failed"


def test_rolling_back_continues_without_the_batch(poisoned, tmp_path, capsys):
    result = train(replace(RECIPE, on_nan="rollback"), out=tmp_path / "run")
    assert result is not None
    assert math.isfinite(result["loss"])
    assert "resuming from the last checkpoint" in capsys.readouterr().err
    found = lines(tmp_path / "run")
    assert any(line["kind"] == "resumed" and line["batch"] == 6 for line in found)
    assert found[-1]["kind"] == "result"


def test_rolling_back_is_refused_under_torchrun(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="on_nan='rollback' under torchrun"):
        train(replace(RECIPE, on_nan="rollback"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_skipping_in_a_run_is_counted_in_its_metrics(poisoned, tmp_path):
    train(replace(RECIPE, on_nan="skip", model="mlp"), out=tmp_path / "run")
    assert [line["skipped"] for line in lines(tmp_path / "run") if line["kind"] == "train"][-1] == 1


def test_what_rolling_back_cannot_mend_ends(tmp_path, capsys):
    with pytest.raises(NotFinite):
        train(replace(RECIPE, on_nan="rollback", lr=1e30, warmup=0.0), out=tmp_path / "run")
    assert capsys.readouterr().err.count("resuming from") == MOST_ROLLBACKS


def test_a_window_left_out_is_a_version_where_forwards_use_the_one_before():
    """As one whose update has the learning rate 0: the forwards that follow use the same versions."""

    class Last(nn.Linear):
        """With gradients that are not finite where its inputs are large."""

        def forward(self, z):
            found = super().forward(z)
            return Steep()(found) if bool((z.abs() > 0.999).all()) else found

    def trained(rate_of_third: float, factor: float, **options) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Last(4, 3)],
            method=offbeat.TwoBW(M=2),
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: rate_of_third if s == 2 else 1.0),
            **options,
        )
        given = torch.Generator().manual_seed(1)
        for t in range(14):
            x, y = torch.randn(5, 4, generator=given), torch.randint(3, (5,), generator=given)
            pipe.step(x * factor if t in (4, 5) else x, y)
        return dict(pipe.drain().state_dict())

    expected = trained(0.0, 1.0)
    found = trained(1.0, 1e5, on_nan="skip")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
