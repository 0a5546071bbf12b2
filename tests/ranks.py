"""What each of K processes runs that share one GPU; see gpu/test_ranks.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import offbeat
from offbeat.engines.processes import Processes

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(given, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        for given in (3, 16, 16)
    ]
    return nn.Sequential(*blocks, nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)))


def trained(method: str, engine: str, K: int, messages: str = "exact") -> dict:
    """Fingerprints of all tensors after two short epochs, with an evaluation and a drain in between."""
    first = engine != "processes" or int(os.environ["RANK"]) == 0
    made = Processes(K, device=GPU) if engine == "processes" else engine
    pipe = offbeat.Pipeline(
        network(),
        K,
        method=method,
        M=2 if method == "adl" else None,
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        device=GPU,
        engine=made,
        messages=messages,
        cuts=[1, 2, 3][: K - 1],
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 10)),
    )
    losses = []  # looked at only in the end: what a step gives must last
    generator = torch.Generator().manual_seed(7)
    for epoch in range(2):
        for b in [32] * 20 + [19]:
            x, y = torch.randn(b, 3, 8, 8, generator=generator), torch.randint(10, (b,), generator=generator)
            losses.append(pipe.step(x.to(GPU), y.to(GPU)) if first else pipe.step())
        pipe.evaluate([(x.to(GPU), y.to(GPU))] if first else None)
        if epoch == 0:
            pipe.drain()
    pipe.drain()
    recorded = [getattr(worker.executor, "eager", "not recorded") is None for worker in pipe.workers]
    state = {
        name: hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in pipe.model.state_dict().items()
    }
    pipe.close()
    return {
        "weights": state,
        "recorded": recorded,
        "staleness": [dict(stage) for stage in pipe.staleness],
        "losses": [None if loss is None else float(loss) for loss in losses],
    }


def main(out: str, method: str, messages: str) -> None:
    deterministic()
    found = trained(method, "processes", int(os.environ["WORLD_SIZE"]), messages)
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False


if __name__ == "__main__":
    main(*sys.argv[1:])
