"""Small networks as people write them, none of them for Offbeat."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat import models


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, 2, 1)
        self.fc2 = nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1)))))


class BasicBlock(nn.Module):
    """As torchvision writes it: one ReLU module used twice, in place, and `out += identity`."""

    def __init__(self, given: int, channels: int, stride: int = 1, squeeze: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.se = Squeeze(channels) if squeeze else None
        self.downsample = None
        if stride != 1 or given != channels:
            self.downsample = nn.Sequential(nn.Conv2d(given, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.se is not None:
            out = self.se(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(6, 6, 1, squeeze), BasicBlock(6, 6, 1, squeeze))
        self.layer2 = nn.Sequential(BasicBlock(6, 8, 2, squeeze), BasicBlock(8, 8, 1, squeeze))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given, channels in ((3, 6), (6, 8), (8, 8)):
            layers += [nn.Conv2d(given, channels, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(32, 16),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(16, 16),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).view(x.size(0), -1))


class Inception(nn.Module):
    """Branches joined by torch.cat, and an auxiliary head in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 3, 1)
        self.three = nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 2, 1))
        self.norm = nn.BatchNorm2d(9)
        self.auxiliary = nn.Linear(9, 5)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        x = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        x = F.relu(self.norm(x))
        if self.training:
            auxiliary = self.auxiliary(x.mean((2, 3)))
        x = self.head(F.dropout(x, 0.3, self.training).mean((2, 3)))
        return (x, auxiliary) if self.training else x


class Attention(nn.Module):
    """Causal self-attention, written out with a mask that is a buffer."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.width, self.dropout = heads, width, 0.2
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout, training=self.training)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.length = 8
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(8, 8)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([GPTBlock(8, 2, 8) for _ in range(blocks)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, index: Tensor, targets: Tensor | None = None) -> Any:
        _, t = index.size()
        assert t <= self.length, f"{t} tokens, at most {self.length}"
        position = torch.arange(0, t, dtype=torch.long, device=index.device)
        x = self.drop(self.tokens(index) + self.positions(position))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class ViTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        y, _ = self.attention(query=y, key=y, value=y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 17, 8))
        self.blocks = nn.Sequential(ViTBlock(8), ViTBlock(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        n, c, _, _ = x.shape
        torch._assert(c == 3, "three channels")
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(n, -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)])
        self.middle = nn.Sequential(nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.up = nn.ModuleList([nn.ConvTranspose2d(6, 5, 2, 2), nn.ConvTranspose2d(5, 4, 2, 2)])
        self.join = nn.ModuleList([nn.Conv2d(10, 5, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = F.relu(join(torch.cat([skip, F.interpolate(up(x), size=skip.shape[2:])], 1)))
        return self.head(x)


class Skipping(nn.Module):
    """An MLP whose first value is used by nearly all later layers, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        same = first.contiguous()  # the same tensor under a second name
        y = self.layers[1](first) * first
        y = self.layers[2](torch.tanh(y)) + same
        y = self.layers[3](torch.tanh(y)) + first * y
        y = self.layers[4](y * same) + same + first.exp()
        return self.layers[5](y + first)


class DenseLayer(nn.Module):
    def __init__(self, given: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(given), nn.Conv2d(given, 3, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return F.dropout(self.conv(F.relu(self.norm(torch.cat(features, 1)))), 0.1, training=self.training)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.layers = nn.ModuleList([DenseLayer(4 + 3 * n) for n in range(4)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean([2, 3]))


class InvertedResidual(nn.Module):
    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = 2 * given
        self.conv = nn.Sequential(
            nn.Conv2d(given, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.residual = stride == 1 and given == channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.Hardswish(inplace=True),
            InvertedResidual(4, 4, 1),
            InvertedResidual(4, 6, 2),
            InvertedResidual(6, 6, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm writes it: batch normalisation as a function, a counter that nobody reads, then the activation."""

    def __init__(self, channels: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act() if act is nn.Identity else act(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return self.act(self.drop(x))


class ConvNormAct(nn.Module):
    def __init__(
        self, given: int, channels: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(given, channels, size, stride, size // 2, groups=groups, bias=False)
        self.bn = BatchNormAct2d(channels, act)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class EfficientBlock(nn.Module):
    def __init__(self, given: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.expand = ConvNormAct(given, 2 * given, 1, act=nn.SiLU)
        self.depthwise = ConvNormAct(2 * given, 2 * given, 3, stride, 2 * given, act=nn.SiLU)
        self.se = Squeeze(2 * given)
        self.project = ConvNormAct(2 * given, channels, 1, act=nn.Identity)
        self.has_skip = stride == 1 and given == channels

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.project(self.se(self.depthwise(self.expand(x))))
        return x + shortcut if self.has_skip else x


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 4, 3, 2, act=nn.SiLU)
        self.blocks = nn.Sequential(
            nn.Sequential(EfficientBlock(4, 4), EfficientBlock(4, 4)),
            nn.Sequential(EfficientBlock(4, 6, 2), EfficientBlock(6, 6)),
        )
        self.classifier = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class TimmDenseNet(nn.Module):
    """Every layer reads all features before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 4)
        self.norms = nn.ModuleList([BatchNormAct2d(4 + 3 * n) for n in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(4 + 3 * n, 3, 3, padding=1, bias=False) for n in range(4)])
        self.last = BatchNormAct2d(16)
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs):
            features.append(conv(norm(torch.cat(features, 1))))
        return self.classifier(self.last(torch.cat(features, 1)).mean((2, 3)))


class RegNetBlock(nn.Module):
    def __init__(self, given: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = ConvNormAct(given, channels, 1)
        self.conv2 = ConvNormAct(channels, channels, 3, stride, groups=2)
        self.conv3 = ConvNormAct(channels, channels, 1, act=nn.Identity)
        self.downsample = ConvNormAct(given, channels, 1, stride, act=nn.Identity)
        self.act3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv3(self.conv2(self.conv1(x)))
        x = x + self.downsample(shortcut)
        return self.act3(x)


class RegNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 4, 3, 2)
        self.s1 = nn.Sequential(RegNetBlock(4, 4), RegNetBlock(4, 4))
        self.s2 = nn.Sequential(RegNetBlock(4, 6, 2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.s2(self.s1(self.stem(x))).mean((2, 3)))


class CountingBlock(nn.Module):
    """Counts its calls in a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.relu(self.linear(x))


class DropPath(nn.Module):
    """Stochastic depth as timm writes it: nothing in evaluation mode, five operations in training mode."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.drop == 0.0 or not self.training:
            return x
        keep = 1 - self.drop
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class Stochastic(nn.Module):
    """Dropout and batch normalisation as functions, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.paths = nn.ModuleList([DropPath(p) for p in (0.0, 0.3, 0.4, 0.5)])
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.mean, self.var, self.scale, training=self.training)
        if self.training:
            self.batches.add_(1)
            x = x + 0.1 * torch.randn(6, dtype=x.dtype)
        for layer, path in zip(self.layers, self.paths):
            x = x + path(F.dropout(torch.tanh(layer(x)), p=0.2, training=self.training))
        return x.sum(1, keepdim=True) * x


class InPlace(nn.Module):
    """In-place operations on values that are used again, also through views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x)
        b = self.relu(a)  # a is changed too
        c = self.layers[1](b) + a
        half = c[:, :3]
        d = self.layers[2](c)  # saves c, which must not change until its weight's gradient is there
        e = d + 1
        left = e[:, :3]
        e.mul_(2)  # left sees it
        left += half
        f = self.layers[3](e.clone()) + F.pad(left, (0, 3))
        f += self.layers[4](F.relu(f, inplace=False))
        f[:, 0] = 0.5
        return self.layers[5](F.leaky_relu(f, 0.1, True))


class Random(nn.Module):
    """A random order of layers, views, aliases and in-place operations on random earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.length = seed, random.Random(seed).randrange(5, 20)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(self.length)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(self.length)])
        self.relu, self.identity, self.drop = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        values = [self.layers[0](x)]
        for n in range(1, self.length):
            a, b = choose.choice(values[-4:]), choose.choice(values)
            what = choose.choice(
                (
                    "layer",
                    "norm",
                    "relu",
                    "identity",
                    "drop",
                    "add",
                    "mul",
                    "iadd",
                    "view",
                    "t",
                    "contiguous",
                    "mul_",
                    "dropout",
                    "cat",
                    "chunk",
                    "index",
                    "setitem",
                )
            )
            values.append(self._do(what, n, a, b))
        return sum(values[-3:])

    def _do(self, what: str, n: int, a: Tensor, b: Tensor) -> Tensor:
        match what:
            case "layer":
                return self.layers[n](a)
            case "norm":
                return self.norms[n](a)
            case "relu" | "identity" | "drop":
                return getattr(self, what)(a)
            case "add":
                return a + b
            case "mul":
                return torch.tanh(a) * b
            case "iadd":
                a += b
            case "view":
                return a.view(-1, 6)
            case "t":
                return a.t().t()
            case "contiguous":
                return a.contiguous()
            case "mul_":
                return a.mul_(0.9)
            case "dropout":
                return F.dropout(a, 0.2, self.training)
            case "cat":
                return torch.cat([a, b], 1)[:, 3:9]
            case "chunk":
                left, right = a.chunk(2, 1)
                return torch.cat([right, left * 2], 1)
            case "index":
                return a[:, torch.arange(5, -1, -1)]
            case "setitem":
                a[:, 0] = b[:, 1]
        return a


class Branching(nn.Module):
    """A branch that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Mixed(nn.Module):
    """Traceable around a submodule that is not, with two inputs and a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.branching = Branching()

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        with torch.no_grad():
            frozen = self.first(y)
        x = self.first(x) * scale + frozen
        x = torch.tanh(self.branching(x))
        return {"scores": self.last(x) * y.shape[0], "hidden": x}


@dataclass(frozen=True)
class Case:
    """A network and its input."""

    make: Callable[[], nn.Module]
    sample: Callable[[], Any]


def _images(size: int = 16) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, 3, size, size, dtype=torch.float64)


def _rows() -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64)


def _project(name: str, size: int) -> Callable[[], nn.Module]:
    return lambda: models.build(name, shape=(3, size, size), classes=10)


CASES = {
    "resnet20": Case(_project("resnet20", 8), _images(8)),
    "resnet18": Case(_project("resnet18", 32), lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64)),
    "torchvision-style resnet": Case(ResNet, _images()),
    "se-resnet": Case(lambda: ResNet(squeeze=True), _images()),
    "vgg": Case(VGG, _images()),
    "inception": Case(Inception, _images(8)),
    "vit": Case(ViT, _images()),
    "gpt": Case(GPT, lambda: torch.randint(11, (3, 7))),
    "unet": Case(UNet, _images(8)),
    "skipping mlp": Case(Skipping, _rows),
    "densenet": Case(DenseNet, _images(8)),
    "mobilenet": Case(MobileNet, _images()),
    "timm efficientnet": Case(EfficientNet, _images(8)),
    "timm densenet": Case(TimmDenseNet, _images(8)),
    "timm regnet": Case(RegNet, _images(8)),
    "stochastic": Case(Stochastic, _rows),
    "in place": Case(InPlace, _rows),
    "mixed": Case(Mixed, lambda: (_rows(), _rows())),
}
