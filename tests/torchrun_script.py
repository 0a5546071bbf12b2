"""What each of K processes runs, by the name of a case; see engines/test_torchrun.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import offbeat
from offbeat.errors import UserError

RANK = int(os.environ.get("RANK", "0"))
BATCHES = 23


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 3))


def data(epoch: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    return [(torch.randn(5, 6, generator=generator), torch.arange(5) % 3) for _ in range(BATCHES)]


def build(K: int, **options) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        network(),
        K,
        method="adl",
        M=2,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8),
        **options,
    )


def fingerprint(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()


class Stop(Exception):
    pass


def save_at(pipe: offbeat.Pipeline, folder: Path, batches: int, *, drain: bool) -> None:
    """Train up to a checkpoint after that many batches."""

    def after_step(t: int) -> None:
        if t + 1 == batches:
            pipe.save(folder, drain=drain)

    steps = pipe.steps(data, 2, after_step=after_step)
    for _ in range(batches + batches // BATCHES):
        next(steps)
    steps.close()


def saved(out: Path, K: int) -> dict:
    """A checkpoint with batches in flight, and one without, of K processes."""
    pipe = build(K)
    save_at(pipe, out / "in-flight", 30, drain=False)
    dcp.save(pipe.state_dict(), checkpoint_id=out / "dcp")
    pipe.save(out / "drained", drain=True)
    pipe.close()
    return {}


def resumed(out: Path, K: int) -> dict:
    """The same checkpoints, continued in K processes."""
    found = {}
    for name in ("in-flight", "drained"):
        pipe = build(K)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", offbeat.NotRestored)  # at another K
            pipe.load(out / name)
            pipe.fit(data, 2, resume=True)
        found[name] = fingerprint(pipe.model)
        pipe.close()
    return found


def outdated(out: Path, K: int) -> dict:
    """Which reads of the model warn."""
    pipe = build(K)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data(0)[:4]:
            pipe.step(x, y)
        pipe.gather()
        pipe.model.state_dict()
        up_to_date = len(caught)
        pipe.step(*data(0)[4])
        pipe.model.state_dict()
        pipe.model.state_dict()
    pipe.close()
    return {"up_to_date": up_to_date, "then": [type(each.message).__name__ for each in caught]}


def failing(out: Path, K: int) -> dict:
    """Evaluations that fail, in the loader, in a stage and in the metric; training goes on."""
    errors = []

    def loader():
        yield from data(0)[:3]
        raise OSError("no more files")

    def metric(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("accuracy")

    pipe, plain = build(K), build(K)
    for x, y in data(0)[:9]:
        pipe.step(x, y), plain.step(x, y)
    wrong = [*data(0)[:6], (torch.zeros(5, 7), torch.arange(5) % 3), *data(0)[:6]]
    original = {k: stage.evaluate for k, stage in pipe.stages.items()}
    for given, kind in ((loader(), None), (wrong, None), (data(0), "metric"), (data(0), "stage")):
        if kind == "stage" and 2 in pipe.stages:
            pipe.stages[2].evaluate = lambda x: 1 / 0
        try:
            pipe.evaluate(given, metric=metric if kind == "metric" else None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
    for k, stage in pipe.stages.items():
        stage.evaluate = original[k]
    assert pipe.evaluate(data(0)) == plain.evaluate(data(0))
    for x, y in data(0)[9:]:
        pipe.step(x, y), plain.step(x, y)
    same = fingerprint(pipe.drain()) == fingerprint(plain.drain())
    plain.close()
    pipe.close()  # the one that joined the group
    return {"errors": errors, "same": same}


def mismatch(out: Path, K: int) -> dict:
    """Calls that differ between processes."""
    pipe = build(K, timeout=3)
    for x, y in data(0)[:4]:
        pipe.step(x, y)
    began = time.monotonic()
    try:
        if RANK == 0:
            pipe.evaluate(data(0)[:1])  # in one process only
        else:
            pipe.drain()
    except UserError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {}


def shorter(out: Path, K: int) -> dict:
    """Loops of different lengths: the first process ends."""
    pipe = build(K, timeout=60)
    for x, y in data(0)[: 4 if RANK == 0 else 6]:
        try:
            pipe.step(x, y)
        except UserError as error:
            return {"error": type(error).__name__, "text": str(error)}
    pipe.close()
    return {}


def waiting(out: Path, K: int) -> dict:
    """Loops of different lengths: the first process goes on with something else."""
    pipe = build(K, timeout=3)
    for x, y in data(0)[: 4 if RANK == 0 else 6]:
        try:
            pipe.step(x, y)
        except UserError as error:
            return {"error": type(error).__name__, "text": str(error)}
    time.sleep(8)
    return {}


def main(out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        found = globals()[case](Path(out), int(os.environ["WORLD_SIZE"]))
        Path(out, f"{case}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
