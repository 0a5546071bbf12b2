"""Engine `streams` on a GPU: captured graphs give the bits of simulate, and nothing races."""

from __future__ import annotations

import gc
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat import models
from offbeat.core.corrections import Corrections
from offbeat.engines.streams import Streams
from offbeat.errors import NotFinite, NotRecorded
from offbeat.graphs.device_guard import CHECK_INTERVAL
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.methods import METHODS, named, parsed, settings_of, with_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
K, N, GPU = 4, 41, torch.device("cuda")


def network(wide: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(given, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
        for given in (3, wide, wide)
    ]
    return nn.Sequential(*blocks, nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(wide * 16, 10)))


def batches(n: int = N, poisoned: tuple[int, ...] = (), short: bool = True) -> list:
    generator = torch.Generator().manual_seed(7)
    sizes = [32] * (n - 1) + [19 if short else 32]
    made = [
        (torch.randn(b, 3, 8, 8, generator=generator).to(GPU), torch.randint(10, (b,), generator=generator).to(GPU))
        for b in sizes
    ]
    return [(x * math.nan if t in poisoned else x, y) for t, (x, y) in enumerate(made)]


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True)


def pipeline(method: offbeat.Method, engine="streams", **options) -> offbeat.Pipeline:
    stages = 1 if method.workers > 1 else K
    return offbeat.Pipeline(
        network(),
        stages,
        method=method,
        cuts=[1, 2, 3][: stages - 1],
        loss=nn.functional.cross_entropy,
        device=GPU,
        engine=engine,
        seed=3,
        **{
            "optimizer": sgd,
            "scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 10)),
            **options,
        },
    )


def train(pipe: offbeat.Pipeline, data: list, drains: tuple[int, ...] = ()) -> list[torch.Tensor]:
    losses = []
    for t, (x, y) in enumerate(data):
        losses.append(pipe.step(x, y))
        x.fill_(7.0)
        if t in drains:
            pipe.drain()
    pipe.drain()
    return losses


def check_same(
    method: offbeat.Method, engine="streams", drains: tuple[int, ...] = (), data: int = N, **options
) -> offbeat.Pipeline:
    one, other = pipeline(method, "simulate", **options), pipeline(method, engine, **options)
    losses = [list(map(float, train(pipe, batches(data), drains))) for pipe in (one, other)]
    assert losses[0] == losses[1]
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert one.staleness == other.staleness
    return other


@pytest.mark.parametrize("name", [name for name in METHODS if not named(name).why_not_capturable()])
def test_every_lagged_method_gives_the_bits_of_simulate(name):
    check_same(named(name), drains=(14,))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("M", [1, 2, 4])
def test_adl_gives_the_bits_of_simulate_and_records_all_but_the_short_batch(M, weights):
    pipe = check_same(offbeat.ADL(M=M, weights=weights), drains=(20,))
    assert [worker.executor.irregular for worker in pipe.workers] == [1] * K
    assert all(isinstance(worker.executor.optimization.operation, RecordedOperation) for worker in pipe.workers)


@pytest.mark.parametrize("recompute", [True, [2]])
@pytest.mark.parametrize("M", [1, 2, 4])
def test_repeated_forwards_are_recorded_and_change_no_bit(M, recompute):
    method = offbeat.ADL(M=M, recompute=recompute)
    pipe = check_same(method, drains=(20,))
    assert [worker.executor.irregular for worker in pipe.workers] == [1] * K
    plain = pipeline(offbeat.ADL(M=M), "simulate")
    train(plain, batches(), (20,))
    assert all(map(torch.equal, plain.model.state_dict().values(), pipe.model.state_dict().values()))


@pytest.mark.parametrize(
    "name", sorted(name for name in METHODS if "recompute" in settings_of(name) and name not in ("bp", "gpipe"))
)
def test_every_method_that_repeats_forwards_gives_the_bits_of_simulate(name):
    stashed = {"pb": {"weights": "stash"}, "spectrain": {"version": 2}}.get(name, {})
    check_same(with_settings(name, {**stashed, "recompute": True}), drains=(14,))


@pytest.mark.parametrize("seed", [1, 2])
def test_repeated_forwards_that_sleep_at_random_change_no_bit(seed):
    check_same(offbeat.ADL(M=2, recompute=True), Streams(K, GPU, sleeps=seed), drains=(20,))


def test_recorded_stages_that_repeat_their_forwards_need_less_memory():
    def peak(recompute: bool) -> int:
        gc.collect()  # pipelines of other tests, whose memory would be returned in between
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.manual_seed(0)
        blocks = [nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(24)]) for _ in range(3)]
        pipe = offbeat.Pipeline(
            [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))],
            method=offbeat.ADL(M=2, recompute=recompute),
            loss=nn.functional.cross_entropy,
            optimizer=sgd,
            device=GPU,
            engine="streams",
        )
        for _ in range(30):
            pipe.step(torch.randn(64, 16, 32, 32, device=GPU), torch.randint(10, (64,), device=GPU))
        pipe.drain()
        assert [worker.executor.eager for worker in pipe.workers] == [None] * 4
        return torch.cuda.memory_reserved() - before

    plain = peak(False)
    assert peak(True) < 0.6 * plain


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("make", [offbeat.ADL, offbeat.ADL1F1B])
def test_streams_that_sleep_at_random_change_no_bit(make, M, seed):
    check_same(make(M=M, corrector="sc"), Streams(K, GPU, sleeps=seed), drains=(20,))


@pytest.mark.parametrize("M", [1, 4])
def test_several_ticks_of_one_launch_that_sleep_at_random_change_no_bit(M):
    """With a constant rate, which does not divide launches."""
    pipe = check_same(
        offbeat.ADL1F1B(M=M, corrector="sc"), Streams(K, GPU, sleeps=4), drains=(20,), scheduler=None, data=200
    )
    assert any(len(operations) > 4 * 3 * K for operations in pipe.engine.launch_queue.joined)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-3, fused=True, capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=1e-3, capturable=True),
}
CORRECTORS = (
    "sc",
    "lwp:fraction=0.5+sc:extra=1",
    "lwp:form=weight",
    "lwp+t1:power=1+sc",
    "lookahead+sc",
    "t1:power=1+lookahead",
    "auto",
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("corrector", CORRECTORS)
def test_correctors_of_all_optimizers_are_recorded_and_change_no_bit(corrector, optimizer):
    pipe = check_same(offbeat.ADL(M=2, corrector=corrector), drains=(20,), optimizer=OPTIMIZERS[optimizer])
    stages = [worker.executor for worker in pipe.workers]
    assert all(isinstance(stage.optimization.operation, RecordedOperation) for stage in stages)
    if corrector.startswith("lwp"):
        predictions = [stage.policy_work for stage in stages[:-1]]  # the last stage is not late
        assert all(any(isinstance(key, tuple) and work for key, work in each.items()) for each in predictions)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_with_correctors_do_not_wait_for_the_device(optimizer, no_synchronization):
    """After the first steps, which compare the step counters of the parameters."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(8, 8, device=GPU)) for _ in range(3)]
    made = OPTIMIZERS[optimizer](parameters)
    for group in made.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=GPU)
    corrections = Corrections(offbeat.ADL(M=2, corrector="t1:power=1+lwp+sc+lookahead"), 1, 2, made)
    predict = corrections.forward_weights({str(number): parameter for number, parameter in enumerate(parameters)})
    assert (len(corrections.active), predict is None) == (4, False)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        corrections.step()
        predict()

    for _ in range(3):
        step()
    with no_synchronization():
        step()
    assert all(parameter.isfinite().all() for parameter in parameters)


@pytest.mark.parametrize(
    ("M", "precision", "seed"),
    [
        (4, "fp32", None),
        (4, "fp32", 1),
        (3, "bf16", 2),
        (6, "fp32", 3),
    ],
)
def test_batches_of_a_window_without_lag_run_at_once(M, precision, seed):
    pipe = check_same(offbeat.BP(M=M), Streams(K, GPU, sleeps=seed), drains=(19,), precision=precision)
    assert [worker.executor.irregular for worker in pipe.workers] == [1] * K
    assert any(pipe.engine.launch_queue.joined.values())


@pytest.mark.parametrize("phases", ["3", "bp@4+adl-1f1b@6"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", [None, 1])
def test_methods_that_follow_each_other_give_the_bits_of_simulate(phases, precision, seed):
    method = with_settings(*parsed(f"adl:M=2,corrector=sc,staleness_warmup={phases}"))
    pipe = check_same(method, Streams(K, GPU, sleeps=seed), drains=(30,), precision=precision)
    assert [worker.executor.eager for worker in pipe.workers] == [None] * K


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL1F1B(M=2), offbeat.BP(M=4)], ids=lambda m: m.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_of_products_do_not_share_what_the_library_works_in(method, precision):
    """Products over many numbers are split, and their parts lie in a workspace that a stream has once."""

    def trained(engine) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(2048 if i % 2 else 64, 64 if i % 2 else 2048), nn.Tanh()) for i in range(8)]
        stages = [nn.Sequential(*layers[i : i + 2]) for i in (0, 2, 4, 6)]
        pipe = offbeat.Pipeline(
            stages,
            method=method,
            loss=nn.functional.cross_entropy,
            optimizer=sgd,
            device=GPU,
            engine=engine,
            seed=3,
            precision=precision,
        )
        data = [(torch.randn(32, 64, device=GPU), torch.randint(64, (32,), device=GPU)) for _ in range(60)]
        losses = [pipe.step(x, y) for x, y in data]
        pipe.drain()
        return list(map(float, losses)), list(pipe.model.parameters())

    (one, weights), (other, weights_there) = trained("simulate"), trained(Streams(4, GPU))
    assert one == other
    assert all(map(torch.equal, weights, weights_there))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "ASGD"])
def test_every_capturable_optimizer_is_recorded_and_gives_the_bits_of_simulate(kind):
    pipe = check_same(offbeat.ADL(M=2), optimizer=lambda p: getattr(torch.optim, kind)(p, lr=0.01, capturable=True))
    assert all(isinstance(worker.executor.optimization.operation, RecordedOperation) for worker in pipe.workers)


def test_an_optimizer_that_is_not_capturable_is_reported_and_gives_the_same_bits():
    with pytest.warns(NotRecorded, match="give capturable=True"):
        check_same(offbeat.ADL(M=2), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_bfloat16_gives_the_bits_of_simulate(weights):
    check_same(offbeat.ADL(M=2, weights=weights), precision="bf16")


@pytest.mark.parametrize("far", [3, CHECK_INTERVAL + 7])
def test_a_loss_that_is_not_finite_is_named(far):
    pipe = pipeline(offbeat.ADL(M=2))
    with pytest.raises(NotFinite, match=f"the loss of batch {far} is not finite .seen at stage 4 of 4"):
        train(pipe, batches(4 * CHECK_INTERVAL, poisoned=(far,)))
    assert pipe.batches <= far + 3 * CHECK_INTERVAL


def test_a_state_saved_in_flight_resumes_bit_for_bit():
    method = offbeat.ADL(M=2)
    whole, saved, again = (pipeline(method) for _ in range(3))
    train(whole, batches())
    for x, y in batches()[:14]:
        saved.step(x, y)
    again.load_stage_states(
        pytree.tree_map_only(torch.Tensor, torch.clone, saved.stage_states()), batches=14
    )  # as if from a file
    train(again, batches()[14:])
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))


def test_10_000_turns_leak_no_memory():
    pipe = pipeline(offbeat.ADL(M=4))
    data = batches(16, short=False)

    def turns(n: int) -> int:
        for t in range(n):
            pipe._local.step([data[t % len(data)]])
        pipe.reports()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = turns(500)
    assert turns(10_000) <= before + 2**20


def test_a_model_on_the_gpu_is_cut_inside_its_blocks_by_a_batch_in_host_memory():
    model = models.build("gpt:layers=2,width=16,heads=2,context=8", shape=(8,), classes=16).cuda()

    def loss(scores, tokens):
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

    optimizer = partial(torch.optim.SGD, lr=0.1)
    pipe = offbeat.Pipeline(model, 4, method="adl:M=2", loss=loss, optimizer=optimizer, device="cuda", units="layers")
    tokens = torch.randint(16, (4, 8))
    pipe.step(tokens, tokens)
    pipe.drain()
    assert len(pipe.cuts) == 3
