"""Networks by name: our own, of a function, or of transformers.

    resnet56                          one of ours: an nn.Sequential, whose direct children are the units to cut between
    gpt:layers=4,width=128            ours, with settings
    my_package.my_module:build        what a function returns (see models/function.py)
    hf:config.json, hf:FOLDER         a causal language model of transformers (see models/hugging_face.py)

Networks have no code for parallel training. They take images of shape (channels, height, width), or tokens: int64 of
shape (context,). May import errors, settings and partitioning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from offbeat.errors import UserError, unknown
from offbeat.models import cifar, function, hugging_face, imagenet
from offbeat.models.gpt import gpt
from offbeat.models.mlp import mlp
from offbeat.models.spec import NetworkSpec, Shape, takes_tokens
from offbeat.settings import declared, listed, split

__all__ = [
    "ModelDescription",
    "Shape",
    "build",
    "default_size",
    "describe",
    "names",
    "random_batch",
    "skeleton",
    "takes_tokens",
]


@dataclass(frozen=True)
class ModelDescription:
    """The size of a network at its default shape and classes.

    parameters   number of trained parameters
    flops        of the forward pass of one sample: two per multiply-add of convolutions and linear layers only
    units        largest number of stages
    """

    name: str
    parameters: int
    flops: int
    units: int
    shape: Shape
    classes: int


def _cifar(make: Callable[..., nn.Sequential], **options: Any) -> NetworkSpec:
    # the resolution is halved twice: at least one pixel must be left to pool
    return NetworkSpec(partial(make, **options), (3, 32, 32), 10, 4)


def _imagenet(branch: imagenet.Branch, *blocks: int, **options: Any) -> NetworkSpec:
    # the resolution is halved five times
    return NetworkSpec(partial(imagenet.resnet, branch=branch, blocks=blocks, **options), (3, 224, 224), 1000, 32)


def _gpt(name: str) -> NetworkSpec:
    """Of the text of a gpt with its settings. A context that is given must be that of the data."""
    takes = {setting: it for setting, it in declared(gpt).items() if setting != "vocabulary"}
    example = "as in gpt:layers=12,width=256,heads=4,context=128"
    try:
        _, texts = split(name)
    except UserError:
        raise UserError(f"model {name!r}: give each setting once and with a value, {example}") from None
    for setting in texts:
        if setting not in takes:
            raise UserError(f"model {name!r}: gpt takes no {setting}: {listed(takes)}, {example}")
    options = {setting: takes[setting].read(text) for setting, text in texts.items()}
    context = options.pop("context", None)

    def make(shape: Shape, vocabulary: int) -> nn.Sequential:
        return gpt(vocabulary, **options, context=shape[0])

    return NetworkSpec(make, (context or takes["context"].default,), 256, fixed=context is not None)


MODELS: dict[str, NetworkSpec] = {
    "mlp": NetworkSpec(mlp, (1, 8, 8), 10, 1),
    "resnet8": _cifar(cifar.resnet, depth=8),
    "resnet14": _cifar(cifar.resnet, depth=14),
    "resnet20": _cifar(cifar.resnet, depth=20),
    "resnet32": _cifar(cifar.resnet, depth=32),
    "resnet44": _cifar(cifar.resnet, depth=44),
    "resnet56": _cifar(cifar.resnet, depth=56),
    "resnet98": _cifar(cifar.resnet, depth=98),
    "resnet110": _cifar(cifar.resnet, depth=110),
    "resnet164": _cifar(cifar.resnet, depth=164),
    "resnet1202": _cifar(cifar.resnet, depth=1202),
    "resnet18-cifar": _cifar(cifar.resnet18),
    "resnet18": _imagenet(imagenet.basic, 2, 2, 2, 2),
    "resnet34": _imagenet(imagenet.basic, 3, 4, 6, 3),
    "resnet50": _imagenet(imagenet.bottleneck, 3, 4, 6, 3, expansion=4),
    "resnet101": _imagenet(imagenet.bottleneck, 3, 4, 23, 3, expansion=4),
    "resnet152": _imagenet(imagenet.bottleneck, 3, 8, 36, 3, expansion=4),
    "seresnet18": _imagenet(imagenet.basic, 2, 2, 2, 2, squeeze=True),
    "seresnet50": _imagenet(imagenet.bottleneck, 3, 4, 6, 3, expansion=4, squeeze=True),
    "gpt": _gpt("gpt"),
}


def names() -> list[str]:
    """The names of all networks."""
    return list(MODELS)


def build(name: str, *, shape: Shape | None = None, classes: int | None = None) -> nn.Module:
    """A freshly initialised network; the units of ours are its direct children.

    `shape` of one sample is (channels, height, width) of an image or (context,) of tokens; `classes` are those of an
    image, or the vocabulary. Both default to those of the network. Weights are drawn from torch's global generator,
    which the caller seeds.

    >>> [unit for unit, _ in build("resnet8", shape=(1, 8, 8)).named_children()]
    ['stem', 'layer1_0', 'layer2_0', 'layer3_0', 'head']
    >>> [unit for unit, _ in build("gpt:layers=2,width=16,heads=2", shape=(8,)).named_children()]
    ['embedding', 'block0', 'block1', 'head']
    """
    spec = find(name)
    shape = _default(name, "shape", spec.shape) if shape is None else _usable_shape(name, spec, shape)
    classes = _default(name, "classes", spec.classes) if classes is None else classes
    if not _whole(classes, 1):
        raise UserError(f"classes={classes!r} for {name}: use a whole number from 1 up, such as {spec.classes or 10}")
    return spec.make(shape, classes)


def skeleton(name: str, shape: Shape, classes: int) -> nn.Module:
    """The network to be cut by its FLOPs: on the meta device, without weights. Others than ours have weights, since
    their code may read values."""
    with torch.device("meta") if find(name).ours else torch.random.fork_rng(devices=[]):
        return build(name, shape=shape, classes=classes)


def describe(name: str) -> ModelDescription:
    """The size of a network, counted on the meta device, without memory for weights and without random numbers.

    >>> describe("resnet20")
    ModelDescription(name='resnet20', parameters=269722, flops=81102080, units=11, shape=(3, 32, 32), classes=10)
    """
    shape, classes = default_size(name)
    with torch.device("meta"):
        network = build(name).eval()
    sample = random_batch(1, shape, classes, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(sample)
    parameters = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return ModelDescription(name, parameters, counter.get_total_flops(), len(list(network.children())), shape, classes)


def find(name: str) -> NetworkSpec:
    """What builds the network of that name; raises UserError where there is none."""
    kind, colon, rest = name.partition(":")
    if name in MODELS:
        return MODELS[name]
    if kind == "gpt" and colon:
        return _gpt(name)
    if kind == "hf" and colon:
        return hugging_face.spec(rest)
    if colon and kind not in MODELS:
        return function.spec(name)
    raise UserError(f"{unknown('model', name, MODELS)}; for your own give MODULE:FUNCTION, or use offbeat.Pipeline")


def default_size(name: str, *, shape: Shape | None = None) -> tuple[Shape, int]:
    """Shape of a sample and classes of a network: its own, unless a shape is given."""
    spec = find(name)
    shape = _default(name, "shape", spec.shape) if shape is None else _usable_shape(name, spec, shape)
    return shape, spec.classes if spec.classes is not None else 256 if takes_tokens(shape) else 10


def random_batch(
    samples: int,
    shape: Shape,
    classes: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Inputs of that shape: tokens below `classes`, or images of normal noise. Empty on the meta device.

    Drawn from the generator, by default from one of its own: torch's global generator stays as it is.

    >>> random_batch(2, (8,), 256).dtype, random_batch(2, (3, 4, 4), 10).shape
    (torch.int64, torch.Size([2, 3, 4, 4]))
    """
    if generator is None and torch.device(device).type != "meta":
        generator = torch.Generator(device).manual_seed(0)
    if takes_tokens(shape):
        return torch.randint(classes, (samples, *shape), generator=generator, device=device)
    return torch.randn(samples, *shape, generator=generator, device=device)


def _default(name: str, what: str, value: Any) -> Any:
    if value is None:
        raise UserError(f"{name} has no {what} of its own: give {what}=")
    return value


def _usable_shape(name: str, spec: NetworkSpec, shape: Any) -> Shape:
    given = tuple(shape) if isinstance(shape, tuple | list) else ()
    if spec.shape is None and given and all(_whole(size, 1) for size in given):
        return given
    own = spec.shape or (1,)
    if len(given) == len(own) == 1 and _whole(given[0], 1):
        if spec.fixed and given != own:
            raise UserError(
                f"shape={given}, but {name} has a context of {own[0]} tokens: give the same number, or only one of them"
            )
        if spec.longest is not None and given[0] > spec.longest:
            raise UserError(f"shape={given}: {name} takes at most {spec.longest} tokens, use a smaller shape")
        return given
    if takes_tokens(own):
        raise UserError(f"shape={shape!r} for {name}: use the number of tokens of a sample, such as {own}")
    smallest = (1, spec.smallest, spec.smallest)
    if len(given) == 3 and all(map(_whole, given, smallest)):
        return given
    raise UserError(
        f"shape={shape!r} for {name}: use (channels, height, width) of at least {smallest}, such as {spec.shape}, "
        "or enlarge the images"
    )


def _whole(value: Any, least: int) -> bool:
    # bool is a subclass of int
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
