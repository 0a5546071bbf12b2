"""Floating-point arguments of a batch that later stages read: as in the unsplit model, they require no gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import offbeat
from offbeat.core.links.wire import pack
from offbeat.core.worker import Worker
from offbeat.engines.streams import Streams

WEIGHTS = ["stash", "hybrid", "replay"]
K = 3


class Attention(nn.Module):
    """Attention with a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, dim=-1)
        return x + self.outer(scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Attentions(TorchFunctionMode):
    """Collects, of every attention with a graph, whether keys and mask require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and torch.is_grad_enabled():
            self.seen.append((args[1].requires_grad, kwargs["attn_mask"].requires_grad))
        return function(*args, **kwargs)


class Masked(nn.Module):
    """Its last stage reads `scale`, all stages what the first makes of `keep`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Attention() for _ in range(K)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, keep: Tensor, scale: Tensor) -> Tensor:
        mask = (keep - 1.0)[:, None, :] * 9.0
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mean(1)) * scale[:, None]


def model() -> Masked:
    torch.manual_seed(0)
    return Masked()


def batches(n: int = 9) -> list[tuple[dict[str, Tensor], Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            {
                "x": torch.randn(5, 6, 8, generator=g),
                "keep": (torch.rand(5, 6, generator=g) < 0.7).float(),
                "scale": torch.rand(5, generator=g) + 0.5,
            },
            torch.randint(4, (5,), generator=g),
        )
        for _ in range(n)
    ]


def pipeline(network: nn.Module, method: offbeat.Method, **options) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        network,
        K,
        method=method,
        cuts=["blocks.1", "blocks.2"],
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        sample=batches(1)[0][0],
        seed=3,
        **options,
    )


def train(pipe: offbeat.Pipeline, data: list) -> list[float]:
    losses = [pipe.step(x, y) for x, y in data]
    pipe.drain()
    return [float(loss) for loss in losses]


def sent_back(monkeypatch) -> list[tuple[int, list, int]]:
    """Stage, gradients and bytes of every message that is sent back from now on."""
    found, send = [], Worker._feed_back

    def watched(self, message) -> None:
        if self.links.feedback:
            found.append((self.stage.k, message.content, pack(message).numel()))
        send(self, message)

    monkeypatch.setattr(Worker, "_feed_back", watched)
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_stage_computes_gradients_of_the_batch(weights):
    pipe = pipeline(model(), offbeat.ADL(M=2, weights=weights))
    with Attentions() as attentions:
        train(pipe, batches())
    assert len(attentions.seen) >= K * len(batches())
    assert set(attentions.seen) == {(True, False)}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("engine", ["simulate", "streams"])
def test_gradients_of_the_activations_alone_are_sent_back(monkeypatch, engine, weights):
    made = Streams(K, torch.device("cpu")) if engine == "streams" else engine
    pipe = pipeline(model(), offbeat.ADL(M=2, weights=weights), engine=made)
    found = sent_back(monkeypatch)
    data = batches()
    train(pipe, data)
    assert {k for k, _, _ in found} == {2, 3}
    for _, gradients, size in found:
        (gradient,) = [each for each in gradients if each is not None]
        assert gradient.shape == data[0][0]["x"].shape
        assert size < gradient.nbytes + 512  # and the header


def test_back_propagation_in_stages_is_that_of_the_model_bit_for_bit():
    whole, network = model(), model()
    pipe = pipeline(network, offbeat.BP())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(whole(**x), y)
        loss.backward()
        optimizer.step()
        assert pipe.step(x, y).item() == loss.item()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name


@pytest.mark.parametrize("weights", WEIGHTS)
def test_recorded_stages_train_the_weights_of_the_simulator(weights):
    one, other = model(), model()
    method = offbeat.ADL(M=2, weights=weights)
    recorded = pipeline(other, method, engine=Streams(K, torch.device("cpu")))
    losses = train(pipeline(one, method), batches(17))
    assert train(recorded, batches(17)) == losses
    assert [worker.executor.eager for worker in recorded.workers] == [None] * K
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nothing_is_sent_back_to_stages_that_are_frozen(monkeypatch, weights):
    network = model()
    network.stem.requires_grad_(False)
    network.blocks[0].requires_grad_(False)
    pipe = pipeline(network, offbeat.ADL(M=2, weights=weights))
    found = sent_back(monkeypatch)
    train(pipe, batches())
    counts = {k: {sum(each is not None for each in content) for at, content, _ in found if at == k} for k in (2, 3)}
    assert counts == {2: {0}, 3: {1}}


class First(nn.Linear):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(batch["x"]).mean(1), batch["scale"]


class Second(nn.Linear):
    def forward(self, arrived: tuple[Tensor, Tensor]) -> Tensor:
        x, scale = arrived
        assert not scale.requires_grad
        return super().forward(x.tanh()) * scale[:, None]


def test_a_list_of_stages_needs_no_gradient_of_the_batch_either(monkeypatch):
    pipe = offbeat.Pipeline(
        [First(8, 8), Second(8, 4)],
        method=offbeat.ADL(M=1),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    found = sent_back(monkeypatch)
    train(pipe, batches())
    assert {tuple(each is not None for each in content) for _, content, _ in found} == {(True, False)}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("earlier", [False, True])
def test_batches_in_flight_are_restored_from_this_and_from_earlier_versions(weights, earlier):
    method, data = offbeat.ADL(M=2, weights=weights), batches(12)
    whole, saved, resumed = model(), model(), model()
    expected = train(pipeline(whole, method), data)
    pipe = pipeline(saved, method)
    for stage in pipe.stages.values():
        stage.keep()
    for x, y in data[:6]:
        pipe.step(x, y)
    trees = pytree.tree_map_only(Tensor, Tensor.clone, pipe.stage_states())
    for k, entry in [(k, entry) for k, tree in trees.items() for entry in tree["stage"]["in_flight"]]:
        marked = (entry.pop if earlier else entry.get)("requires_grad", [])
        assert marked.count(True) == (k > 1)
    other = pipeline(resumed, method)
    other.load_stage_states(trees, batches=6)
    assert train(other, data[6:]) == expected[6:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
