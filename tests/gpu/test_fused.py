"""Joined BatchNorm, sum and ReLU on a GPU: the numbers of torch, and the same bits in every engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat import models
from offbeat.kernels import batch_norm as norms
from offbeat.kernels.conv3x3 import convolution

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not norms.available(), reason="needs a GPU, and triton"),
]
GPU = torch.device("cuda")
SHAPES = [(32, 16, 32, 32), (32, 64, 8, 8), (2, 3, 5, 7), (3, 72, 9, 9), (19, 130, 4, 4), (130, 16, 32, 32)]


def image(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(shape, device=GPU) + 3).to(dtype).contiguous(memory_format=torch.channels_last)


def apart(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_batchnorm_a_sum_and_relu(shape, dtype):
    close = {torch.float32: 1e-4, torch.bfloat16: 5e-3}[dtype]
    for added, relu in itertools.product((False, True), (False, True)):
        torch.manual_seed(0)
        layer = nn.BatchNorm2d(shape[1], device=GPU)
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
        exact = nn.BatchNorm2d(shape[1], device=GPU).double()
        exact.load_state_dict(layer.state_dict())
        x, other, gradient = (image(*shape, dtype=dtype) for _ in range(3))
        ours = [x.clone().requires_grad_(), other.clone().requires_grad_() if added else None]
        theirs = [None if t is None else t.detach().double().requires_grad_() for t in ours]
        y = norms.norm(layer, *ours, relu=relu)
        assert type(y.grad_fn).__name__ == "_NormBackward"
        z = exact(theirs[0]) if not added else exact(theirs[0]) + theirs[1]
        wanted = z * (y > 0) if relu else z  # what is rounded to zero is zero for ours
        y.backward(gradient)
        wanted.backward(gradient.double())
        pairs = [
            (y, F.relu(z) if relu else z),
            (ours[0].grad, theirs[0].grad),
            (layer.weight.grad, exact.weight.grad),
            (layer.bias.grad, exact.bias.grad),
            (layer.running_mean, exact.running_mean),
            (layer.running_var, exact.running_var),
        ]
        pairs += [(ours[1].grad, theirs[1].grad)] if added else []
        assert [apart(a, b) < close for a, b in pairs] == [True] * len(pairs), (added, relu)
        assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_none(dtype):
    x = image(4, 16, 8, 8, dtype=dtype)
    x[1, 3, 2, 2] = float("nan")
    y = norms.norm(nn.BatchNorm2d(16, device=GPU), x, None, relu=True)
    assert [bool(channel.isnan().all()) for channel in y.unbind(1)] == [number == 3 for number in range(16)]


NARROW = [(32, 16, 32, 32), (32, 32, 16, 16), (32, 64, 8, 8), (3, 32, 5, 7), (300, 16, 32, 32)]


@pytest.mark.parametrize("shape", NARROW)
def test_a_narrow_convolution_is_a_convolution(shape):
    torch.manual_seed(0)
    layer = nn.Conv2d(shape[1], shape[1], 3, padding=1, bias=False, device=GPU, dtype=torch.bfloat16)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    exact = nn.Conv2d(shape[1], shape[1], 3, padding=1, bias=False, device=GPU).double()
    exact.load_state_dict(layer.state_dict())
    x, gradient = image(*shape, dtype=torch.bfloat16).requires_grad_(), image(*shape, dtype=torch.bfloat16)
    theirs = x.detach().double().requires_grad_()
    y, z = convolution(layer, x), exact(theirs)
    assert type(y.grad_fn).__name__ == "_ConvolutionBackward"
    y.backward(gradient)
    z.backward(gradient.double())
    assert apart(y, z) < 5e-3
    assert apart(x.grad, theirs.grad) < 5e-3
    assert apart(layer.weight.grad, exact.weight.grad) < 5e-3


@pytest.mark.parametrize(
    "method", [offbeat.BP(M=2), offbeat.ADL(M=2), offbeat.ADL(M=1, weights="hybrid"), offbeat.FR()]
)
def test_streams_give_the_bits_of_simulate(method):
    weights = []
    for engine in ("simulate", "streams"):
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            models.build("resnet8", shape=(3, 16, 16), classes=10),
            1 if method.name == "bp" else 3,
            method=method,
            loss=F.cross_entropy,
            device=GPU,
            engine=engine,
            precision="bf16",
            fuse=True,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        )
        generator = torch.Generator(GPU).manual_seed(1)
        for _ in range(30):
            x = torch.randn(16, 3, 16, 16, device=GPU, generator=generator)
            pipe.step(x, torch.randint(10, (16,), device=GPU, generator=generator))
        pipe.drain()
        weights.append(pipe.model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_it_learns_what_torch_learns():
    losses = []
    for fuse in (False, True):
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            models.build("resnet20", shape=(3, 16, 16), classes=10),
            1,
            method="bp",
            loss=F.cross_entropy,
            device=GPU,
            precision="bf16",
            fuse=fuse,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        )
        x, y = torch.randn(32, 3, 16, 16, device=GPU), torch.arange(32, device=GPU) % 10
        losses.append([float(pipe.step(x, y)) for _ in range(40)])
    assert losses[1][0] == pytest.approx(losses[0][0], rel=2e-2)
    assert losses[1][-1] == pytest.approx(losses[0][-1], abs=0.1)
    assert losses[1][-1] < 0.5 < losses[1][0]
