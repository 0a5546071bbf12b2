"""A comparison as a script: several methods on one model and one data set, in one table.

    python examples/comparison.py

`offbeat compare` does the same for built-in networks, with several seeds, matched settings, records and curves. This
script is for your own model.
"""

from __future__ import annotations

import torch
from torch import nn

import offbeat
from offbeat import data

K, EPOCHS, BATCH = 3, 2, 32
METHODS = {
    "back-propagation": offbeat.BP(),
    "the same, 2 batches per update": offbeat.BP(M=2),
    "ADL": offbeat.ADL(M=2),
    "ADL, spike compensation": offbeat.ADL(M=2, corrector=offbeat.SpikeCompensation()),
    "ADL on the 1F1B lag": offbeat.ADL1F1B(M=2),
    "GPipe, 4 micro-batches": offbeat.GPipe(m=4),
}


def network() -> nn.Sequential:
    """A network with the same initial weights in every call."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *inner, nn.Sequential(nn.Flatten(), nn.Linear(1024, 10)))


def main() -> None:
    torch.set_num_threads(1)
    digits = data.open("digits")
    print(f"{'method':30} {'test error':>10}  staleness per stage, in updates")
    for name, method in METHODS.items():
        rate = 0.02 * method.M  # the linear rule: proportional to the samples per update
        pipe = offbeat.Pipeline(
            network(),
            K=K,
            method=method,
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        )
        pipe.fit(lambda epoch: digits.train(batch_size=BATCH, seed=0, epoch=epoch), epochs=EPOCHS)
        error = pipe.evaluate(digits.test(batch_size=100))["error"]
        print(f"{name:30} {error:8.2f} %  {' '.join(f'{stage.mean:.2f}' for stage in pipe.staleness)}")
    print(f"{EPOCHS} epochs and one seed: this shows that all methods learn, not which is better")


if __name__ == "__main__":
    main()
