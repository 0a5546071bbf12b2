"""Residual networks for ImageNet, plain and with squeeze-excitation, one unit per block.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016; Hu, Shen and Sun,
"Squeeze-and-Excitation Networks", 2018. As in torchvision, a bottleneck strides on its 3x3 convolution.

No operation works in place, so a unit never changes the output of the previous unit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

REDUCTION = 16  # ratio of the channels in squeeze-excitation

Branch = Callable[[int, int, int], "OrderedDict[str, nn.Module]"]


class Residual(nn.Module):
    """A residual block: relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + self.shortcut(x))


class SqueezeExcitation(nn.Module):
    """A gate in (0, 1) for every channel, computed from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, channels // REDUCTION)
        self.relu = nn.ReLU()
        self.up = nn.Linear(channels // REDUCTION, channels)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        squeezed = x.mean((2, 3))  # (N, C, H, W) -> (N, C)
        gate = self.gate(self.up(self.relu(self.down(squeezed))))
        return x * gate[:, :, None, None]


def resnet(
    shape: tuple[int, int, int],
    classes: int,
    *,
    branch: Branch,
    blocks: Sequence[int],
    expansion: int = 1,
    squeeze: bool = False,
) -> nn.Sequential:
    """A residual network with the ImageNet stem; `blocks` has the number of blocks per stage."""
    stem = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv=convolution(shape[0], 64, kernel=7, stride=2),
            norm=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
        )
    )
    units = stages(branch, blocks, expansion=expansion, squeeze=squeeze)
    features = 64 * 2 ** (len(blocks) - 1) * expansion
    return nn.Sequential(OrderedDict(stem=stem, **units, head=head(features, classes)))


def stages(
    branch: Branch, blocks: Sequence[int], *, expansion: int = 1, squeeze: bool = False
) -> OrderedDict[str, nn.Module]:
    """Stages of 64, 128, 256, ... channels (times the expansion), each but the first halving the resolution."""
    units: OrderedDict[str, nn.Module] = OrderedDict()
    given = 64
    for stage, count in enumerate(blocks):
        channels = 64 * 2**stage * expansion
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers = branch(given, channels, stride)
            if squeeze:
                layers["squeeze"] = SqueezeExcitation(channels)
            units[f"layer{stage + 1}_{block}"] = Residual(nn.Sequential(layers), projection(given, channels, stride))
            given = channels
    return units


def basic(given: int, channels: int, stride: int) -> OrderedDict[str, nn.Module]:
    """The branch of a basic block: two 3x3 convolutions, the first with the stride."""
    return OrderedDict[str, nn.Module](
        conv1=convolution(given, channels, kernel=3, stride=stride),
        norm1=nn.BatchNorm2d(channels),
        relu1=nn.ReLU(),
        conv2=convolution(channels, channels, kernel=3),
        norm2=nn.BatchNorm2d(channels),
    )


def bottleneck(given: int, channels: int, stride: int) -> OrderedDict[str, nn.Module]:
    """The branch of a bottleneck: 1x1 to a quarter of the channels, 3x3 with the stride, 1x1 back."""
    narrow = channels // 4
    return OrderedDict[str, nn.Module](
        conv1=convolution(given, narrow, kernel=1),
        norm1=nn.BatchNorm2d(narrow),
        relu1=nn.ReLU(),
        conv2=convolution(narrow, narrow, kernel=3, stride=stride),
        norm2=nn.BatchNorm2d(narrow),
        relu2=nn.ReLU(),
        conv3=convolution(narrow, channels, kernel=1),
        norm3=nn.BatchNorm2d(channels),
    )


def projection(given: int, channels: int, stride: int) -> nn.Module:
    """The option B shortcut: the identity where sizes agree, else a strided 1x1 convolution."""
    if given == channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv=convolution(given, channels, kernel=1, stride=stride), norm=nn.BatchNorm2d(channels)
        )
    )


def convolution(given: int, channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (a normalisation follows) that divides the resolution by its stride, rounding up.

    He initialisation by fan out keeps the variance of the gradient from layer to layer.
    """
    layer = nn.Conv2d(given, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def head(features: int, classes: int) -> nn.Sequential:
    """Global average pooling and one linear layer.

    Linear layers (here and in squeeze-excitation) keep PyTorch's initialisation, as torchvision's do:
    uniform within 1/sqrt(inputs), weights and biases alike. Normalisations keep theirs: scale 1, shift 0.
    """
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            pool=nn.AdaptiveAvgPool2d(1),  # (N, C, H, W) -> (N, C, 1, 1)
            flatten=nn.Flatten(),  # -> (N, C)
            linear=nn.Linear(features, classes),
        )
    )
