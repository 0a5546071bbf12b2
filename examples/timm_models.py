"""Train an image model of timm, of torchvision or of your own, in two stages.

    python examples/timm_models.py                                        # efficientnet_b0 of timm
    python examples/timm_models.py mobilenetv3_small_100                  # another model of timm
    python examples/timm_models.py torchvision.models:resnet18            # a function of any module
    python examples/timm_models.py my_module:build                        # of your own
    torchrun --nproc-per-node 2 examples/timm_models.py [MODEL]           # one process per stage, the same results

The images are the handwritten digits that come with Offbeat, enlarged to 32 x 32 pixels, and the weights are random, so
that nothing is downloaded; `timm.create_model(..., pretrained=True)` gives trained ones. A function gets those of
shape= (of an image) and classes= that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from offbeat import data, models

PIXELS, CLASSES, BATCH, EPOCHS, K, M = 32, 10, 32, 3, 2, 2


def build(name: str) -> nn.Module:
    """A model of timm by its name, or what the function MODULE:FUNCTION returns."""
    if ":" in name:
        return models.build(name, shape=(3, PIXELS, PIXELS), classes=CLASSES)
    try:
        import timm
    except ImportError:
        sys.exit("this example needs timm: pip install timm, or give MODULE:FUNCTION that returns a model")
    made: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES)
    return made


def images(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The digits as images of three channels."""
    for x, y in batches:
        yield F.interpolate(x, size=(PIXELS, PIXELS)).repeat(1, 3, 1, 1), y


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(sys.argv[1] if len(sys.argv) > 1 else "efficientnet_b0")
    digits = data.open("digits")
    sample = torch.zeros(BATCH, 3, PIXELS, PIXELS)
    pipe = offbeat.Pipeline(
        model,
        K=K,
        method=offbeat.ADL(M=M),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        clip_norm=1.0,
        sample=sample,
    )
    if pipe.last:
        print(offbeat.partition(model, K, sample, cuts=pipe.cuts, units=pipe.units))
    before = pipe.evaluate(images(digits.test(batch_size=100)))
    pipe.fit(lambda epoch: images(digits.train(batch_size=BATCH, seed=0, epoch=epoch)), epochs=EPOCHS)
    after = pipe.evaluate(images(digits.test(batch_size=100)))
    if pipe.last:
        print(f"test error: {before['error']:.1f}% before, {after['error']:.1f}% after {EPOCHS} epochs")
    pipe.close()


if __name__ == "__main__":
    main()
