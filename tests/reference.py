"""ADL as a literal serial computation, written from the paper and METHODS without any code of the engine.

The network is a chain of layers z -> tanh(z W + b), a stage is one or more of them, the loss is a mean square. Every
parameter version ever made is kept, so that "the weights that forwarded batch u" is a look-up and nothing else.
"""

from __future__ import annotations

import torch

LR, MOMENTUM, DECAY = 0.3, 0.9, 0.01


def network(K: int, width: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(width, width, generator=generator, dtype=torch.float64) / 2,
            torch.randn(width, generator=generator, dtype=torch.float64) / 2,
        )
        for _ in range(K)
    ]


def data(N: int, width: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(3, width, generator=generator, dtype=torch.float64),
            torch.randn(3, width, generator=generator, dtype=torch.float64),
        )
        for _ in range(N)
    ]


def run_layer(theta: tuple[torch.Tensor, ...], z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z @ theta[0] + theta[1])


def mean_square(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((z - y) ** 2).mean()


def adl(K: int, M: int, batches: list, *, window: str = "count", weights: str = "stash", lag_of=None) -> dict:
    """Run N batches and drain. Returns the parameter versions of every stage and what happened to every gradient."""
    N = len(batches)
    lag = [(lag_of or (lambda k: 2 * (K - k)))(k) for k in range(1, K + 1)]
    versions = [[theta] for theta in network(K)]  # versions[k][v]
    momentum = [None] * K
    window_sum = [None] * K
    held = [0] * K
    used = [{} for _ in range(K)]  # batch -> version of its forward
    inputs = [{} for _ in range(K)]  # z_(k-1)^t as it was received
    deltas = [{} for _ in range(K)]  # deltas[k][t]: gradient for the output of stage k
    gradients = [{} for _ in range(K)]
    staleness = [{} for _ in range(K)]
    for t, (x, _) in enumerate(batches):
        inputs[0][t] = x

    for tick in range(N + 2 * K * M + 4 * K):
        new_inputs, new_deltas = [], []  # visible in the next tick only
        for k in range(K):
            t = tick - k
            u = t - lag[k]
            if 0 <= t < N:
                used[k][t] = len(versions[k]) - 1
                z = run_layer(versions[k][-1], inputs[k][t])
                if k + 1 < K:
                    new_inputs.append((k + 1, t, z.detach()))
            if 0 <= u < N:
                now = len(versions[k]) - 1
                v = used[k][u] if weights == "stash" else now
                leaf = inputs[k][u].clone().requires_grad_()
                theta = tuple(p.clone().requires_grad_() for p in versions[k][v])
                z = run_layer(theta, leaf)
                if k == K - 1:
                    g = torch.autograd.grad(mean_square(z, batches[u][1]), [*theta, leaf])
                else:
                    g = torch.autograd.grad(z, [*theta, leaf], deltas[k][u])
                gradients[k][u] = g[:2]
                staleness[k][u] = now - used[k][u]
                window_sum[k] = g[:2] if window_sum[k] is None else tuple(a + b for a, b in zip(window_sum[k], g[:2]))
                held[k] += 1
                if k:
                    new_deltas.append((k - 1, u, g[2]))
            last = u == N - 1
            due = held[k] == M if window == "count" else t >= 0 and (t + 1) % M == 0 and u < N
            if (due or last) and u < N:
                over = held[k] if last else M
                theta = versions[k][-1]
                if held[k]:
                    mean = [s / over + DECAY * p for s, p in zip(window_sum[k], theta)]
                    momentum[k] = mean if momentum[k] is None else [MOMENTUM * m + g for m, g in zip(momentum[k], mean)]
                    theta = tuple(p - LR * m for p, m in zip(theta, momentum[k]))
                versions[k].append(theta)
                window_sum[k], held[k] = None, 0
        for k, t, z in new_inputs:
            inputs[k][t] = z
        for k, t, g in new_deltas:
            deltas[k][t] = g
    return {"versions": versions, "gradients": gradients, "staleness": staleness, "used": used}


def exact_gradients(thetas: list[tuple[torch.Tensor, ...]], x: torch.Tensor, y: torch.Tensor) -> list[tuple]:
    """Back-propagation at the given parameters of all stages."""
    leaves = [tuple(p.clone().requires_grad_() for p in theta) for theta in thetas]
    z = x
    for theta in leaves:
        z = run_layer(theta, z)
    flat = torch.autograd.grad(mean_square(z, y), [p for theta in leaves for p in theta])
    return [flat[2 * k : 2 * k + 2] for k in range(len(leaves))]
