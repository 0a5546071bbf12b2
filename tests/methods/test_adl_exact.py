"""The numbers: ADL against literal computations that share no code with the engine."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from engine import Layer
from formulas import mean_staleness, staleness
from reference import DECAY, LR, MOMENTUM, adl, data, exact_gradients, mean_square, network
from torch import nn

import offbeat


def pipeline(K: int, method: offbeat.Method, lr: float = LR, **options) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        [Layer(*theta) for theta in network(K)],
        method=method,
        loss=mean_square,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, weight_decay=DECAY),
        **options,
    )


def spy(pipe: offbeat.Pipeline):
    """Record the gradient of every batch, its staleness, and every version of every stage."""
    gradients: dict[int, dict] = {}
    versions: dict[int, list] = {}
    levels: dict[int, dict] = {}
    for k, stage in pipe.stages.items():
        gradients[k], levels[k] = {}, {}
        versions[k] = [[p.detach().clone() for p in stage.parameters.values()]]

        def add(t, found, level, *, stage=stage, k=k, original=stage.window.add, **given):
            gradients[k][t] = [g.detach().clone() for g in found]
            original(t, found, level, **given)

        def backward(t, incoming, stage=stage, k=k, original=stage.backward):
            levels[k][t] = stage.update_index - stage.in_flight[t].update
            return original(t, incoming)

        def update(over, stage=stage, k=k, original=stage.update):
            original(over)
            versions[k].append([p.detach().clone() for p in stage.parameters.values()])

        stage.window.add, stage.backward, stage.update = add, backward, update
    return gradients, versions, levels


def close(found, expected) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("window", "weights"), list(itertools.product(["count", "aligned"], ["stash", "replay"])))
def test_adl_agrees_with_the_literal_recurrence(window, weights):
    for K, M, N in itertools.product([1, 2, 3, 4], [1, 2, 3, 4], [1, 6, 11]):
        expected = adl(K, M, data(N), window=window, weights=weights)
        pipe = pipeline(K, offbeat.ADL(M=M, window=window, weights=weights))
        gradients, versions, levels = spy(pipe)
        for x, y in data(N):
            pipe.step(x, y)
        pipe.drain()
        for k in range(1, K + 1):
            case = f"K={K} M={M} N={N} stage {k}"
            assert len(gradients[k]) == N, case
            assert levels[k] == expected["staleness"][k - 1], case
            wanted = expected["versions"][k - 1]
            assert len(versions[k]) == max(map(len, expected["versions"])), case  # the others close empty windows
            wanted = wanted + [wanted[-1]] * (len(versions[k]) - len(wanted))
            assert all(map(close, versions[k], wanted)), case
            for t in range(N):
                assert close(gradients[k][t], expected["gradients"][k - 1][t]), case


@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_one_stage_is_sgd_with_accumulation(M):
    layers = nn.Sequential(*(Layer(*theta) for theta in network(3)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    batches = data(11)
    for start in range(0, 11, M):
        window = batches[start : start + M]
        optimizer.zero_grad()
        (sum(mean_square(layers(x), y) for x, y in window) / len(window)).backward()
        optimizer.step()

    pipe = offbeat.Pipeline(
        nn.Sequential(*(Layer(*theta) for theta in network(3))),
        K=1,
        method="adl",
        M=M,
        loss=mean_square,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
    )
    for x, y in batches:
        pipe.step(x, y)
    assert close(pipe.drain().parameters(), layers.parameters())


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_without_learning_every_gradient_is_the_exact_one(weights):
    exact = [exact_gradients(network(4), x, y) for x, y in data(9)]
    for K, M in itertools.product([1, 2, 3, 4], [1, 2, 3]):
        full = network(4)
        stages = [
            nn.Sequential(*(Layer(*theta) for theta in full[part[0] : part[-1] + 1]))
            for part in torch.arange(4).tensor_split(K)
        ]
        pipe = offbeat.Pipeline(
            stages,
            method=offbeat.ADL(M=M, weights=weights),
            loss=mean_square,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        )
        gradients, _, _ = spy(pipe)
        for x, y in data(9):
            pipe.step(x, y)
        pipe.drain()
        for t in range(9):
            found = [g for k in range(1, K + 1) for g in gradients[k][t]]
            assert close(found, [g for layer in exact[t] for g in layer]), f"K={K} M={M} batch {t}"


@pytest.mark.parametrize(("K", "M"), list(itertools.product([2, 3, 4], [1, 2, 3])))
def test_on_aligned_windows_a_gradient_is_exact_at_the_diagonal_of_versions(K, M):
    batches = data(13)
    pipe = pipeline(K, offbeat.ADL(M=M, window="aligned"))
    gradients, versions, _ = spy(pipe)
    for x, y in batches:
        pipe.step(x, y)
    pipe.drain()
    for u, (x, y) in enumerate(batches):
        diagonal = [tuple(versions[k][u // M]) for k in range(1, K + 1)]
        for k, wanted in enumerate(exact_gradients(diagonal, x, y), start=1):
            assert all(torch.equal(a, b) for a, b in zip(gradients[k][u], wanted, strict=True))


def test_hybrid_is_old_activations_with_current_weights():
    """Two linear layers in stage 1, by hand: dL/dW1 uses the stored input and hidden values, and W2 as it is now."""
    torch.manual_seed(0)
    W1, W2, W3 = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
    first = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    second = nn.Linear(3, 3, bias=False).double()
    for linear, W in zip([*first, second], [W1, W2, W3], strict=True):
        linear.weight.data.copy_(W)
    pipe = offbeat.Pipeline(
        [first, second],
        method=offbeat.ADL(M=1, weights="hybrid"),
        loss=mean_square,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    batches = [(torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)) for _ in range(6)]
    stored, sent, lr = {}, {}, 0.1
    for t, (x, y) in enumerate(batches):
        pipe.step(x, y)
        hidden = x @ W1.T
        stored[t] = (x, hidden)
        z = hidden @ W2.T
        if t >= 2:  # lag of stage 1 of 2
            x_old, hidden_old = stored[t - 2]
            delta = sent[t - 2]
            grad_W2, grad_W1 = delta.T @ hidden_old, (delta @ W2).T @ x_old  # W2 of now
            W1, W2 = W1 - lr * grad_W1, W2 - lr * grad_W2
        out = z @ W3.T
        delta_out = 2 * (out - y) / out.numel()
        sent[t] = delta_out @ W3
        W3 = W3 - lr * delta_out.T @ z
    found = [first[0].weight, first[1].weight, second.weight]
    assert close(found, [W1, W2, W3])


@pytest.mark.parametrize("K", [1, 2, 3, 5, 8, 10])
def test_measured_staleness_is_the_formula(K):
    for M in (1, 2, 3, 5, 8):
        pipe = offbeat.Pipeline(
            [nn.Linear(1, 1) for _ in range(K)],
            method=offbeat.ADL(M=M),
            loss=mean_square,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        )
        _, _, levels = spy(pipe)
        longest = 2 * (K - 1)
        windows = -(-longest // M) + 2
        for _ in range(longest + windows * M):
            pipe.step(torch.ones(1, 1), torch.ones(1, 1))
        pipe.drain()
        for k in range(1, K + 1):
            lag = 2 * (K - k)
            steady = {u: level for u, level in levels[k].items() if u >= lag}
            assert steady == {u: staleness(lag, M, u % M) for u in steady}, f"K={K} M={M} stage {k}"
            whole = [
                window
                for start in range(0, len(levels[k]), M)
                if len(window := [u for u in range(start, start + M) if u in steady]) == M
            ]
            assert pipe.staleness[k - 1] == Counter(steady[u] for window in whole for u in window)
            assert pipe.staleness[k - 1].mean == mean_staleness(lag, M)


def test_a_short_last_window_is_the_mean_of_what_it_holds():
    one = pipeline(1, offbeat.BP(M=4))
    two = pipeline(1, offbeat.BP(M=2))
    for x, y in data(2):
        one.step(x, y)
        two.step(x, y)
    assert close(one.drain().parameters(), two.drain().parameters())


def test_filling_calls_no_optimizer():
    """Weight decay would move the weights of a stage that is still waiting for its first gradient."""
    for window in ("count", "aligned"):
        pipe = pipeline(3, offbeat.ADL(M=2, window=window))
        before = [p.detach().clone() for p in pipe.stages[1].parameters.values()]
        for x, y in data(4):
            pipe.step(x, y)
        assert all(torch.equal(a, b) for a, b in zip(before, pipe.stages[1].parameters.values(), strict=True))
