"""What users may do and the package itself never does: memory reused or written in place, states loaded twice, hooks.

Each case gives the numbers of plain PyTorch or is refused with an error.
"""

from __future__ import annotations

import copy

import pytest
import torch
from captured import capture
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import offbeat
from offbeat.core.precision import PrecisionPolicy
from offbeat.engines.deferred_tensor import DeferredTensor
from offbeat.engines.streams import Streams
from offbeat.errors import NotFinite, NotRecorded, UserError
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.runs import record
from offbeat.runs.recipe import make_recipe

CPU = torch.device("cpu")


def batches(n: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(n)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))


def pipeline(method="adl", model=None, K: int = 2, **given) -> offbeat.Pipeline:
    given = {"loss": cross_entropy, "optimizer": sgd, "engine": "simulate", "sample": batches(1)[0][0], **given}
    model = network() if model is None else model
    return offbeat.Pipeline(model, K, method=method, cuts=[1][: K - 1], **given)


def train(pipe: offbeat.Pipeline, data) -> list[Tensor]:
    for x, y in data:
        pipe.step(x, y)
    pipe.drain()
    heads = [p for stage in pipe.stages.values() if stage.feedback.head for p in stage.feedback.head.parameters()]
    return [p.detach().clone() for p in (*pipe.model.parameters(), *heads)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# ---- batches


@pytest.mark.parametrize(
    ("method", "K"),
    [
        (offbeat.ADL(M=2), 2),
        (offbeat.ASGD(3), 1),
        (offbeat.DCASGD(3), 1),
        (offbeat.DNI(True), 2),
        (offbeat.DNI(), 2),
        (offbeat.AsyncDGL(), 2),
        (offbeat.BP(), 2),
        (offbeat.GPipe(2), 2),
        (offbeat.DGL(), 2),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_loader_may_use_the_memory_of_a_batch_again_labels_too(method, K):
    def refilled():
        x, y = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)
        for there in batches():
            x.copy_(there[0])
            y.copy_(there[1])
            yield x, y

    assert same(train(pipeline(method, K=K), batches()), train(pipeline(method, K=K), refilled()))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sub_(0.5).div_(2.0))


@pytest.mark.parametrize("engine", ["simulate", "streams"])
@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_a_network_may_write_into_its_input_and_be_saved_in_flight(weights, engine):
    def made() -> offbeat.Pipeline:
        torch.manual_seed(0)
        return offbeat.Pipeline(
            [InPlace(), nn.Linear(4, 3)],
            method=offbeat.ADL(M=2, weights=weights),
            loss=cross_entropy,
            optimizer=sgd,
            engine=Streams(2, CPU) if engine == "streams" else engine,
        )

    whole, first, second = made(), made(), made()
    first.keep()
    for x, y in batches()[:7]:
        first.step(x, y)
    second.load_stage_states(first.stage_states(), batches=7)
    assert same(train(whole, batches()), train(second, batches()[7:]))


# ---- states


@pytest.mark.parametrize("done", [0, 1, 3, 6])
@pytest.mark.parametrize(
    "corrector",
    [
        None,
        "lwp+sc",
        offbeat.WeightPrediction(form="weight"),  # which remembers the last step
    ],
    ids=["plain", "corrected", "remembering"],
)
def test_a_state_can_be_loaded_again_and_again_also_where_training_has_gone_on(corrector, done):
    method = offbeat.ADL(M=2, corrector=corrector)
    expected = train(pipeline(method), batches())
    pipe = pipeline(method)
    for x, y in batches()[:done]:
        pipe.step(x, y)
    kept = clone(pipe.stage_states())
    for _ in range(2):
        pipe.drain()
        pipe.load_stage_states(kept, batches=done)
        for x, y in batches()[done:]:
            pipe.step(x, y)
        assert same(train(pipe, []), expected)


def clone(tree):
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def test_states_that_do_not_fit_are_refused_in_one_line():
    pipe = pipeline(offbeat.ADL(M=2))
    for x, y in batches()[:7]:
        pipe.step(x, y)
    state = clone(pipe.stage_states())
    fresh = offbeat.Pipeline(network(), 2, method="adl", loss=cross_entropy, optimizer=sgd)
    with pytest.raises(UserError, match=r"load_stage_states\(\) before there are stages.*give sample="):
        fresh.load_stage_states(state, 7)
    with pytest.raises(UserError, match=r"load_stage_states\(\) with batches in flight: call drain\(\)"):
        pipe.load_stage_states(state, 7)
    with pytest.raises(UserError, match=r"batches=77.*, but this state was saved after 7 batches"):
        pipeline(offbeat.ADL(M=2)).load_stage_states(state, 77)
    for tree in ({}, "x", None, {1: {}, 2: {}}):
        with pytest.raises(UserError, match="the state of stage 1 is not one of a pipeline like this"):
            pipeline(offbeat.ADL(M=2)).load_stage_states(tree, 7)
    for name, has in (("gpipe", 0), ("bp", 0), ("adl-1f1b", 1)):
        with pytest.raises(UserError, match=f"stage 1 with 2 batches in flight, where {name} has {has}"):
            pipeline(name).load_stage_states(state, 7)
    with pytest.raises(UserError, match="of another optimizer than Adam, with momentum: make the same one"):
        pipeline(offbeat.ADL(M=2), optimizer=lambda p: torch.optim.Adam(p)).load_stage_states(state, 7)
    scheduled = pipeline(offbeat.ADL(M=2), scheduler=SCHEDULES["steps"])
    with pytest.raises(UserError, match="the state of stage 1 is not one of a pipeline like this"):
        scheduled.load_stage_states(state, 7)


# ---- what is given


def test_what_would_train_nothing_or_too_much_is_refused():
    def refused(match: str, **given) -> None:
        with pytest.raises(UserError, match=match):
            train(pipeline(**given), batches())

    refused("the loss of batch 0 has no gradient", loss=lambda output, y: cross_entropy(output, y).detach())
    refused("the loss of batch 0 has no gradient", loss=lambda output, y: cross_entropy(output.detach(), y))
    foreign = network()
    refused("holds other parameters than those", model=foreign, optimizer=lambda _: sgd(foreign.parameters()))
    refused("optimizer.parameters. returned an object of type NoneType", optimizer=lambda _: None)
    refused("scheduler.optimizer. returned an object of type NoneType", scheduler=lambda _: None)
    hooked = network()
    hooked[0][0].weight.register_hook(lambda gradient: gradient * 0)
    refused("parameter 0.0.weight has a hook on its gradient", model=hooked)
    late = network()
    late[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    refused("parameter 1.bias has a hook on its gradient", model=late)
    if not torch.cuda.is_available():
        for K in (1, 2):
            refused("device 'cuda', but torch sees no CUDA device here", device="cuda", engine=None, K=K)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(1, 2, 3)], "batch 0 of the loader is of type tuple with 3 entries: give pairs"),
        ([{"x": 1, "y": 2}], "batch 0 is of type dict without a tensor: give a tensor"),
        ([torch.zeros(5, 4)], "batch 0 of the loader is of type Tensor: give pairs"),
        (5, "the loader is of type int: give an iterable"),
    ],
)
def test_a_loader_that_gives_no_pairs_is_reported(given, message):
    with pytest.raises(UserError, match=message):
        pipeline().fit(given)


def test_an_interruption_within_a_batch_is_the_end_of_the_pipeline():
    class Interrupted(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise KeyboardInterrupt
            return x

    last = nn.Sequential(Interrupted(), nn.Linear(4, 3))
    pipe = pipeline(model=nn.Sequential(nn.Linear(4, 4), last))
    pipe.step(*batches()[0])
    last[0].armed = True
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*batches()[1])
    last[0].armed = False
    with pytest.raises(UserError, match="it was interrupted within batch 1"):
        pipe.step(*batches()[2])


# ---- what is not finite


class Cliff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.bad, float("inf"), 1.0) * gradient, None


class Net(nn.Module):
    """A large input spoils the gradient, not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Cliff.apply(torch.tanh(x * self.w), (x[:, :1] > 50).any())


def regression(bad: tuple[int, ...] = (), n: int = 10) -> list[tuple[Tensor, Tensor]]:
    data = [(x.double(), x.double().roll(1)) for x, _ in batches(n)]
    for t in bad:
        data[t][0][0, 0] = 99.0
    return data


@pytest.mark.parametrize("bad", [(), (3,), (0, 5)])
def test_2bw_uses_the_version_before_also_after_a_skipped_update(bad):
    pipe = offbeat.Pipeline(
        Net(),
        1,
        method=offbeat.TwoBW(M=1),
        loss=mse_loss,
        on_nan="skip",
        engine="simulate",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3),
    )
    data = regression(bad)
    train(pipe, data)
    versions = [Net().w.detach().clone()]
    for s, (x, y) in enumerate(data):
        w = versions[max(0, s - 1)].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(((torch.tanh(x * w) - y) ** 2).mean(), w)
        versions.append(versions[-1] - (0 if s in bad else 0.3) * gradient)
    assert torch.allclose(pipe.model.w, versions[-1], rtol=0, atol=1e-15)


@pytest.mark.parametrize("left_out", [(), (8,), (8, 9)])
@pytest.mark.parametrize(("K", "method"), [(1, offbeat.BP()), (2, offbeat.ADL(M=1)), (2, offbeat.ADL(M=2))])
def test_recorded_stages_blame_the_batches_that_simulated_ones_do(K, method, left_out):
    blamed = []
    for engine in ("simulate", Streams(K, CPU)):
        pipe = offbeat.Pipeline(
            [Net() for _ in range(K)],
            method=method,
            loss=mse_loss,
            left_out=left_out,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.3, fused=True),
            engine=engine,
        )
        with pytest.raises(NotFinite) as raised:
            train(pipe, regression((6,), n=12))
        blamed.append((raised.value.batches, str(raised.value)))
    assert blamed[0] == blamed[1]


def test_a_micro_batch_that_is_not_finite_leaves_no_trace_in_deferred_statistics():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 3))
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(6)]
    data[2][0][5, 1] = float("nan")
    pipe = pipeline(offbeat.GPipe(4), model=model, on_nan="skip", sample=None)
    train(pipe, data)
    assert all(bool(buffer.isfinite().all()) for buffer in pipe.model.buffers())
    assert all(bool(parameter.isfinite().all()) for parameter in pipe.model.parameters())


def test_what_a_look_finds_ends_the_pipeline():
    data = batches(8)
    data[3][0][0, 0] = float("nan")
    pipe = pipeline(engine=Streams(2, CPU))
    for x, y in data[:5]:
        pipe.step(x, y)
    with pytest.raises(NotFinite, match="the loss of batch 3"):
        pipe.reports()
    with pytest.raises(UserError, match="this pipeline has stopped"):
        pipe.step(*data[5])


# ---- recorded stages


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(both[0])


@pytest.mark.parametrize("method", [offbeat.BP(), offbeat.ADL(M=2)], ids=lambda method: method.name)
def test_parameters_of_an_unused_output_are_left_alone(method):
    def trained(engine) -> list[Tensor]:
        torch.manual_seed(0)
        return train(
            offbeat.Pipeline(
                [Two(), First()],
                method=method,
                loss=cross_entropy,
                engine=engine,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
            ),
            batches(),
        )

    expected = trained("simulate")
    with pytest.warns(NotRecorded, match="stage 1 is not recorded and runs eagerly: the stage above does not use all"):
        assert same(trained(Streams(2, CPU)), expected)


@pytest.mark.parametrize("name", ["gpipe", "dgl", "dni", "dgl-async"])
def test_an_engine_of_streams_does_not_record_what_is_not_alike(name):
    assert same(train(pipeline(name), batches()), train(pipeline(name, engine=Streams(2, CPU)), batches()))


SCHEDULES = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60),
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_may_change_the_momentum_of_recorded_updates(monkeypatch, schedule):
    def rates(optimizer, device):
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
            group["lr"] = torch.tensor(float(group["lr"]))
        return optimizer

    monkeypatch.setattr("offbeat.core.optimization._rates_on_device", rates)
    given = {"method": offbeat.ADL(M=1), "scheduler": SCHEDULES[schedule]}
    expected = train(pipeline(**given), batches(40))
    launched = capture(monkeypatch, 1)
    pipe = pipeline(**given, engine=Streams(2, CPU))
    assert same(train(pipe, batches(40)), expected)
    assert (max(launched) > 1) == (schedule == "steps"), "or updates wait for the host"


def test_options_of_an_optimizer_that_change_are_not_taken_from_a_recording():
    pipe = pipeline(offbeat.ADL(M=1), engine=Streams(2, CPU), scheduler=SCHEDULES["steps"])
    other = pipeline(offbeat.ADL(M=1), scheduler=SCHEDULES["steps"])
    for t, (x, y) in enumerate(batches(20)):
        for one in (pipe, other):
            if t == 12:
                for stage in one.stages.values():
                    stage.optimization.optimizer.param_groups[0]["weight_decay"] = 0.5
            one.step(x, y)
        recorded = [isinstance(worker.executor.optimization.operation, RecordedOperation) for worker in pipe.workers]
        assert t not in (11, 13) or recorded == [t == 11] * 2, "a recording has the options that it was made with"
    assert same(train(pipe, []), train(other, []))


def test_a_loss_that_is_yet_to_come_is_a_number_like_any_other(monkeypatch):
    capture(monkeypatch)
    pipe = pipeline(engine=Streams(2, CPU))
    losses = [pipe.step(x, y) for x, y in batches()]
    assert isinstance(losses[0], DeferredTensor)
    expected = f"{float(losses[-1]):.3f}"
    assert f"{losses[-1]:.3f}" == expected
    assert f"{losses[3]:.3f}" == f"{copy.deepcopy(losses[3]).item():.3f}"
    assert torch.equal(torch.stack(losses[4:6]), torch.tensor([losses[4].item(), losses[5].item()]))


# ---- by turns, and on disk


def test_pipelines_by_turns_leave_each_other_their_precision():
    def made(precision: str) -> offbeat.Pipeline:
        pipe = pipeline("bp", model=nn.Linear(4, 3), K=1)
        pipe._local.guard.precision = PrecisionPolicy(precision, "cpu", False)
        return pipe

    before = torch.get_float32_matmul_precision()
    one, other = made("tf32").steps(batches(3)), made("tf32").steps(batches(6))
    next(one)
    assert torch.get_float32_matmul_precision() == before
    next(other)
    list(one)
    list(other)
    assert torch.get_float32_matmul_precision() == before


class Lists(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor):
        made = torch.relu(self.norm(self.layer(x)))
        return {"a": made, "b": [x]} if self.kind is dict else [made, x]


class Mean(nn.Module):
    def __init__(self, key: str | int) -> None:
        super().__init__()
        self.key, self.layer = key, nn.Linear(4, 3)

    def forward(self, given) -> Tensor:
        return self.layer(given[self.key].mean((2, 3)))


@pytest.mark.parametrize("kind", [dict, list])
def test_fused_stages_may_give_lists_and_dicts(kind):
    stages = [Lists(kind), Mean("a" if kind is dict else 0)]
    pipe = offbeat.Pipeline(stages, method="adl", loss=cross_entropy, engine="simulate", fuse=True, optimizer=sgd)
    assert pipe.step(torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 0])).isfinite()


def test_a_damaged_line_of_the_records_is_reported_in_one_line(tmp_path):
    folder = record.RunFolder.create(tmp_path / "run", make_recipe(model="mlp", data="digits"))
    folder.line("note", text="first")
    file = tmp_path / "run/metrics.jsonl"
    file.write_text(file.read_text() + "garbage\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2, is damaged .*: remove that line"):
        record.lines(tmp_path / "run")
