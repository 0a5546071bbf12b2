"""What is the same by theory is the same here: among the serial references, and in the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import serial
import torch
from engine import Layer, layers, pipeline, trained
from serial import DECAY, LR, MOMENTUM, adl, bp, data, final, lagged, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat


def close(found: list, expected: list, tolerance: float = 1e-12) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance)
        for mine, wanted in zip(found, expected, strict=True)
        for a, b in zip(mine, wanted, strict=True)
    )


def same_bits(found: list, expected: list) -> bool:
    return all(
        torch.equal(a, b)
        for mine, wanted in zip(found, expected, strict=True)
        for a, b in zip(mine, wanted, strict=True)
    )


def plain_training(K: int, batches: list, loss: Any = serial.mean_square, *, M: int = 1, **options: Any) -> list:
    """torch, one model, one optimizer, M batches an update."""
    model = nn.Sequential(*(Layer(*theta) for theta in network(K)))
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY} | options)
    for start in range(0, len(batches), M):
        window = batches[start : start + M]
        optimizer.zero_grad()
        (sum(loss(model(x), y) for x, y in window) / len(window)).backward()
        optimizer.step()
    return [[p.detach() for p in layer.parameters()] for layer in model]


def two_buffered(K: int, batches: list, M: int, lr: float) -> list:
    """W(s+1) = W(s) - lr * g(W(s-1)), with g the exact gradient of the window's mean loss."""
    W = [network(K), network(K)]  # W(-1) = W(0)
    for start in range(0, len(batches), M):
        window = batches[start : start + M]
        g = [reference.exact_gradients(W[-2], x, y) for x, y in window]
        mean = [[sum(parts) / len(window) for parts in zip(*layers)] for layers in zip(*g)]
        W.append([tuple(p - lr * q for p, q in zip(*pair)) for pair in zip(W[-1], mean)])
    return W[-1]


class TrueGradient(nn.Module):
    """A synthesiser that cheats: it runs the live stage above and the loss. Adam gets a parameter without influence."""

    def __init__(self, above: Callable[[], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.above = above
        self.idle = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, h: Tensor, label: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = h.detach().clone().requires_grad_()
            W, b = self.above()
            (g,) = torch.autograd.grad(cross_entropy(torch.tanh(leaf @ W + b), label), [leaf])
        return len(h) * g + 0 * self.idle


# --- the references among themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["stash", "replay"])
def test_the_reference_agrees_with_the_older_one_by_autograd_and_ticks(weights):
    for K in (1, 2, 3, 4):
        for M in (1, 2, 3, 4):
            for N in (1, 6, 11):
                older = reference.adl(K, M, data(N), weights=weights)
                stages = lagged(K, data(N), replace(adl(M, weights), lr=reference.LR))
                for k, stage in enumerate(stages):
                    assert len(stage.versions) == len(older["versions"][k])
                    assert close(stage.versions, older["versions"][k])
                    assert stage.staleness == older["staleness"][k]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shuffling_the_order_of_stages_changes_no_bit(seed):
    for rules in (adl(2), serial.pb(), serial.two_bw(3), serial.pipemare(2), serial.spectrain(), serial.fr()):
        assert same_bits(final(lagged(4, data(11), rules, shuffle=seed)), final(lagged(4, data(11), rules)))


@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_the_serial_bp_is_torch(M):
    for K in (1, 2, 3, 4):
        assert close(final(lagged(K, data(11), bp(M))), plain_training(K, data(11), M=M))
        assert same_bits(final(lagged(1, data(11), adl(M))), final(lagged(1, data(11), bp(M))))


def test_serial_spike_compensation_of_delay_one_is_torch_nesterov():
    rules = replace(bp(), spike=True, spike_delay=1)
    assert close(final(lagged(3, data(11), rules)), plain_training(3, data(11), nesterov=True))
    assert not close(final(lagged(3, data(11), rules)), plain_training(3, data(11)), 1e-3)


def test_serial_look_ahead_at_its_own_momentum_is_torch_nesterov():
    rules = replace(bp(), look_ahead=MOMENTUM)
    assert close(final(lagged(3, data(11), rules)), plain_training(3, data(11), nesterov=True))


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_serial_2bw_is_five_lines(K):
    for M in range(max(1, K - 1), 6):
        for N in (1, 6, 11, 14):
            rules = replace(serial.two_bw(M), lr=0.1, momentum=0.0, decay=0.0)
            assert close(final(lagged(K, data(N), rules)), two_buffered(K, data(N), M, 0.1))


def test_correctors_of_strength_zero_change_no_bit_of_the_reference():
    plain = final(lagged(4, data(11), adl(2)))
    for change in (
        {"compensate": 0.0},
        {"predict": "velocity", "horizon": 0},
        {"predict": "weight", "horizon": 0},
        {"spike": True, "spike_delay": 0},
        {"shrink": 1.0},
    ):
        assert same_bits(final(lagged(4, data(11), replace(adl(2), **change))), plain)
    assert same_bits(final(lagged(4, data(11), serial.fdg(1.0))), final(lagged(4, data(11), adl(1))))


def test_both_forms_of_weight_prediction_differ_only_with_spike_compensation():
    """Coincide up to rounding: theta^s - theta^(s-1) is then -lr v."""
    velocity, weight = (replace(adl(2), predict=form) for form in ("velocity", "weight"))
    assert close(final(lagged(3, data(11), velocity)), final(lagged(3, data(11), weight)))
    velocity, weight = (replace(rules, spike=True) for rules in (velocity, weight))
    assert not close(final(lagged(3, data(11), velocity)), final(lagged(3, data(11), weight)), 1e-6)


def test_serial_gpipe_is_serial_bp():
    for m in (1, 2, 3, 4, 5, 8):
        assert close(serial.gpipe(3, data(11), m), final(lagged(3, data(11), bp())))


def test_serial_t2_that_forgets_at_once_gives_the_weights_of_the_forward_back():
    """Two stages, M = 2: every forward is one update old, and theta - 1 * (theta^s - theta^(s-1)) is that version."""
    assert close(final(lagged(2, data(23), serial.pipemare(2, C=0.0))), final(lagged(2, data(23), adl(2))))


def test_serial_spectrain_of_two_stages_is_1f1b_with_weight_prediction():
    for version, weights in ((1, "hybrid"), (2, "stash")):
        rules = replace(serial.pipedream(), weights=weights, predict="velocity")
        assert close(final(lagged(2, data(23), serial.spectrain(version))), final(lagged(2, data(23), rules)))


class Head(nn.Module):
    """Some head, for the references alone."""

    def __init__(self, k: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(k)
        self.net, self.project = (nn.Linear(serial.WIDTH, serial.WIDTH).double() for _ in range(2))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)


@pytest.mark.parametrize("name", ["dgl", "sim", "predsim", "mostafa"])
def test_serial_local_losses_are_torch_modules_with_detached_inputs(name):
    """One torch optimizer a stage, losses by autograd. Correlation has no 1e-8 in it, hence the tolerance with it."""
    K, batches = 3, data(11, classes=True)
    heads = {k: Head(k) for k in (1, 2)}
    beta = 0.6
    if name == "mostafa":
        W = {k: head.net.weight.detach().clone() for k, head in heads.items()}
        expected = serial.mostafa(K, batches, W, W)
    else:
        parts = {k: serial.copies(net=h.net, project=h.project) for k, h in heads.items()}
        unused = {"dgl": "project", "sim": "net"}.get(name)
        for part in parts.values():
            part.pop(unused, None)
        rule = {"dgl": serial.DGL, "sim": serial.sim(beta), "predsim": serial.pred_sim(beta)}[name]
        expected = [stage.versions[-1] for stage in serial.local(K, batches, rule, parts)]

    stages = [Layer(*theta) for theta in network(K)]
    optimizers = []
    for k, stage in enumerate(stages, start=1):
        own = [] if k == K or name == "mostafa" else list(heads[k].parameters())
        optimizers.append(torch.optim.SGD([*stage.parameters(), *own], lr=LR, momentum=MOMENTUM, weight_decay=DECAY))
    for x, y in batches:
        z = x
        wanted = torch.corrcoef(nn.functional.one_hot(y, serial.WIDTH).double())
        for k, (stage, optimizer) in enumerate(zip(stages, optimizers), start=1):
            z = stage(z.detach())
            if k == K:
                loss = cross_entropy(z, y) * ((1 - beta) if name == "predsim" else 1)
            elif name == "mostafa":
                loss = cross_entropy(nn.functional.linear(z, W[k]), y)
            else:
                predicted = cross_entropy(heads[k].net(z), y)
                alike = nn.functional.mse_loss(torch.corrcoef(heads[k].project(z)), wanted)
                loss = {"dgl": predicted, "sim": beta * alike, "predsim": (1 - beta) * predicted + beta * alike}[name]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = [[p.detach() for p in stage.parameters()] for stage in stages]
    assert close(found, expected, 1e-12 if name in ("dgl", "mostafa") else 1e-5)


def test_serial_dni_with_nothing_below_the_loss_is_torch():
    batches = data(11, classes=True)
    thetas, _ = serial.dni(batches, network(1), {})
    assert close(thetas, plain_training(1, batches, cross_entropy))


@pytest.mark.parametrize("conditional", [False, True])
def test_serial_dni_is_torch_modules_with_a_queue_of_two(conditional):
    K, batches = 3, data(11, classes=True)

    class Synthesiser(nn.Linear):
        def forward(self, h: Tensor, label: Tensor | None) -> Tensor:
            return super().forward(h) if label is None else super().forward(h) * (1 + label)

    nets = {k: Synthesiser(serial.WIDTH, serial.WIDTH).double() for k in (1, 2)}
    for net in nets.values():
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
    expected, taught = serial.dni(batches, network(K), copy.deepcopy(nets), lr=0.05, conditional=conditional)

    stages = [Layer(*theta) for theta in network(K)]
    sgd = [torch.optim.SGD(stage.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY) for stage in stages]
    adam = {k: torch.optim.Adam(net.parameters(), lr=0.05) for k, net in nets.items()}
    queues: dict[int, list] = {k: [] for k in nets}

    def teach(k: int) -> None:
        leaf, label = queues[k].pop(0)
        b = len(leaf)
        adam[k].zero_grad()
        (nn.functional.mse_loss(nets[k](leaf.detach(), label), b * leaf.grad, reduction="sum") / b).backward()
        adam[k].step()

    for x, y in batches:
        leaf = x.clone().requires_grad_()
        label = nn.functional.one_hot(y, serial.WIDTH).double() if conditional else None
        for k, stage in enumerate(stages, start=1):
            h = stage(leaf)
            sgd[k - 1].zero_grad()
            if k == K:
                cross_entropy(h, y).backward()  # the gradient for the input stays in the leaf that stage k - 1 queued
            else:
                h.backward(nets[k](h.detach(), label).detach() / len(x))
                leaf = h.detach().requires_grad_()
                queues[k].append((leaf, label))
            sgd[k - 1].step()
            if k < K and len(queues[k]) > 2:
                teach(k)
    for k, queue in queues.items():
        while queue:
            teach(k)
    assert close([list(stage.parameters()) for stage in stages], expected)
    assert close([list(net.parameters()) for net in nets.values()], [list(net.parameters()) for net in taught.values()])
    assert all(net.weight.abs().max() > 0.01 for net in nets.values())


def test_serial_dgl_over_a_buffer_taken_in_order_is_dgl():
    @dataclass
    class Operation:
        t: int = 0

    Take, Drop, Forward, Backward, Update = (
        type(name, (Operation,), {}) for name in ("Take", "Drop", "Forward", "Backward", "Update")
    )
    batches = data(11, classes=True)
    first = [op for t in range(11) for op in (Forward(t), Backward(t), Update())]
    other = [op for t in range(11) for op in (Take(t), Forward(t), Backward(t), Update(), Drop(t))]
    parts = {k: serial.copies(net=Head(k).net) for k in (1, 2)}
    buffered = serial.async_dgl(3, batches, copy.deepcopy(parts), {1: first, 2: other, 3: other})
    plain = serial.local(3, batches, serial.DGL, parts)
    assert same_bits(*([stage.versions[-1] for stage in stages] for stages in (buffered, plain)))


def test_serial_dni_with_the_true_gradient_is_torch():
    batches = data(11, classes=True)
    thetas = network(2)
    thetas, _ = serial.dni(batches, thetas, {1: TrueGradient(lambda: thetas[1])}, conditional=True)
    assert close(thetas, plain_training(2, batches, cross_entropy))


@pytest.mark.parametrize(
    "change",
    [
        {"lag": lambda k, K: 2 * (K - k) + 1},
        {"lag": lambda k, K: max(0, 2 * (K - k) - 1)},
        {"lag": serial.one_way},
        {"M": 3},
        {"weights": "hybrid"},
        {"weights": "replay"},
        {"decay": 0.0},
        {"momentum": 0.89},
        {"shrink": 0.999},
        {"spike": True},
        {"predict": "velocity"},
        {"predict": "weight"},
        {"look_ahead": 0.9},
        {"compensate": 0.04},
        {"compensate": 2.0, "adaptive": True},
        {"anneal": 3},
        {"weights": "hybrid", "discrepancy": 0.135},
        {"weights": "hybrid", "spectrain": 1},
        {"spectrain": 2},
        {"window_before": True},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_rule_makes_a_difference(change):
    """So that a comparison of rules with an engine that ignores one of them fails."""
    rules = replace(adl(2), **({"M": 6} if "window_before" in change else {}))
    plain, other = (final(lagged(4, data(23), r)) for r in (rules, replace(rules, **change)))
    assert not close(plain[:1], other[:1], 1e-6)


# --- the engine ------------------------------------------------------------------------------------------------------


def run(K: int, method: Any, N: int = 11) -> list:
    return trained(pipeline(K, method), data(N))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_gpipe_is_bp(m):
    for K in (1, 2, 3, 4):
        batches = data(7, samples=6)
        assert close(trained(pipeline(K, offbeat.GPipe(m=m)), batches), trained(pipeline(K, offbeat.BP()), batches))


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_2bw_is_five_lines(K):
    for M in range(max(1, K - 1), 6):
        for N in (1, 6, 11, 14):
            pipe = pipeline(K, offbeat.TwoBW(M=M), lr=0.1, momentum=0.0, weight_decay=0.0)
            assert close(trained(pipe, data(N)), two_buffered(K, data(N), M, 0.1)), f"M={M} N={N}"


@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_adl_of_one_stage_is_bp(M):
    assert same_bits(run(1, offbeat.ADL(M=M)), run(1, offbeat.BP(M=M)))
    assert close(run(1, offbeat.ADL(M=M)), plain_training(1, data(11), M=M))


def test_spike_compensation_of_delay_one_is_nesterov():
    found = run(3, replace(offbeat.BP(), correctors=(offbeat.SpikeCompensation(delay=1),)))
    assert close(found, plain_training(3, data(11), nesterov=True))
    nesterov = trained(pipeline(3, offbeat.ADL(M=2), nesterov=True), data(11))
    assert close(run(3, offbeat.ADL(M=2, corrector=offbeat.SpikeCompensation(delay=1))), nesterov)


@pytest.mark.parametrize("M", [1, 2, 3])
def test_correctors_of_strength_zero_change_no_bit_of_adl(M):
    plain = run(4, offbeat.ADL(M=M))
    for corrector in (
        offbeat.DelayCompensation(lambda_=0),
        offbeat.WeightPrediction(horizon=0),
        offbeat.WeightPrediction(horizon=0, form="weight"),
        offbeat.SpikeCompensation(delay=0),
        offbeat.Shrink(1),
    ):
        assert same_bits(run(4, offbeat.ADL(M=M, corrector=corrector)), plain), corrector


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_methods_that_are_the_same_by_definition_are_the_same_bit_for_bit(K):
    assert same_bits(run(K, offbeat.FDG(beta=1.0)), run(K, offbeat.ADL(M=1)))
    assert same_bits(run(K, offbeat.DDG()), run(K, offbeat.PipeDream()))
    assert same_bits(run(K, offbeat.DDG(barrier=False)), run(K, offbeat.PipeDream()))
    assert same_bits(run(K, offbeat.ADL1F1B(M=1)), run(K, offbeat.PipeDream()))
    assert same_bits(run(K, offbeat.FR()), run(K, offbeat.FR(barrier=False)))
    assert same_bits(run(K, offbeat.FDG(beta=0.5)), run(K, offbeat.ADL(M=1, corrector=offbeat.Shrink(0.5))))


def test_dni_with_the_true_gradient_is_bp():
    """Stage 1 asks for the gradient of batch t when stage 2 has updated on batch t - 1, since steps come one by one."""
    batches = data(11, classes=True)
    pipe = pipeline(
        2,
        offbeat.DNI(conditional=True, synthesiser=lambda shape, classes: TrueGradient(lambda: upper(pipe))),
        cross_entropy,
    )
    assert close(trained(pipe, batches), plain_training(2, batches, cross_entropy))


def upper(pipe: offbeat.Pipeline) -> tuple[Tensor, ...]:
    layer = layers(pipe.model)[1]
    return layer.W, layer.b


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_a_named_method_is_its_parts(K):
    o = offbeat
    assert close(run(K, o.PB()), run(K, o.ADL(M=1, weights="hybrid", corrector="lwp+sc")))
    assert close(run(K, o.NAGAsync(gamma=0.95)), run(K, o.PipeDream(corrector=o.NesterovMomentum(0.95))))
    parts = (o.Rescheduling(updates=3), o.Discrepancy(0.3))
    assert close(run(K, o.PipeMare(M=2, anneal=3, C=0.3)), run(K, o.ADL(M=2, weights="hybrid", corrector=parts)))


def test_spectrain_of_two_stages_is_1f1b_with_weight_prediction():
    assert close(run(2, offbeat.SpecTrain(version=2)), run(2, offbeat.PipeDream(corrector=offbeat.WeightPrediction())))


def test_t2_that_forgets_at_once_gives_the_weights_of_the_forward_back():
    assert close(run(2, offbeat.PipeMare(M=2, C=1e-30), 23), run(2, offbeat.ADL(M=2), 23))


def test_asgd_of_one_worker_is_bp_and_without_compensation_dc_asgd_is_asgd():
    assert same_bits(run(1, offbeat.ASGD(N=1)), run(1, offbeat.BP()))
    assert same_bits(run(1, offbeat.DCASGD(N=4, lambda_=0.0)), run(1, offbeat.ASGD(N=4)))
