"""A LightningModule that trains through an Offbeat pipeline in two stages, by manual optimization.

    python examples/lightning_module.py

`automatic_optimization = False` is Lightning's documented way to take over backward and optimizer: `training_step`
calls `pipe.step`, which runs one local iteration of every stage. Lightning keeps data, logging, callbacks, validation
and checkpoints of the weights. The weights are those of a loop over `pipe.step`, bit for bit.

A step of Lightning (`max_steps`, `global_step`) is one batch.

Not supported: several devices or strategies of the Trainer (all stages run in this process; use torchrun without
Lightning for a process per stage), its `accumulate_grad_batches`,
`gradient_clip_val` and `precision` (use M, `clip_norm=` and `precision=` of the pipeline), and resuming (a checkpoint
has the weights, without optimizers and batches in flight).
Needs lightning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat import data

try:
    import lightning as L
except ImportError:
    sys.exit("this example needs lightning: pip install lightning")


class PipelineModule(L.LightningModule):
    """A classifier of images, trained in K stages."""

    def __init__(self, model: nn.Module, *, K: int, method: offbeat.Method, lr: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.pipe = offbeat.Pipeline(
            model,
            K=K,
            method=method,
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of no weight, since stages have their own: Lightning counts its steps, and saves checkpoints by them."""
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("train_loss", self.pipe.step(*batch))
        self.optimizers().step()

    def on_train_end(self) -> None:
        self.pipe.drain()  # the batches in flight; then the model has the newest weights

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("error", (self.model(x).argmax(1) != y).float().mean(), batch_size=len(y), prog_bar=True)


class Batches:
    """Batches for a Trainer, made anew for every epoch, which are counted from 0."""

    def __init__(self, made: Callable[[int], Iterator[tuple[Tensor, Tensor]]]) -> None:
        self.made, self.epochs = made, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epochs += 1
        return self.made(self.epochs - 1)


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 10))


def trainer(**settings: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, **{"enable_checkpointing": False, **quiet, **settings})


def main() -> None:
    torch.set_num_threads(1)
    digits = data.open("digits")
    module = PipelineModule(build(), K=2, method=offbeat.ADL(M=2), lr=0.05)
    runner = trainer(max_epochs=8)
    runner.fit(module, Batches(lambda epoch: digits.train(batch_size=32, seed=0, epoch=epoch)))
    (found,) = runner.validate(module, Batches(lambda _: digits.test(batch_size=100)), verbose=False)
    print(f"test error {100 * found['error']:.2f} %")
    print(f"mean staleness per stage in updates {[stage.mean for stage in module.pipe.staleness]}")


if __name__ == "__main__":
    main()
