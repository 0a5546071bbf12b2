"""One process per stage with torchrun: this script starts itself with two processes on this machine.

    python examples/torchrun.py                               # runs the next line
    torchrun --nproc-per-node 2 examples/torchrun.py          # the usual command

Under torchrun every process runs the same script and makes the same calls; offbeat.Pipeline uses the stage of its rank.
The process of the last stage has the loss, and only the process of the first stage needs the data.
"""

from __future__ import annotations

import os
import subprocess
import sys

K = 2


def train() -> None:
    import torch
    from torch import nn

    import offbeat
    from offbeat import data

    torch.manual_seed(0)  # the same model in all processes; the weights of the first process are used
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(1024, 10)),
    )
    digits = data.open("digits")
    pipe = offbeat.Pipeline(
        model,
        K=K,
        method=offbeat.ADL(M=2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
    print(f"process {os.environ['RANK']} has stage {int(os.environ['RANK']) + 1} of {K}", flush=True)
    # A function of the epoch, which is called only in the process of the first stage.
    pipe.fit(lambda epoch: digits.train(batch_size=32, seed=0, epoch=epoch), epochs=3)
    result = pipe.evaluate(digits.test(batch_size=100) if pipe.first else None)  # the same result in every process
    if pipe.first:
        print(f"test error {result['error']:.2f} %, staleness per stage {[stage.mean for stage in pipe.staleness]}")
        print(f"the whole model is in every process: {sum(p.numel() for p in pipe.model.parameters()):,} parameters")
    pipe.close()


def torchrun() -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(K), __file__]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(torchrun())
