"""One process per stage, started by Accelerate: on GPUs `accelerate launch` starts torchrun, which Offbeat reads.

    python examples/accelerate_launch.py                                             # both stages in this process
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_launch.py    # a process per stage

The script makes no Accelerator: `offbeat.Pipeline` reads RANK and WORLD_SIZE, and takes the place of `prepare`,
`backward` and the optimizer. Results are the same in one process and in two.

Not supported: options of Accelerate for precision, data parallelism, FSDP and DeepSpeed have no effect (use
`precision=` and `replicas=` of the pipeline), and `accelerate launch --cpu` starts a single process (use torchrun).
"""

from __future__ import annotations

import torch
from torch import nn

import offbeat
from offbeat import data

K = 2


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    digits = data.open("digits")
    pipe = offbeat.Pipeline(
        nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 10)),
        K=K,
        method=offbeat.ADL(M=2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        device="cpu",  # leave this out to give each process its GPU
    )
    pipe.fit(lambda epoch: digits.train(batch_size=32, seed=0, epoch=epoch), epochs=3)
    result = pipe.evaluate(digits.test(batch_size=100) if pipe.first else None)
    if pipe.first:
        print(f"stages in this process: {len(pipe.stages)} of {K}")
        print(f"test loss {result['loss']}, error {result['error']:.2f} %")
    pipe.close()


if __name__ == "__main__":
    main()
