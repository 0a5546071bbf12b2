"""Models, optimizers and calls that a pipeline gets wrong unless somebody thought of them."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from cases import fingerprint, vectors
from reference import adl, data, mean_square
from test_adl_exact import close, pipeline, spy
from test_pipeline import CROSS_ENTROPY, linears, make
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

import offbeat
from offbeat.core.links import Message

POLICIES = ["stash", "hybrid", "replay"]


def trained(model, batches=None, **options) -> list[torch.Tensor]:
    pipe = make(model, **options)
    for x, y in batches or vectors(8):
        pipe.step(x, y)
    return [p.detach() for p in pipe.drain().parameters()]


# ---- models


def test_a_layer_that_stands_twice_in_a_sequence_runs_twice():
    torch.manual_seed(0)
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6), act, nn.Linear(6, 4))
    x, y = vectors(1)[0]
    expected = CROSS_ENTROPY(model(x), y)
    for cuts in ([1], [2], [3], [1, 3]):
        assert torch.equal(make(model, len(cuts) + 1, cuts=cuts).step(x, y), expected.detach())
    assert make([nn.Linear(6, 6), act, nn.Linear(6, 4), act]).K == 4


def test_a_sequence_with_a_mind_of_its_own_is_not_taken_for_a_plain_one():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    class Scaled(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.scale = nn.Parameter(torch.ones(1))

    hooked = linears(6, 6, 6)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    x, y = vectors(1)[0]
    for model in (Residual(*linears(6, 6, 6)), Scaled(*linears(6, 6, 6)), hooked):
        with pytest.raises(offbeat.UserError, match=r"not a plain nn\.Sequential"):
            make(model, K=2, cuts=[1], units="blocks")
        expected = CROSS_ENTROPY(model(x), y).detach()
        assert torch.equal(make(copy.deepcopy(model), K=1).step(x, y), expected)
        if model is hooked:
            with pytest.raises(offbeat.UserError, match="it has hooks"):
                make(model, K=2).step(x, y)
        else:
            assert torch.equal(make(model, K=2).step(x, y), expected)  # traced instead


@pytest.mark.parametrize("weights", ["stash", "replay"])
def test_activation_checkpointing_inside_a_stage_changes_nothing(weights):
    class Block(nn.Module):
        def __init__(self, recompute):
            super().__init__()
            self.inner, self.recompute = linears(6, 6, 6), recompute

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)

    plain, recomputed = (
        trained([Block(recompute), linears(6, 4)], method=offbeat.ADL(M=1, weights=weights))
        for recompute in (False, True)
    )
    assert all(map(torch.equal, plain, recomputed))


def test_a_parameter_that_no_version_can_stand_in_for_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(6))
            self.list = [self.weight]

        def forward(self, x):
            return x @ self.list[0]

    with pytest.raises(offbeat.UserError, match=r"stage 1 uses 0\.weight not only as a parameter"):
        trained([Hidden(), nn.Linear(6, 4)])
    before = torch.eye(6)
    assert not torch.equal(trained([Hidden(), nn.Linear(6, 4)], method=offbeat.ADL(M=1, weights="replay"))[0], before)


@pytest.mark.parametrize("weights", POLICIES)
def test_a_module_that_sometimes_writes_into_its_input_keeps_the_exact_gradient(weights):
    class Erase(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear, self.calls = nn.Linear(6, width), 0

        def forward(self, x):
            if torch.rand(()) < 0.5:
                x[0] = 0.0
            return self.linear(x)

    results = []
    for policy in (weights, "stash"):
        torch.manual_seed(0)
        pipe = make(
            [Erase(6), Erase(4)],
            method=offbeat.ADL(M=1, weights=policy),
            seed=4,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        )
        gradients, _, _ = spy(pipe)
        for x, y in vectors(8):
            pipe.step(x, y)
        pipe.drain()
        results.append([g for k in gradients for t in sorted(gradients[k]) for g in gradients[k][t]])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("weights", POLICIES)
@pytest.mark.parametrize("backed_by_numpy", [False, True])
def test_the_caller_may_use_the_memory_of_a_batch_again(weights, backed_by_numpy):
    fresh = trained(linears(6, 6, 4), K=2, cuts=[1], method=offbeat.ADL(M=1, weights=weights))
    memory = np.zeros((5, 6), dtype=np.float32)
    buffer = torch.from_numpy(memory) if backed_by_numpy else torch.zeros(5, 6)
    pipe = make(linears(6, 6, 4), K=2, cuts=[1], method=offbeat.ADL(M=1, weights=weights))
    for x, y in vectors(8):
        buffer.copy_(x)
        pipe.step(buffer, y)
    assert all(map(torch.equal, fresh, pipe.drain().parameters()))


def test_a_loss_may_edit_its_target_and_evaluation_leaves_the_users_batches_alone():
    class Shift(nn.Module):
        def forward(self, x):
            return x.sub_(1)

    def loss(output, target):
        target[target < 0] = 0
        return CROSS_ENTROPY(output, target)

    pipe = make([nn.Sequential(Shift(), nn.Linear(6, 6)), nn.Linear(6, 4)], loss=loss)
    for x, y in vectors(6):
        pipe.step(x, y - 1)
    batches = vectors(3)
    assert pipe.evaluate(batches) == pipe.evaluate(batches)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, vectors(3), strict=True))


def test_gradients_that_share_memory_are_not_mixed_up():
    """Both outputs of stage 1 are its parameters themselves: their gradients are the messages from above."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            total = self.a + self.b
            return x[:, :4] + total

    for M in (1, 2, 3):
        torch.manual_seed(0)
        a, b, *_ = trained(
            [Bare(), nn.Linear(4, 4)],
            method=offbeat.ADL(M=M),
            clip_norm=0.3,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        )
        assert torch.equal(a, b)
        assert not torch.equal(a, torch.ones(4))


@pytest.mark.parametrize("M", [1, 2, 3])
def test_gradients_that_share_memory_add_up_as_in_a_plain_loop(M):
    """The gradient of a + b is one tensor for both; added in place it would count twice."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x[:, :4] + (self.a + self.b)

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)

    plain, batches = Sum(), vectors(6)
    plain_optimizer = optimizer(plain.parameters())
    for start in range(0, 6, M):
        plain_optimizer.zero_grad()
        for x, y in batches[start : start + M]:
            (CROSS_ENTROPY(plain(x), y) / M).backward()
        plain_optimizer.step()
    found = trained(Sum(), batches, K=1, method=offbeat.BP(M=M), optimizer=optimizer)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, plain.parameters(), strict=True))


def test_integer_inputs_and_bfloat16_train():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6)

        def forward(self, x):
            return self.table(x).mean(1)

    model = nn.Sequential(Tokens(), nn.Linear(6, 6), nn.Linear(6, 4)).bfloat16()
    batches = [(torch.randint(10, (5, 3)), torch.randint(4, (5,))) for _ in range(6)]
    before = fingerprint({name: t.float() for name, t in model.state_dict().items()})
    trained(model, batches, K=3)
    after = fingerprint({name: t.float() for name, t in model.state_dict().items()})
    assert all(before[name] != after[name] for name in before)


# ---- optimizers


def test_parameters_that_the_optimizer_leaves_out_count_for_nothing():
    norms = []

    def optimizer(parameters):
        made = torch.optim.SGD([p for name, p in parameters if name.endswith("weight")], lr=0.0)
        made.register_step_pre_hook(lambda o, *_: norms.append(o.param_groups[0]["params"][0].grad.norm().item()))
        return made

    x, y = vectors(1)[0]
    pipe = make(linears(6, 4), K=1, method="bp", optimizer=optimizer, clip_norm=1e-2)
    for _ in range(4):
        pipe.step(x, y)
    assert norms == pytest.approx([1e-2] * 4, rel=1e-3)


def test_the_mean_of_a_window_is_clipped_not_its_terms():
    x, y = data(2)[0]
    other = data(2)[1]
    pipe = pipeline(1, offbeat.BP(M=2), clip_norm=1e-3)
    parameters = list(pipe.model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for a, b in ((x, y), other):
        for total, g in zip(expected, torch.autograd.grad(mean_square(pipe.model(a), b), parameters)):
            total += g / 2
    norm = torch.sqrt(sum((g**2).sum() for g in expected))
    seen = []
    pipe.stages[1].optimization.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in parameters)
    )
    pipe.step(x, y)
    pipe.step(*other)
    assert close(seen, [g * 1e-3 / (norm + 1e-6) for g in expected])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda p: torch.optim.LBFGS([q for _, q in p])}, "LBFGS repeats the forward"),
        ({"loss": lambda output, target: 1.0}, "return the mean, a tensor"),
        ({"loss": lambda output, target: output}, "return the mean, a tensor"),
        ({"loss": nn.Linear(1, 1)}, "the loss has parameters of its own"),
        ({"loss": None}, "is not a loss .* or a function loss="),
        ({"loss": "mse"}, "give a function"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"model": len}, "model is of type builtin_function_or_method: give an nn.Module"),
        ({"x": torch.ones(0, 6), "y": torch.ones(0).long()}, "batch 0 holds no samples"),
        ({"clip_norm": "a"}, "clip_norm='a'"),
        ({"units": "layer"}, "unknown units 'layer': did you mean 'layers'"),
        ({"by": "time"}, "unknown by 'time'"),
        ({"trace": "torch"}, "unknown trace 'torch'"),
        ({"cuts": 1}, "cuts=1: give a list"),
        ({"cuts": [1.5]}, r"cuts=\[1.5\]: give a list"),
        ({"device": "cudaa"}, "device 'cudaa'"),
        (
            {
                "model": nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(36, 4)),
                "x": torch.ones(5, 6).long(),
            },
            "is sparse",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, message):
    x, y = vectors(1)[0]
    x, y, model = options.pop("x", x), options.pop("y", y), options.pop("model", linears(6, 4))
    with pytest.raises(offbeat.UserError, match=message) as raised:
        make(model, K=1, method="bp", **options).step(x, y)
    assert "\n" not in str(raised.value)


def test_a_loader_of_anything_but_pairs_is_refused_in_evaluation():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1])
    with pytest.raises(offbeat.UserError, match=r"batch 0 of the loader is of type Tensor: give pairs \(x, y\)"):
        pipe.evaluate(vectors(1)[0][0])


# ---- calls


def test_step_returns_the_loss_of_the_batch_it_was_given():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1], optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    for x, y in vectors(5):
        assert torch.equal(pipe.step(x, y), CROSS_ENTROPY(pipe.model(x), y).detach())


def test_after_a_failure_the_pipeline_refuses_to_continue():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1])
    x, y = vectors(1)[0]
    pipe.step(x, y)
    with pytest.raises(offbeat.NotFinite):
        pipe.step(x * float("nan"), y)
    for call in (lambda: pipe.step(x, y), pipe.drain, lambda: pipe.evaluate(vectors(1)), lambda: pipe.fit(vectors(1))):
        with pytest.raises(offbeat.UserError, match="this pipeline has stopped"):
            call()


@pytest.mark.parametrize("window", ["count", "aligned"])
def test_after_a_drain_all_stages_go_on_alike_and_as_from_the_start(window):
    """A drained pipeline that goes on is a new pipeline with those weights, momenta and updates."""
    pipe = make(
        linears(6, 5, 5, 4),
        K=3,
        cuts=[1, 2],
        method=offbeat.ADL(M=2, window=window),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9),
    )
    _, _, levels = spy(pipe)
    for t, (x, y) in enumerate(vectors(20)):
        if t in (7, 8):
            pipe.drain()
            assert len({stage.update_index for stage in pipe.stages.values()}) == 1
            assert len({stage.optimization.optimizer.param_groups[0]["lr"] for stage in pipe.stages.values()}) == 1
            assert not any(stage.in_flight for stage in pipe.stages.values())
        pipe.step(x, y)
        assert [len(stage.in_flight) for stage in pipe.stages.values()] == [
            min(t + 1 - max([0, *(p for p in (7, 8) if p <= t)]), lag) for lag in (4, 2, 0)
        ]
    pipe.drain()
    assert all(sorted(levels[k]) == list(range(20)) for k in levels)
    assert [stage.mean for stage in pipe.staleness] == [2.0, 1.0, 0.0]


def test_the_literal_recurrence_holds_again_after_a_drain():
    first, second = data(9)[:4], data(9)[4:]
    pipe = pipeline(3, offbeat.ADL(M=2))
    _, versions, levels = spy(pipe)
    for x, y in first:
        pipe.step(x, y)
    pipe.drain()
    expected = adl(3, 2, first)
    assert all(close(versions[k][-1], expected["versions"][k - 1][-1]) for k in (1, 2, 3))
    for x, y in second:
        pipe.step(x, y)
    pipe.drain()
    again = adl(3, 2, second)  # other weights, the same order of events
    for k in (1, 2, 3):
        assert {t - 4: level for t, level in levels[k].items() if t >= 4} == again["staleness"][k - 1]


def test_an_empty_window_moves_the_schedule_not_the_weights():
    pipe = make(
        linears(6, 5, 4),
        K=2,
        cuts=[1],
        method=offbeat.ADL(M=1, window="aligned"),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    )
    before = [p.detach().clone() for p in pipe.stages[1].parameters.values()]
    for x, y in vectors(2):
        pipe.step(x, y)
    assert [stage.optimization.optimizer.param_groups[0]["lr"] for stage in pipe.stages.values()] == [0.0125, 0.0125]
    assert all(map(torch.equal, before, pipe.stages[1].parameters.values()))


def test_the_seed_decides_dropout_and_alike_stages_draw_differently():
    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(6, 6), []

        def forward(self, x):
            self.seen.append(torch.rand(4))
            return self.linear(x)

    seen = {}
    for seed in (1, 1, 2):
        masks = [Mask(), Mask(), nn.Sequential(nn.Linear(6, 4))]
        trained(masks, seed=seed)
        drawn = [torch.stack(mask.seen) for mask in masks[:2]]
        assert not torch.equal(*drawn)
        assert torch.equal(seen.setdefault(seed, drawn[0]), drawn[0])
    assert not torch.equal(seen[1], seen[2])


def test_evaluation_draws_from_a_stream_of_its_own():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    pipe = make([nn.Sequential(Noisy(), nn.Linear(6, 6)), nn.Linear(6, 4)])
    torch.manual_seed(3)
    outside, inside = torch.get_rng_state(), pipe.stages[1].network.random.state[0]
    pipe.evaluate(vectors(2))
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(pipe.stages[1].network.random.state[0], inside)


def test_without_targets_samples_are_those_of_the_output():
    pipe = make(linears(6, 4), K=1, loss=lambda output, target: (output**2).mean())
    assert pipe.evaluate([(torch.ones(7, 6), None), (torch.ones(1, 6), None)])["samples"] == 8


def test_loaders_may_be_anything_that_gives_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.ones(6), 1), (torch.zeros(6), 2)])

    pipe = make(linears(6, 4), K=1)
    pipe.fit(DataLoader(Stream(), batch_size=2), epochs=2)
    assert pipe.evaluate(DataLoader(Stream(), batch_size=2))["samples"] == 2


def test_nothing_in_flight_can_be_drained_and_evaluated_first():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1])
    pipe.drain()
    assert pipe.evaluate(vectors(2))["samples"] == 10
    lazy = make(linears(6, 5, 4), K=2)
    assert lazy.drain() is lazy.model
    with pytest.raises(offbeat.UserError, match="there is no batch"):
        make(linears(6, 5, 4), K=2).evaluate([])
    assert lazy.evaluate(vectors(2))["samples"] == 10
    lazy.drain()
    lazy.drain()


@pytest.mark.parametrize("weights", POLICIES)
def test_stages_as_far_apart_as_messages_allow_give_the_same_bits(weights):
    """What K processes do: a stage may be many iterations ahead of the next, bounded by its batches in flight."""
    method = offbeat.ADL(M=2, weights=weights)
    expected = trained(linears(6, 5, 5, 5, 4), vectors(30), K=4, cuts=[1, 2, 3], method=method)
    for seed in range(5):
        pipe = make(linears(6, 5, 5, 5, 4), K=4, cuts=[1, 2, 3], method=method)
        for t, batch in enumerate(vectors(30)):
            pipe.entrance.send(Message(t, (*batch, 1.0)))

        def everything(worker):
            for t in range(30):
                yield from worker.iteration(t, wait=False)
            yield from worker.drain(wait=False)

        running, order, apart = [everything(worker) for worker in pipe.workers], random.Random(seed), 0
        while running:
            generator = running[min(order.randrange(len(running)), order.randrange(len(running)))]
            if next(generator, None) is None:
                running.remove(generator)
            progress = [worker.stage.figures.last_batch for worker in pipe.workers]
            apart = max(apart, progress[0] - progress[-1])
        assert apart > 2
        assert all(map(torch.equal, expected, pipe.model.parameters()))
