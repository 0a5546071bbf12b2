"""Residual networks for small images (CIFAR, digits), one unit per block.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016, section 4.2: depth 6n + 2,
three stages of n basic blocks with 16, 32 and 64 channels, shortcuts without parameters (option A).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import UserError
from offbeat.models import imagenet


class Subsample(nn.Module):
    """The option A shortcut: every second pixel, and zeros for the new channels.

    The zeros follow the old channels. The paper does not define their place; some implementations put half of
    them first. The networks are the same up to the order of channels.
    """

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        # (N, C, H, W) -> (N, C + new, ceil(H / 2), ceil(W / 2)); pad counts from the last dimension backwards
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new))

    def extra_repr(self) -> str:
        return f"new={self.new}"


def resnet(shape: tuple[int, int, int], classes: int, *, depth: int) -> nn.Sequential:
    """The CIFAR residual network of depth 6n + 2: stem, 3n basic blocks, head."""
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise UserError(f"depth={depth} for a CIFAR residual network: use 6n + 2 with n >= 1, that is 8, 14, 20, ...")
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=stem(shape[0], 16))
    given = 16
    for stage, channels in enumerate((16, 32, 64), start=1):
        for block in range(blocks):
            shortcut = nn.Identity() if given == channels else Subsample(channels - given)
            branch = imagenet.basic(given, channels, 1 if given == channels else 2)
            units[f"layer{stage}_{block}"] = imagenet.Residual(nn.Sequential(branch), shortcut)
            given = channels
    units["head"] = imagenet.head(given, classes)
    return nn.Sequential(units)


def resnet18(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """The ImageNet ResNet-18 (option B shortcuts) with a stem that keeps the resolution of small images."""
    units = imagenet.stages(imagenet.basic, (2, 2, 2, 2))
    return nn.Sequential(OrderedDict(stem=stem(shape[0], 64), **units, head=imagenet.head(512, classes)))


def stem(given: int, channels: int) -> nn.Sequential:
    """A 3x3 convolution at full resolution, without pooling."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv=imagenet.convolution(given, channels, kernel=3), norm=nn.BatchNorm2d(channels), relu=nn.ReLU()
        )
    )
