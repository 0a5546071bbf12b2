"""Every method as a literal serial computation in float64, written from METHODS 7 without any code of the engine.

Stage k of K is one layer z -> tanh(z W + b), differentiated by hand. No weights are ever overwritten: `versions[s]` is
what a stage had after s updates, so that "the weights that forwarded batch u" is a look-up and nothing else. Stages
meet in two dictionaries of messages alone, and each carries out its own program in order, whoever is asked first.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import literal_optimizers
import torch
from reference import network  # the same initial weights, and nothing else
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01  # small enough that rounding is not amplified beyond 1e-12
ADAM_LR, BETAS, EPS, MU_DECAY = 0.01, (0.8, 0.95), 1e-3, 4e-3  # of Adam, AdamW and NAdam
WIDTH = 4
AVERAGE = 0.8  # momentum of Muon and RotatedAdam
OURS = {  # the equations for matrices, and the updates over which Nesterov's method compensates
    "muon": (partial(literal_optimizers.muon, b=AVERAGE), 1.0),
    "rotated-adam": (partial(literal_optimizers.rotated_adam, betas=(AVERAGE, BETAS[1]), eps=EPS), 0.0),
}
Theta = tuple[Tensor, ...]
Batches = list[tuple[Tensor, Tensor]]


# --- the network -----------------------------------------------------------------------------------------------------


def data(N: int, *, samples: int | None = None, classes: bool = False, seed: int = 1) -> Batches:
    """N batches of 3 to 6 samples (or of a fixed number), with targets for a mean square, or class labels."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for t in range(N):
        size = samples or (5, 3, 6, 4)[t % 4]
        x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        target = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        batches.append((x, target.argmax(1) if classes else target))
    return batches


def forward(theta: Theta, z: Tensor) -> Tensor:
    return torch.tanh(z @ theta[0] + theta[1])


def backward(W: Tensor, z_in: Tensor, out: Tensor, g: Tensor) -> tuple[Theta, Tensor]:
    """The gradients of (W, b) and of the input. Stash, hybrid and replay differ in whose W and whose `out`."""
    pre = g * (1 - out**2)
    return (z_in.T @ pre, pre.sum(0)), pre @ W.T


def mean_square(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) ** 2).mean()


def mean_square_gradient(z: Tensor, y: Tensor) -> Tensor:
    return 2 * (z - y) / z.numel()


def cross_entropy_gradient(z: Tensor, y: Tensor) -> Tensor:
    return (torch.softmax(z, 1) - one_hot(y, z.shape[1])) / len(z)


# --- methods with feedback from above --------------------------------------------------------------------------------


def zero_lag(k: int, K: int) -> int:
    return 0


def one_way(k: int, K: int) -> int:
    return K - k


def round_trip(k: int, K: int) -> int:
    return 2 * (K - k)


@dataclass(frozen=True)
class Rules:
    """What a lagged method answers. The defaults are plain back-propagation."""

    lag: Callable[[int, int], int] = zero_lag
    M: int = 1
    weights: str = "stash"  # "hybrid": stored activations, current weights. "replay": both recomputed
    lr: float = LR
    momentum: float = MOMENTUM
    decay: float = DECAY
    shrink: float = 1.0  # FDG: stages below the last scale what comes from above
    window_before: bool = False  # 2BW: batch t forwards on version max(0, floor(t / M) - 1)
    predict: str | None = None  # "velocity", "weight": the forward's weights are predicted
    horizon: float | None = None  # in updates; None: lag / M
    spectrain: int | None = None  # its version, 1 or 2
    spike: bool = False
    spike_delay: float | None = None
    extra: float = 0.0  # updates added to the delay of the compensation
    fraction: float = 1.0  # of the delay, as the horizon of a prediction
    optimizer: str = "sgd"  # "adam", "adamw", "nadam", or one of OURS
    ahead: float = 0.0  # the parameters stay ahead by this fraction of the delay
    ahead_least: float = 0.0  # or by the delay itself, up to this many updates
    rate_power: float = 0.0  # lr / (1 + delay)^power
    look_ahead: float | None = None  # gamma
    compensate: float | None = None  # lambda of delay compensation
    adaptive: bool = False
    anneal: int | None = None  # T1: S1 updates
    discrepancy: float | None = None  # T2: C


@dataclass
class Stage:
    k: int
    K: int
    rules: Rules
    versions: list[Theta]
    velocity: Theta
    drift: Theta  # T2's moving mean of the changes
    square: Theta  # DC-ASGD-a's moving mean of g^2
    used: dict[int, Theta] = field(default_factory=dict)  # batch -> the very weights of its forward
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # as they were forwarded
    window: list[Theta] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    second: Theta | None = None  # Adam's moving mean of g^2, beside the velocity as that of g
    last_step: Theta | None = None  # before the parameters were moved ahead
    forwarded_at: dict[int, int] = field(default_factory=dict)
    late_before: int = 0  # updates with late gradients before versions[0]
    before: int = 0  # updates before versions[0]
    gradients: list[Theta] = field(default_factory=list)  # of all updates, for OURS
    direction: Theta | None = None  # of the last step of OURS

    @property
    def updates(self) -> int:
        """Of the whole training."""
        return self.before + len(self.versions) - 1

    @property
    def late_updates(self) -> int:
        """Of the whole training: where no stage has a lag, none is late."""
        late = any(self.rules.lag(k, self.K) for k in range(1, self.K + 1))
        return self.late_before + (len(self.versions) - 1 if late else 0)

    @property
    def lag(self) -> int:
        return self.rules.lag(self.k, self.K)

    @property
    def delay(self) -> float:
        """Of a gradient, in updates; whole windows run on the version before in 2BW."""
        return 1 if self.rules.window_before else self.lag / self.rules.M

    @property
    def live(self) -> Theta:
        return self.versions[-1]


def program(lag: int, M: int, N: int) -> Iterator[tuple[str, int]]:
    """Local iteration t: forward t, backward t - lag, update after M gradients. Then the drain, and a short window."""
    held = 0
    for t in range(N + lag):
        if t < N:
            yield "forward", t
        if t >= lag:
            yield "backward", t - lag
            held += 1
            if held == M:
                yield "update", held
                held = 0
    if held:
        yield "update", held


def weights_of_forward(stage: Stage, t: int) -> Theta:
    rules, theta = stage.rules, stage.live
    if rules.window_before:
        return stage.versions[max(0, t // rules.M - 1)]
    if rules.spectrain:
        r = stage.k - 1
        ahead = r // 2 + stage.K - r - 1
        return tuple(p - ahead * rate(stage) * v for p, v in zip(theta, stage.velocity))
    if rules.predict:
        T = rules.fraction * stage.delay if rules.horizon is None else rules.horizon
        if rules.predict == "velocity":
            return tuple(p - rate(stage) * T * v for p, v in zip(theta, direction(stage)))
        before = stage.versions[-2] if len(stage.versions) > 1 else theta
        return tuple(p + T * (p - q) for p, q in zip(theta, before))
    return theta


def rate(stage: Stage) -> float:
    """The learning rate of the next update of this stage."""
    rules, lr = stage.rules, stage.rules.lr
    if rules.anneal is not None:
        lr = lr / max(stage.delay, 1) ** (1 - min(stage.late_updates / rules.anneal, 1))
    return lr / (1 + stage.delay) ** rules.rate_power


def direction(stage: Stage) -> Theta:
    """What the optimizer would go along once more: its velocity, or Adam's mean over its root mean square; of OURS the
    direction of the last step."""
    t = stage.updates
    if stage.rules.optimizer in OURS:
        return stage.direction or stage.velocity
    if stage.rules.optimizer == "sgd" or t == 0:
        return stage.velocity
    assert stage.second is not None
    b1, b2 = BETAS
    return tuple((m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + EPS) for m, v in zip(stage.velocity, stage.second))


def adam(stage: Stage, gradients: list[Tensor], lr: float) -> Theta:
    """The next version by Adam, AdamW or NAdam, compensated over D updates (0: as published)."""
    rules, theta, t, (b1, b2) = stage.rules, stage.live, stage.updates + 1, BETAS
    D = compensated_over(stage) if rules.spike else 0.0
    g = gradients if rules.optimizer == "adamw" else [x + rules.decay * p for x, p in zip(gradients, theta)]
    if rules.look_ahead is not None:
        b1 = rules.look_ahead
    stage.velocity = tuple(b1 * m + (1 - b1) * x for m, x in zip(stage.velocity, g))
    second = stage.second or [torch.zeros_like(x) for x in g]
    stage.second = tuple(b2 * v + (1 - b2) * x * x for v, x in zip(second, g))
    if rules.optimizer == "nadam":
        mu = [b1 * (1 - 0.5 * 0.96 ** (n * MU_DECAY)) for n in range(1, t + 2)]
        product = torch.ones(())  # which torch keeps in float32
        for one in mu[:t]:
            product *= one
        P = product.item(), product.item() * mu[t]
        of_g, of_m = (1 - mu[t - 1] ** (1 + D)) / (1 - P[0]), mu[t] ** (1 + D) / (1 - P[1])
    else:
        a = b1**D
        c = a * (1 - b1**t) + 1 - a
        of_g, of_m = (1 - a) / c, a / c
    u = [(of_m * m + of_g * x) / ((v / (1 - b2**t)).sqrt() + EPS) for m, x, v in zip(stage.velocity, g, stage.second)]
    kept = 1 - lr * rules.decay if rules.optimizer == "adamw" else 1.0
    return tuple(kept * p - lr * x for p, x in zip(theta, u))


def ours(stage: Stage, gradients: list[Tensor], lr: float) -> Theta:
    """The next version by an optimizer of this package: W by its equations for matrices, b by those of AdamW."""
    stage.gradients = [*stage.gradients, tuple(gradients)]
    equations, nesterov = OURS[stage.rules.optimizer]
    of_b = partial(literal_optimizers.adamw, betas=(BETAS[0] if nesterov else AVERAGE, BETAS[1]), eps=EPS)
    D = compensated_over(stage) if stage.rules.spike else 0.0
    W, b = (list(given) for given in zip(*stage.gradients))
    stage.direction = last_direction(equations, W, D + nesterov), last_direction(of_b, b, D)
    return tuple(p - lr * (x + stage.rules.decay * p) for p, x in zip(stage.live, stage.direction))


def last_direction(equations: Callable[..., Tensor], gradients: list[Tensor], exponent: float) -> Tensor:
    """Of the step with the last of these gradients, by the difference of two computations: only d of a step depends on
    the exponent, which is that of no earlier step."""
    zero = torch.zeros_like(gradients[0])
    computed = partial(equations, zero, lr=1.0, decay=0.0, exponent=exponent)
    return (computed(gradients[:-1]) if gradients[1:] else zero) - computed(gradients)


def compensated_over(stage: Stage) -> float:
    return (stage.delay if stage.rules.spike_delay is None else stage.rules.spike_delay) + stage.rules.extra


def weights_of_hybrid_backward(stage: Stage) -> Theta:
    rules, theta = stage.rules, stage.live
    if rules.spectrain:
        ahead = (stage.k - 1) // 2
        return tuple(p - ahead * rate(stage) * v for p, v in zip(theta, stage.velocity))
    if rules.discrepancy is not None:
        return tuple(p - stage.delay * d for p, d in zip(theta, stage.drift))
    return theta


def gradient_of(stage: Stage, t: int, from_above: Callable[[Tensor], Tensor]) -> tuple[Theta, Tensor]:
    """`from_above` maps this stage's output to the gradient for it; only the loss looks at the output."""
    rules, z_in, out = stage.rules, stage.inputs[t], stage.outputs[t]
    if rules.weights == "stash":
        W = stage.used[t][0]
    elif rules.weights == "hybrid":
        W = weights_of_hybrid_backward(stage)[0]
    else:
        W, out = stage.live[0], forward(stage.live, z_in)
    g = from_above(out)
    if stage.k < stage.K:
        g = rules.shrink * g
    found, down = backward(W, z_in, out, g)
    if rules.compensate is not None:
        rates: list[Any] = [rules.compensate] * 2
        if rules.adaptive:
            stage.square = tuple(0.95 * s + 0.05 * g * g for s, g in zip(stage.square, found))
            rates = [rules.compensate / (s + 1e-7).sqrt() for s in stage.square]
        moved = [p - q for p, q in zip(stage.live, stage.used[t])]
        found = tuple(g + rate * g * g * m for g, rate, m in zip(found, rates, moved))
    return found, down


def update(stage: Stage) -> None:
    rules, theta, m = stage.rules, stage.live, stage.rules.momentum
    mean = [sum(parts) / len(stage.window) for parts in zip(*stage.window)]
    d = [g + rules.decay * p for g, p in zip(mean, theta)]
    lr = rate(stage)
    if rules.optimizer in OURS:
        new = ours(stage, mean, lr)
    elif rules.optimizer != "sgd":
        new = adam(stage, mean, lr)
    elif rules.look_ahead is not None:
        gamma = rules.look_ahead
        stage.velocity = tuple(gamma * v + x for v, x in zip(stage.velocity, d))
        lr = lr * (1 - gamma) / (1 - m)
        new = tuple(p - lr * (x + gamma * v) for p, x, v in zip(theta, d, stage.velocity))
    elif rules.spike:
        D = compensated_over(stage)
        a, b = m**D, (1 - m**D) / (1 - m)
        stage.velocity = tuple(m * v + x for v, x in zip(stage.velocity, d))
        new = tuple(p - lr * (a * v + b * x) for p, x, v in zip(theta, d, stage.velocity))
    else:
        stage.velocity = tuple(m * v + x for v, x in zip(stage.velocity, d))
        new = tuple(p - lr * v for p, v in zip(theta, stage.velocity))
    if rules.ahead:
        step = tuple(q - p for p, q in zip(theta, new))
        last = stage.last_step or [torch.zeros_like(x) for x in step]
        updates = max(rules.ahead * stage.delay, min(rules.ahead_least, stage.delay))
        new = tuple(q + updates * (x - y) for q, x, y in zip(new, step, last))
        stage.last_step = step
    if rules.discrepancy is not None and stage.delay:
        keep = rules.discrepancy ** (1 / stage.delay)
        stage.drift = tuple(keep * e + (1 - keep) * (q - p) for e, p, q in zip(stage.drift, theta, new))
    stage.versions.append(new)
    stage.window = []


def lagged(
    K: int, batches: Batches, rules: Rules, *, shuffle: int | None = None, after: list[Stage] | None = None
) -> list[Stage]:
    """Run N batches and drain. `shuffle` seeds the order in which stages are asked, which must not matter. `after`: the
    stages of an earlier call, whose weights, optimizers and numbers of updates are continued."""
    N = len(batches)
    zeros = [tuple(torch.zeros_like(p) for p in theta) for theta in network(K)]
    stages = [
        Stage(k, K, rules, [theta], zero, zero, zero) for k, (theta, zero) in enumerate(zip(network(K), zeros), start=1)
    ]
    for stage, before in zip(stages, after or []):
        stage.versions, stage.velocity, stage.second = [before.live], before.velocity, before.second
        stage.before, stage.late_before = before.updates, before.late_updates
        stage.gradients, stage.direction = before.gradients, before.direction
    up = {(0, t): x for t, (x, _) in enumerate(batches)}  # up[k, t]: the output of stage k for batch t
    down: dict[tuple[int, int], Tensor] = {}  # down[k, t]: the gradient for the output of stage k
    todo = {stage.k: list(program(stage.lag, rules.M, N)) for stage in stages}
    asked = list(stages)
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        if shuffle is not None:
            random.Random(shuffle + before).shuffle(asked)
        for stage in asked:
            k = stage.k
            if not todo[k]:
                continue
            what, t = todo[k][0]
            if what == "forward":
                if (k - 1, t) not in up:
                    continue
                stage.inputs[t] = up[k - 1, t]
                stage.used[t] = weights_of_forward(stage, t)
                stage.forwarded_at[t] = len(stage.versions) - 1
                stage.outputs[t] = up[k, t] = forward(stage.used[t], stage.inputs[t])
            elif what == "backward":
                if k < K and (k, t) not in down:
                    continue
                above = (
                    (lambda out, t=t: mean_square_gradient(out, batches[t][1]))
                    if k == K
                    else (lambda out, k=k, t=t: down[k, t])
                )
                found, down[k - 1, t] = gradient_of(stage, t, above)
                stage.staleness[t] = len(stage.versions) - 1 - stage.forwarded_at[t]
                stage.window.append(found)
            else:
                assert t == len(stage.window)
                update(stage)
            todo[k].pop(0)
        assert sum(map(len, todo.values())) < before, "the programs wait for each other"
    return stages


def final(stages: list[Stage]) -> list[Theta]:
    return [stage.live for stage in stages]


# The methods, by their names in the literature.


def bp(M: int = 1) -> Rules:
    return Rules(M=M)


def adl(M: int = 4, weights: str = "stash") -> Rules:
    return Rules(lag=round_trip, M=M, weights=weights)


def adl_1f1b(M: int = 4) -> Rules:
    return Rules(lag=one_way, M=M)


def pipedream() -> Rules:
    return Rules(lag=one_way)


def fdg(beta: float = 1.0, weights: str = "stash") -> Rules:
    return Rules(lag=round_trip, weights=weights, shrink=beta)


def fr() -> Rules:
    return Rules(lag=one_way, weights="replay")


def dsp() -> Rules:
    return Rules(lag=round_trip, weights="replay")


def two_bw(M: int = 8) -> Rules:
    return Rules(lag=one_way, M=M, window_before=True)


def pipemare(M: int = 1, anneal: int | None = None, C: float = 0.135) -> Rules:
    return Rules(lag=round_trip, M=M, weights="hybrid", anneal=anneal, discrepancy=C)


def spectrain(version: int = 1) -> Rules:
    return Rules(lag=one_way, weights="hybrid" if version == 1 else "stash", spectrain=version)


def pb() -> Rules:
    return Rules(lag=round_trip, weights="hybrid", predict="velocity", spike=True)


def nag_async(gamma: float = 0.99) -> Rules:
    return Rules(lag=one_way, look_ahead=gamma)


def asgd(workers: int = 4) -> Rules:
    return Rules(lag=lambda k, K: workers - 1)


def dc_asgd(workers: int = 4, lambda_: float = 0.04, adaptive: bool = False) -> Rules:
    return replace(asgd(workers), compensate=lambda_, adaptive=adaptive)


# --- GPipe -----------------------------------------------------------------------------------------------------------


def gpipe(K: int, batches: Batches, m: int) -> list[Theta]:
    """All parts of a batch see the same weights; each part's mean loss weighs as its share of the samples."""
    thetas = network(K)
    velocity = [tuple(torch.zeros_like(p) for p in theta) for theta in thetas]
    for x, y in batches:
        total = [tuple(torch.zeros_like(p) for p in theta) for theta in thetas]
        for x_part, y_part in zip(torch.tensor_split(x, m), torch.tensor_split(y, m)):
            if len(x_part) == 0:
                continue  # more parts than samples
            z = [x_part]
            for theta in thetas:
                z.append(forward(theta, z[-1]))
            g = mean_square_gradient(z[-1], y_part) * (len(x_part) / len(x))
            for k in reversed(range(K)):
                found, g = backward(thetas[k][0], z[k], z[k + 1], g)
                total[k] = tuple(a + b for a, b in zip(total[k], found))
        for k in range(K):
            d = [g + DECAY * p for g, p in zip(total[k], thetas[k])]
            velocity[k] = tuple(MOMENTUM * v + x for v, x in zip(velocity[k], d))
            thetas[k] = tuple(p - LR * v for p, v in zip(thetas[k], velocity[k]))
    return thetas


# --- local losses ----------------------------------------------------------------------------------------------------


class Momentum:
    """The user's optimizer by hand, on tensors that are replaced or (of a head) written in place."""

    def __init__(self) -> None:
        self.velocity: list[Tensor] | None = None

    def step(self, theta: Iterable[Tensor], gradients: Iterable[Tensor]) -> list[Tensor]:
        theta = list(theta)
        d = [g + DECAY * p for g, p in zip(gradients, theta, strict=True)]
        self.velocity = d if self.velocity is None else [MOMENTUM * v + x for v, x in zip(self.velocity, d)]
        return [p - LR * v for p, v in zip(theta, self.velocity)]


def similarity(h: Tensor) -> Tensor:
    """Adjusted cosine similarity of the samples of a batch, features flat."""
    centred = h - h.mean(1, keepdim=True)
    unit = centred / (1e-8 + centred.pow(2).sum(1).sqrt()).unsqueeze(1)
    return (unit @ unit.T).clamp(-1, 1)


def similarity_loss(h: Tensor, y: Tensor) -> Tensor:
    wanted = similarity(one_hot(y, WIDTH).to(h.dtype))
    return ((similarity(h) - wanted) ** 2).mean()


@dataclass(frozen=True)
class LocalRule:
    """How a stage below the last gets its gradient: of `loss(parts, z, y)`, whose `parts` are the head's own copies."""

    loss: Callable[[dict[str, nn.Module], Tensor, Tensor], Tensor]
    last: float = 1.0  # scales the last stage's cross-entropy


def classifier_loss(parts: dict[str, nn.Module], z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(parts["net"](z), y)


DGL = PRED = LocalRule(classifier_loss)


def sim(beta: float) -> LocalRule:
    return LocalRule(lambda parts, z, y: beta * similarity_loss(parts["project"](z), y))


def pred_sim(beta: float = 0.99) -> LocalRule:
    return LocalRule(
        lambda parts, z, y: (1 - beta) * classifier_loss(parts, z, y) + beta * similarity_loss(parts["project"](z), y),
        last=1 - beta,
    )


Heads = dict[int, dict[str, nn.Module]]


class LocalStage:
    """One layer, its head and their optimizer; only this stage's loss trains them."""

    def __init__(self, k: int, K: int, theta: Theta, rule: LocalRule, parts: dict[str, nn.Module]) -> None:
        self.k, self.K, self.rule = k, K, rule
        self.versions = [theta]
        self.parts = {name: part.train() for name, part in parts.items()}
        self.optimizer = Momentum()
        self.flight: dict[int, tuple[Tensor, Theta]] = {}
        self.found: list[Tensor] | None = None

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        return [p for part in self.parts.values() for p in part.parameters()]

    def forward(self, t: int, z_in: Tensor) -> Tensor:
        self.flight[t] = (z_in, self.versions[-1])
        return forward(self.versions[-1], z_in)

    def backward(self, t: int, y: Tensor) -> None:
        z_in, theta = self.flight.pop(t)
        z = forward(theta, z_in)
        if self.k == self.K:
            g, own = self.rule.last * cross_entropy_gradient(z, y), []
        else:
            leaf = z.clone().requires_grad_()
            g, *own = torch.autograd.grad(self.rule.loss(self.parts, leaf, y), [leaf, *self.head_parameters])
        found, _ = backward(theta[0], z_in, z, g)
        self.found = [*found, *own]

    def update(self) -> None:
        assert self.found is not None
        head = self.head_parameters
        with torch.no_grad():
            new = self.optimizer.step([*self.versions[-1], *head], self.found)
            self.versions.append((new[0], new[1]))
            for p, value in zip(head, new[2:], strict=True):
                p.copy_(value)
        self.found = None


def local(K: int, batches: Batches, rule: LocalRule, heads: Heads) -> list[LocalStage]:
    """Batch by batch up the stages; what is passed on is the output of before the update."""
    stages = [LocalStage(k, K, theta, rule, heads.get(k, {})) for k, theta in enumerate(network(K), start=1)]
    for t, (x, y) in enumerate(batches):
        z = x
        for stage in stages:
            z = stage.forward(t, z)
            stage.backward(t, y)
            stage.update()
    return stages


def async_dgl(K: int, batches: Batches, heads: Heads, programs: dict[int, list[Any]]) -> list[LocalStage]:
    """Decoupled greedy learning over buffers: the program of every stage, to the letter."""
    stages = [LocalStage(k, K, theta, DGL, heads.get(k, {})) for k, theta in enumerate(network(K), start=1)]
    sent: dict[int, list[tuple[int, Tensor]]] = {}
    for stage in stages:  # messages go up only: a stage may finish before the next begins
        k = stage.k
        sent[k] = []
        arriving = iter(sent.get(k - 1, []))
        buffer: dict[int, Tensor] = {}
        for operation in programs[k]:
            what = type(operation).__name__
            if what == "Take":
                t, z = next(arriving)
                assert t == operation.t, f"stage {k} takes batch {operation.t}, the oldest message is of batch {t}"
                buffer[t] = z
            elif what == "Drop":
                del buffer[operation.t]
            elif what == "Forward":
                t = operation.t
                sent[k].append((t, stage.forward(t, batches[t][0] if k == 1 else buffer[t])))
            elif what == "Backward":
                stage.backward(operation.t, batches[operation.t][1])
            elif what == "Update":
                stage.update()
            else:
                raise AssertionError(f"what does {operation} mean here?")
        assert next(arriving, None) is None, f"stage {k} left messages of stage {k - 1}"
    return stages


def mostafa(K: int, batches: Batches, W: dict[int, Tensor], feedback: dict[int, Tensor]) -> list[Theta]:
    """Fixed random classifiers W[k], logits z W^T; the error comes back through feedback[k]: W itself, or its signs."""
    thetas = network(K)
    optimizers = [Momentum() for _ in range(K)]
    for x, y in batches:
        z_in = x
        for k in range(1, K + 1):
            z = forward(thetas[k - 1], z_in)
            g = cross_entropy_gradient(z, y) if k == K else cross_entropy_gradient(z @ W[k].T, y) @ feedback[k]
            found, _ = backward(thetas[k - 1][0], z_in, z, g)
            thetas[k - 1] = tuple(optimizers[k - 1].step(thetas[k - 1], found))
            z_in = z
    return thetas


# --- synthetic gradients ---------------------------------------------------------------------------------------------


def dni(
    batches: Batches,
    thetas: list[Theta],
    nets: dict[int, nn.Module],
    *,
    lr: float = 3e-5,
    conditional: bool = False,
) -> tuple[list[Theta], dict[int, nn.Module]]:
    """Local iteration t: forward t, backward t on S(h)/b, update, teach S the gradient reported for batch t - 2.

    The list `thetas` always holds the present weights of stages 1 to K, so that a net may look at them.
    """
    K = len(thetas)
    nets = {k: net.train() for k, net in nets.items()}
    optimizers = [Momentum() for _ in range(K)]
    teachers = {k: torch.optim.Adam(net.parameters(), lr=lr) for k, net in nets.items()}
    hidden: dict[tuple[int, int], Tensor] = {}  # hidden[k, t]: h of stage k as it was forwarded
    reported: dict[tuple[int, int], Tensor] = {}  # reported[k, t]: stage k + 1's gradient for it

    def label(t: int) -> Tensor | None:
        return one_hot(batches[t][1], WIDTH).double() if conditional else None

    def teach(k: int, t: int) -> None:
        b = len(batches[t][0])
        loss = (nets[k](hidden[k, t], label(t)) - b * reported[k, t]).pow(2).sum() / b
        teachers[k].zero_grad()
        loss.backward()
        teachers[k].step()

    for t, (x, y) in enumerate(batches):
        hidden[0, t] = x
        for k in range(1, K + 1):
            hidden[k, t] = forward(thetas[k - 1], hidden[k - 1, t])
            if k == K:
                g = cross_entropy_gradient(hidden[k, t], y)
            else:
                with torch.no_grad():
                    g = nets[k](hidden[k, t], label(t)) / len(x)
            found, reported[k - 1, t] = backward(thetas[k - 1][0], hidden[k - 1, t], hidden[k, t], g)
            thetas[k - 1] = tuple(optimizers[k - 1].step(thetas[k - 1], found))
            if k < K and t >= 2:
                teach(k, t - 2)
    for k in range(1, K):
        for t in range(max(0, len(batches) - 2), len(batches)):
            teach(k, t)
    return thetas, nets


def copies(**parts: nn.Module) -> dict[str, nn.Module]:
    return {name: copy.deepcopy(part) for name, part in parts.items()}
