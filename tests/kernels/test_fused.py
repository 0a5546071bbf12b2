"""Joined BatchNorm, sums and ReLU: which are found, and that nothing else changes. The kernels: tests/gpu."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from offbeat import models
from offbeat.core import fused
from offbeat.core.fused import Fused
from offbeat.core.weights import call
from offbeat.errors import NotFused, UserError
from offbeat.kernels import batch_norm as norms
from offbeat.kernels.conv3x3 import narrow


class Watching:
    """Stands in for `norm` and notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[bool, bool]] = []  # whether something is added, whether ReLU follows
        monkeypatch.setattr(fused, "norm", self)

    def of(self, model: nn.Module, x: Tensor) -> list[tuple[bool, bool]]:
        """What a forward asks for, behind the one that only tries."""
        run = Fused(1, model)
        run(None, (x,))
        self.asked.clear()
        run(None, (x,))
        return self.asked

    def __call__(self, layer, x, other, *, relu):
        self.asked.append((other is not None, relu))
        return norms.norm(layer, x, other, relu=relu)


def images(channels: int = 3, batch: int = 4) -> Tensor:
    return torch.randn(batch, channels, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "plain", "relu", "added"),
    [
        ("resnet8", 0, 4, 3),
        ("resnet18", 3, 9, 8),
        ("resnet50", 4, 33, 16),
        ("seresnet18", 8, 9, 3),
    ],
)
def test_every_batchnorm_of_a_residual_network_is_joined_with_what_follows(monkeypatch, name, plain, relu, added):
    model = models.build(name, shape=(3, 32, 32), classes=10)
    asked = Watching(monkeypatch).of(model, torch.randn(2, 3, 32, 32))
    assert len(asked) == sum(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    assert [asked.count(one) for one in ((False, False), (False, True), (True, True))] == [plain, relu, added]


def test_outputs_gradients_and_statistics_are_the_same_bits_where_there_is_no_gpu():
    plain = models.build("resnet14", shape=(3, 8, 8), classes=10)
    joined = copy.deepcopy(plain)
    run = Fused(1, joined)
    for _ in range(2):
        x = images()
        one, other = call(plain, None, (x,)), run(None, (x,))
        assert torch.equal(one, other)
        one.square().sum().backward()
        other.square().sum().backward()
    for (name, ours), theirs in zip(plain.named_parameters(), joined.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(plain.named_buffers(), joined.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_it_runs_on_the_tensors_of_a_version_and_can_leave_buffers_alone():
    model = models.build("resnet8", shape=(3, 8, 8), classes=10)
    version = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run, x = Fused(1, model), images()
    out = run(version, (x,), buffers=False)
    assert torch.equal(out, call(model, version, (x,), buffers=False))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(g is not None for g in torch.autograd.grad(out.sum(), list(version.values())))


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (nn.Conv2d(16, 16, 3, padding=1, bias=False), True),
        (nn.Conv2d(32, 32, 3, padding="same", bias=False), True),
        (nn.Conv2d(16, 16, 3, padding=1), False),
        (nn.Conv2d(16, 32, 3, padding=1, bias=False), False),
        (nn.Conv2d(16, 16, 3, padding=1, stride=2, bias=False), False),
        (nn.Conv2d(16, 16, 3, bias=False), False),
        (nn.Conv2d(16, 16, 1, bias=False), False),
        (nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False), False),
        (nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=1, bias=False), False),
        (nn.Conv2d(16, 16, 3, padding=1, bias=False, padding_mode="circular"), False),
        (nn.ReLU(), False),
    ],
)
def test_narrow_convolutions_are_known_by_their_settings(layer, found):
    assert narrow(layer) is found


def test_narrow_convolutions_of_a_network_are_found(monkeypatch):
    seen = []
    monkeypatch.setattr(fused, "convolution", lambda layer, x: seen.append(layer) or layer(x))
    model = models.build("resnet14", shape=(3, 8, 8), classes=10)
    Fused(1, model)(None, (images(),))
    assert len(seen) == 2 * (13 - 1 - 2)  # two forwards; all but the stem and those that halve the resolution


class Block(nn.Module):
    """Ways of writing a residual sum."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv, self.norm, self.way = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.way == "in place":
            y += x
            return F.relu(y)
        if self.way == "used twice":
            return torch.relu(y + x) + y
        if self.way == "scaled":
            return torch.relu(torch.add(y, x, alpha=2))
        if self.way == "a number":
            return torch.relu(y + 1)
        return torch.relu(torch.add(x, y))


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        ("in place", (True, True)),
        ("used twice", (False, False)),
        ("scaled", (False, False)),
        ("a number", (False, False)),
        ("the other way round", (True, True)),
    ],
)
def test_only_what_is_the_same_is_joined(monkeypatch, way, asked):
    assert Watching(monkeypatch).of(block := Block(way), images()) == [asked]
    assert torch.equal(Fused(1, block)(None, (images(),)), block(images()))


def test_a_layer_that_somebody_watches_is_left_alone(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    heard = []
    model[1].register_forward_hook(lambda *given: heard.append(1))
    assert Watching(monkeypatch).of(model, images()) == []
    assert heard


def test_a_layer_that_is_not_in_training_mode_keeps_its_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model[1].eval()
    out = Fused(1, model)(None, (images(),))
    assert torch.equal(out, model(images()))
    assert not model[1].running_mean.any()


class Aliasing(nn.Module):
    """Adds in place to what it still knows under another name, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = before = x * 1
        x += self.norm(x)
        return torch.relu(x) + before


def test_a_trace_that_gives_other_numbers_is_not_used():
    model, kept, x = Aliasing(), torch.get_rng_state(), images()
    run = Fused(2, model)
    with pytest.warns(NotFused, match="stage 2 is not fused and runs as it is: traced, it gives another result"):
        out = run(None, (x,))
    assert torch.equal(kept, torch.get_rng_state())
    assert torch.equal(x, images())
    assert int(model.norm.num_batches_tracked) == 1
    assert torch.equal(out, model(images()))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_traced_runs_unchanged_and_is_reported():
    with pytest.warns(NotFused, match="stage 3 is not fused and runs as it is: it cannot be traced: "):
        run = Fused(3, Branching())
    assert torch.equal(run(None, (images(),)), Branching()(images()))


@pytest.mark.parametrize("method", ["adl", "ddg", "fr", "bp"])
def test_a_pipeline_learns_the_same_with_and_without(method):
    losses = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = models.build("resnet8", shape=(3, 8, 8), classes=10)
        pipe = offbeat.Pipeline(
            model,
            1 if method == "bp" else 2,
            method=method,
            loss=F.cross_entropy,
            fuse=fuse,
            sample=images(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        )
        targets = torch.arange(4)
        losses.append([float(pipe.step(images(), targets)) for _ in range(6)])
    assert losses[0] == losses[1]


def test_micro_batches_are_not_joined():
    pipe = offbeat.Pipeline(
        models.build("resnet8", shape=(3, 8, 8), classes=10),
        2,
        method=offbeat.GPipe(m=2),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        fuse=True,
    )
    with pytest.warns(NotFused, match="its BatchNorm sums up micro-batches"):
        pipe.step(images(), torch.arange(4))


def test_compile_and_fuse_together_are_refused():
    with pytest.raises(UserError, match="compile=True and fuse=True: both join the operations of a stage"):
        offbeat.Pipeline(
            nn.Linear(2, 2), 1, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), compile=True, fuse=True
        )
