"""The library's promises to its users."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from cases import Join, Pair, convolutions, fingerprint, images, vectors
from torch import nn

import offbeat
from offbeat.core import weights
from offbeat.methods import METHODS

CROSS_ENTROPY = nn.functional.cross_entropy


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def linears(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def make(model, K=None, **options) -> offbeat.Pipeline:
    options = {"method": offbeat.ADL(M=2), "loss": CROSS_ENTROPY, "optimizer": sgd, **options}
    return offbeat.Pipeline(model, K, **options)


def test_the_users_own_module_holds_the_trained_weights():
    model = linears(6, 8, 4)
    before = fingerprint(model.state_dict())
    pipe = make(model, K=2)
    for x, y in vectors(8):
        assert pipe.step(x, y).shape == ()
    assert pipe.drain() is model is pipe.model
    assert set(before) == set(model.state_dict())
    assert all(fingerprint(model.state_dict())[name] != bits for name, bits in before.items())


def test_the_optimizer_is_given_the_names_of_the_unsplit_model():
    seen = []

    def optimizer(parameters):
        pairs = list(parameters)
        seen.append([name for name, _ in pairs])
        return sgd(pairs)

    make(linears(6, 5, 4), K=2, cuts=[1], optimizer=optimizer)
    make([linears(6, 5), nn.Sequential(nn.ReLU(), linears(5, 4))], optimizer=optimizer)
    assert seen == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
        ["0.0.weight", "0.0.bias"],
        ["1.1.0.weight", "1.1.0.bias"],
    ]


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_evaluation_in_mid_flight_changes_nothing(weights):
    results = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        pipe = make(convolutions(torch.float32), K=3, cuts=[1, 4], method=offbeat.ADL(M=2, weights=weights))
        for x, y in images(9, torch.float32):
            pipe.step(x, y)
            if evaluates:
                pipe.evaluate(images(3, torch.float32))
        results.append(fingerprint(pipe.drain().state_dict()))
    assert results[0] == results[1]


def test_evaluation_is_that_of_the_whole_model_on_the_newest_weights():
    torch.manual_seed(0)
    pipe = make(convolutions(torch.float64), K=3, cuts=[1, 4])
    for x, y in images(5, torch.float64):
        pipe.step(x, y)
    batches = images(4, torch.float64)
    found = pipe.evaluate(batches)
    model = copy.deepcopy(pipe.model).eval()
    with torch.no_grad():
        outputs, targets = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    assert found["samples"] == len(targets) == 21
    assert found["loss"] == pytest.approx(CROSS_ENTROPY(outputs, targets).item())
    assert found["error"] == pytest.approx(100 * (outputs.argmax(1) != targets).double().mean().item())
    assert found["top5"] is None  # four classes
    half = pipe.evaluate(batches, metric=lambda output, target: 0.5)
    assert half["error"] == pytest.approx(0.5)
    assert half["loss"] == found["loss"]


def test_training_continues_after_an_evaluation_that_fails():
    def broken():
        yield batch
        raise OSError("no more files")

    def metric(output, target):
        raise KeyError("accuracy")

    batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
    pipe, plain = (make(linears(4, 5, 2), 2) for _ in range(2))
    pipe.step(*batch), plain.step(*batch)
    for error, loader, given in (
        (OSError, broken(), {}),
        (KeyError, [batch], {"metric": metric}),
        (RuntimeError, [batch, (torch.ones(3, 7), batch[1])], {}),
    ):
        with pytest.raises(error):
            pipe.evaluate(loader, **given)
    assert pipe.evaluate([batch]) == plain.evaluate([batch])
    for _ in range(3):
        assert pipe.step(*batch).equal(plain.step(*batch))


def test_regression_has_a_loss_and_no_error():
    pipe = make(linears(6, 3), K=1, loss=nn.functional.mse_loss)
    result = pipe.evaluate([(torch.ones(2, 6), torch.zeros(2, 3))])
    assert result["error"] is result["top5"] is None
    assert result["loss"] > 0


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_batchnorm_statistics_are_those_of_one_plain_pass(weights):
    torch.manual_seed(0)
    reference = convolutions(torch.float64)
    layers = copy.deepcopy(reference)
    for dropout in (m for model in (reference, layers) for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    pipe = make(
        layers,
        K=3,
        cuts=[1, 4],
        method=offbeat.ADL(M=2, weights=weights),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    )
    for x, y in images(7, torch.float64):
        pipe.step(x, y)
        reference(x)
    pipe.drain()
    for (name, found), (_, expected) in zip(layers.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), name
        if name.endswith("num_batches_tracked"):
            assert found == 7


def test_replay_repeats_the_dropout_of_its_forward():
    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.masks = nn.Linear(6, 4), []

        def forward(self, x):
            dropped = nn.functional.dropout(torch.ones(5), 0.5)
            self.masks.append(dropped)
            return self.linear(x) * dropped[: len(x), None]

    recorder = Recorder()
    pipe = make([recorder, nn.Linear(4, 4)], method=offbeat.ADL(M=1, weights="replay"))
    for x, y in vectors(6):
        pipe.step(x, y)
    pipe.drain()
    assert len(recorder.masks) == 12  # F0 F1 F2 B0 F3 B1 ...
    forwards = [recorder.masks[i] for i in (0, 1, 2, 4, 6, 8)]
    replays = [recorder.masks[i] for i in (3, 5, 7, 9, 10, 11)]
    assert all(torch.equal(a, b) for a, b in zip(forwards, replays, strict=True))
    assert not torch.equal(forwards[0], forwards[1])


def test_each_stage_draws_from_its_own_stream_and_none_from_the_users():
    states = []
    for K, cuts in ((1, []), (2, [3]), (3, [3, 5])):
        torch.manual_seed(0)
        pipe = make(convolutions(torch.float32), K=K, cuts=cuts, method="bp", seed=5)
        torch.manual_seed(7)
        for x, y in images(3, torch.float32):
            pipe.step(x, y)
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)
    assert not torch.equal(pipe.stages[1].network.random.state[0], pipe.stages[2].network.random.state[0])


def test_a_snapshot_is_made_once_an_update_and_nothing_is_recomputed(monkeypatch):
    made, forwards = [], []
    monkeypatch.setattr(
        weights,
        "Version",
        lambda tensors, original=weights.Version, **more: made.append(tensors is not None) or original(tensors, **more),
    )
    pipe = make(linears(6, 5, 5, 4), K=3, cuts=[1, 2], method=offbeat.ADL(M=2))
    for stage in pipe.stages.values():
        stage.network.module.register_forward_hook(lambda *_, k=stage.k: forwards.append(k))
    for x, y in vectors(12):
        pipe.step(x, y)
        for stage in pipe.stages.values():
            assert stage.weights.versions() <= -(-2 * (3 - stage.k) // 2) + 1
    pipe.drain()
    assert [forwards.count(k) for k in (1, 2, 3)] == [12, 12, 12]
    # batch t is forwarded by version floor((t - lag) / M): 0..3 in stage 1, 0..4 in stage 2; stage 3 needs none
    assert sum(made) == 4 + 5


def test_learning_rate_of_update_s_is_the_same_in_all_stages():
    seen: dict[int, list[float]] = {1: [], 2: [], 3: []}
    pipe = make(
        linears(6, 5, 5, 4),
        K=3,
        cuts=[1, 2],
        method=offbeat.ADL(M=2),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
    )
    for k, stage in pipe.stages.items():
        stage.optimization.optimizer.register_step_pre_hook(lambda o, *_, k=k: seen[k].append(o.param_groups[0]["lr"]))
    for x, y in vectors(9):
        pipe.step(x, y)
    pipe.drain()
    assert seen[1] == seen[2] == seen[3] == pytest.approx([0.05 / (1 + s) for s in range(5)])


def test_a_metric_driven_scheduler_is_refused():
    with pytest.raises(offbeat.UserError, match="ReduceLROnPlateau"):
        make(linears(6, 4), K=1, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_clip_norm_limits_each_stage():
    pipe = make(
        linears(6, 5, 4), K=2, cuts=[1], clip_norm=1e-3, method="bp", optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    )
    before = [p.detach().clone() for p in pipe.model.parameters()]
    pipe.step(*vectors(1)[0])
    moved = [(p.detach() - b).norm() for p, b in zip(pipe.model.parameters(), before)]
    assert (moved[0] ** 2 + moved[1] ** 2).sqrt() == pytest.approx(1e-3, rel=1e-3)
    assert (moved[2] ** 2 + moved[3] ** 2).sqrt() == pytest.approx(1e-3, rel=1e-3)


def test_parameters_tied_within_a_stage_stay_tied_and_frozen_ones_stay_put():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight
            self.still = nn.Linear(6, 6)
            self.still.requires_grad_(False)

        def forward(self, x):
            return self.still(torch.tanh(self.b(torch.tanh(self.a(x)))))

    for policy in ("stash", "hybrid", "replay"):
        torch.manual_seed(0)
        stages = [Tied(), nn.Linear(6, 4)]
        still = stages[0].still.weight.clone()
        start = stages[0].a.weight.detach().clone()
        pipe = make(stages, method=offbeat.ADL(M=1, weights=policy))
        for x, y in vectors(6):
            pipe.step(x, y)
        pipe.drain()
        assert stages[0].a.weight is stages[0].b.weight
        assert torch.equal(stages[0].still.weight, still)
        assert not torch.equal(stages[0].a.weight, start)


def test_parameters_tied_across_a_cut_are_refused_with_their_names():
    layers = linears(6, 6, 6, 6)
    layers[2].weight = layers[0].weight
    with pytest.raises(offbeat.UserError, match=r"0\.weight of stage 1 and 2\.weight of stage 2"):
        make(layers, K=2, cuts=[1])
    make(layers, K=1)


def test_stages_without_parameters_or_gradients_pass_them_on():
    pipe = make(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Identity()), K=5)
    before = fingerprint(pipe.model.state_dict())
    for x, y in vectors(12):
        pipe.step(x, y)
    after = fingerprint(pipe.drain().state_dict())
    assert all(after[name] != before[name] for name in before)


def test_inputs_and_targets_may_be_any_tree_of_tensors():
    class Open(nn.Module):
        def forward(self, x):
            return x["image"][0] + x["image"][1]

    def loss(output, target):
        return CROSS_ENTROPY(output, target["label"]) * target["weight"].mean()

    pipe = make([Open(), Pair(), Join()], loss=loss)
    for x, y in vectors(8):
        pipe.step({"image": (x, 2 * x)}, {"label": y, "weight": torch.ones(5)})
    pipe.drain()
    assert (
        pipe.evaluate([({"image": (x, 2 * x)}, {"label": y, "weight": torch.ones(5)}) for x, y in vectors(2)])[
            "samples"
        ]
        == 10
    )


def test_fit_runs_epochs_without_flushing_and_drains_at_the_end():
    by_hand, by_fit = make(linears(6, 8, 4), K=2), make(linears(6, 8, 4), K=2)
    for _ in range(3):
        for x, y in vectors(5):
            by_hand.step(x, y)
    seen = []

    class Seen:
        def on_step(self, step):
            seen.append(step.batch)

        def on_epoch_end(self, step):
            seen.append(f"epoch {step.epoch}")

    by_fit.fit(vectors(5), epochs=3, callbacks=[Seen()])
    assert fingerprint(by_hand.drain().state_dict()) == fingerprint(by_fit.model.state_dict())
    assert seen == [0, 1, 2, 3, 4, "epoch 0", 5, 6, 7, 8, 9, "epoch 1", 10, 11, 12, 13, 14, "epoch 2"]


def test_evaluation_and_the_work_after_an_epoch_yield_after_every_batch():
    pipe, seen = make(linears(6, 8, 4), K=2), []
    whole = pipe.evaluate(vectors(3))

    def after_epoch(epoch):
        seen.append((yield from pipe.evaluating(vectors(3))))

    yields = sum(1 for _ in pipe.steps([*vectors(5)], epochs=2, after_epoch=after_epoch, drain=False))
    assert yields == 2 * (5 + 3 + 1)
    assert whole["samples"] == seen[0]["samples"] == 15
    assert seen[0]["loss"] < whole["loss"]
    assert pipe.evaluate(vectors(3)) == seen[1]
    for _ in pipe.steps(vectors(5), after_epoch=lambda epoch: pipe.evaluate(vectors(3))["loss"]):  # it is not used
        pass


def test_a_function_of_the_epoch_gives_its_own_batches():
    asked = []
    make(linears(6, 4), K=1).fit(lambda epoch: asked.append(epoch) or vectors(2), epochs=2)
    assert asked == [0, 1]


def test_methods_go_by_name_or_as_objects():
    x, y = vectors(1)[0]
    one, other = make(linears(6, 4), K=1, method="adl", M=3), make(linears(6, 4), K=1, method=offbeat.ADL(M=3))
    assert one.method == other.method
    assert float(one.step(x, y)) == float(other.step(x, y))


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.RAdam,
        torch.optim.Rprop,
    ],
)
def test_any_optimizer_of_torch_trains_every_stage(optimizer):
    model = linears(6, 5, 5, 4)
    before = fingerprint(model.state_dict())
    pipe = make(model, K=3, cuts=[1, 2], optimizer=lambda p: optimizer(p, lr=0.01))
    for x, y in vectors(9):
        pipe.step(x, y)
    after = fingerprint(pipe.drain().state_dict())
    assert all(after[name] != before[name] for name in before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": 0}, "K=0"),
        ({"K": 3}, "3 stages but only 2 units"),
        ({"K": 2, "cuts": [2]}, "cuts \\[2\\] of 2 units"),
        ({"K": 2, "cuts": [1, 1]}, "gives 3 stages, not K=2: give 1 cut"),
        ({"K": 2, "method": "adll"}, "did you mean 'adl'"),
        ({"K": 2, "method": "adl", "M": 0}, "M=0"),
        ({"K": 2, "M": 3}, "M=3 beside a method"),
        ({"K": 2, "engine": "simulat"}, "did you mean 'simulate'"),
        ({"K": 2, "engine": "processes"}, "torchrun --nproc-per-node 2"),
    ],
)
def test_bad_arguments_are_reported_in_one_line(options, message):
    with pytest.raises(offbeat.UserError, match=message) as raised:
        make(linears(6, 5, 4), **options).step(*vectors(1)[0])
    assert "\n" not in str(raised.value)


def test_a_batch_that_does_not_fit_names_stage_batch_and_shape():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1])
    x, y = vectors(1)[0]
    pipe.step(x, y)
    with pytest.raises(offbeat.UserError, match=r"stage 1 cannot take batch 1 of shape \(5, 7\)"):
        pipe.step(torch.ones(5, 7), y)
    with pytest.raises(offbeat.UserError, match=r"cannot be measured on this sample"):
        make(linears(6, 5, 4), K=2).step(torch.ones(5, 7), y)


def test_a_loss_that_is_not_finite_names_batch_and_stage():
    pipe = make(linears(6, 5, 4), K=2, cuts=[1])
    x, y = vectors(1)[0]
    pipe.step(x, y)
    with pytest.raises(offbeat.NotFinite, match=r"the loss of batch 1 is nan \(seen at stage 2 of 2"):
        pipe.step(x * float("nan"), y)


def test_an_exhausted_generator_is_reported():
    pipe = make(linears(6, 4), K=1)
    with pytest.raises(offbeat.UserError, match="no batch in epoch 1"):
        pipe.fit((batch for batch in vectors(3)), epochs=2)


@pytest.mark.parametrize("name", METHODS)
def test_the_method_that_an_error_suggests_can_be_made(name):
    with pytest.raises(offbeat.UserError, match="M=6 beside a method that has its own M: ") as refused:
        make(linears(6, 4), K=1, method=METHODS[name](), M=6)
    suggestion = str(refused.value).partition("own M: ")[2]
    if suggestion != "leave one of them out":
        suggested = eval(suggestion.removeprefix("use "), {"offbeat": offbeat})
        assert (suggested.name, suggested.M) == (name, 6)
