"""What callbacks are given in every process; as a script under torchrun it writes it:

torchrun --nproc-per-node 3 tests/callback_cases.py OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.callbacks import EMA, BestModel, CheckpointEvery, CSVLogger, EarlyStopping, LearningRateMonitor

EPOCHS, LENGTH = 2, 7


def data(n: int = LENGTH, *, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g)) for _ in range(n)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(method: Any = "adl", K: int = 3, M: int | None = 2, **options: Any) -> offbeat.Pipeline:
    loss = options.pop("loss", nn.functional.cross_entropy)
    return offbeat.Pipeline(network(), K, method=method, M=M, loss=loss, **{"optimizer": sgd, **options})


class Recorder:
    """What every step has."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.losses: dict[int, float] = {}
        self.late: list[int] = []  # batches by which losses are late
        self.events: list[str] = []

    def on_step(self, step: Any) -> None:
        self.steps.append((step.batch, step.epoch))
        assert not set(step.losses) & set(self.losses)  # each once
        self.losses.update(step.losses)
        if step.loss is not None:
            assert step.loss == self.losses[step.loss_batch]
            self.late.append(step.batch - step.loss_batch)

    def on_epoch_end(self, step: Any) -> None:
        self.events.append(f"epoch {step.epoch} after batch {step.batch}")

    def on_evaluate(self, step: Any, result: Any) -> None:
        self.events.append(f"{result['loss']:.6f} after batch {step.batch}")

    def on_end(self, step: Any) -> None:
        self.losses.update(step.losses)

    def found(self) -> dict[str, Any]:
        losses = {str(batch): loss for batch, loss in sorted(self.losses.items())}
        return {"steps": [list(step) for step in self.steps], "losses": losses, "events": self.events}


class StopAt:
    """Requests a stop after a batch."""

    def __init__(self, batch: int, event: str = "on_step") -> None:
        self.batch = batch
        setattr(self, event, self.check)

    def check(self, step: Any, *result: Any) -> None:
        if step.batch >= self.batch:
            step.stop()


def hexed(tensors: Any) -> dict[str, str]:
    return {name: tensor.detach().contiguous().numpy().tobytes().hex() for name, tensor in tensors.items()}


def averaged(pipe: offbeat.Pipeline, ema: EMA) -> dict[str, Any]:
    """The average of the whole model, its evaluation, and whether the weights themselves are as before."""
    before = hexed(pipe.gather().state_dict())
    with ema.averaged(pipe):
        loss = pipe.evaluate(data())["loss"]
        average = hexed(pipe.gather().state_dict())
    return {"average": average, "loss": loss, "restored": hexed(pipe.gather().state_dict()) == before}


def observed(method: str, M: int | None, folder: Path) -> dict[str, Any]:
    """Two epochs with callbacks, and whether these change training."""
    recorder, ema, best = Recorder(), EMA(0.9), BestModel()
    pipe = pipeline(method, M=M)
    log = folder / f"{method}.csv"
    pipe.fit(data(), EPOCHS, callbacks=[recorder, ema, best, CSVLogger(log)], evaluate=data())
    weights = hexed(pipe.model.state_dict())
    found = {**recorder.found(), "ema": averaged(pipe, ema), "best": hexed(best.weights), "weights": weights}
    pipe.close()
    plain = pipeline(method, M=M)
    plain.fit(data(), EPOCHS)
    found["unchanged"] = hexed(plain.model.state_dict()) == weights
    plain.close()
    return found


def stopped(rank: int, stops: int, event: str, evaluate: bool) -> dict[str, Any]:
    """How many batches are trained where one process requests a stop."""
    pipe, recorder = pipeline(), Recorder()
    callbacks: list[Any] = [recorder, *([StopAt(10, event)] if rank == stops else [])]
    pipe.fit(data(), 50, callbacks=callbacks, evaluate=data() if evaluate else None)
    found = {"batches": pipe.batches, "updates": [stage.update_index for stage in pipe.stages.values()]}
    last = max(recorder.losses)
    pipe.fit(data(2))  # and training continues
    pipe.close()
    return {**found, "last loss": last, "weights": hexed(pipe.model.state_dict())}


def early(rank: int) -> int:
    """Early stopping in the last process alone."""
    pipe = pipeline(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    callbacks = [EarlyStopping(patience=2)] if rank == 2 else None
    pipe.fit(data(), 50, callbacks=callbacks, evaluate=data() if rank == 0 else None)
    pipe.close()
    return pipe.batches


def saved(folder: Path, method: offbeat.Method, batches: int = 0, minutes: float = 0.0) -> dict[str, Any]:
    """Training with checkpoints, and training that continues from the newest one in the middle of an epoch."""
    every = CheckpointEvery(folder, batches=batches) if batches else CheckpointEvery(folder, minutes=minutes)
    pipe = pipeline(method, M=None)
    pipe.fit(data(), 3, callbacks=[every])
    pipe.close()
    again = pipeline(method, M=None)
    again.load(folder)
    began = again.batches
    again.fit(data(), 3, resume=True)
    again.close()
    same = hexed(again.model.state_dict()) == hexed(pipe.model.state_dict())
    return {"began": began, "same": same, "batches": again.batches}


def checkpoints(folder: Path) -> dict[str, Any]:
    return {
        "adl": saved(folder / "adl", offbeat.ADL(M=2), batches=4),
        "hybrid": saved(folder / "hybrid", offbeat.ADL(M=1, weights="hybrid"), batches=6),
        "minutes": saved(folder / "minutes", offbeat.ADL(M=2, weights="hybrid"), minutes=1e-9),
    }


class Counter:
    """A callback of a user, with a state."""

    def __init__(self) -> None:
        self.steps, self.losses = 0, {}

    def on_step(self, step: Any) -> None:
        self.steps += 1
        self.losses.update(step.losses)

    def on_end(self, step: Any) -> None:
        self.losses.update(step.losses)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state: Any) -> None:
        self.steps, self.losses = state["steps"], dict(state["losses"])


def stateful(folder: Path) -> list[Any]:
    """Callbacks that have a state; the one that saves is not the last."""
    scores = BestModel("score", mode="max", path=folder / "best.pt")
    return [
        CheckpointEvery(folder, batches=5, keep=1),
        EMA(0.9),
        EMA(0.5),
        EarlyStopping("score", mode="max", patience=3),
        BestModel("score", mode="max"),
        scores,
        CSVLogger(folder / "log.csv"),
        LearningRateMonitor(),
        Counter(),
    ]


def evaluation(pipe: offbeat.Pipeline) -> Any:
    """The best score is that of the second epoch, of seven batches."""
    return lambda: {"score": -abs(pipe.batches - 2 * LENGTH)}


def decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)


def contents(pipe: offbeat.Pipeline, callbacks: list[Any], folder: Path) -> dict[str, Any]:
    """All that callbacks have found, and the model."""
    _, ema, faster, stopping, best, written, _, monitor, counter = callbacks
    averages = [averaged(pipe, each)["average"] for each in (ema, faster)]  # after which the first process has written
    rows = (folder / "log.csv").read_text().splitlines()
    return {
        "batches": pipe.batches,
        "weights": hexed(pipe.model.state_dict()),
        "averages": averages,
        "names": [sorted(each.weights) for each in (ema, faster)],
        "stopping": [stopping.best.value, stopping.best.batch, stopping.waited],
        "best": [best.best.value, best.best.batch, hexed(best.weights)],
        "written": [written.best.value, hexed(torch.load(folder / "best.pt"))],
        "rows": sorted(row for row in rows if "samples_per_second" not in row),
        "history": {str(k): history for k, history in sorted(monitor.history.items())},
        "counter": [counter.steps, dict(sorted(counter.losses.items()))],
    }


def interrupt(folder: Path, batch: int, K: int = 3) -> None:
    """Training that stops after the batch, some batches after the newest checkpoint."""
    pipe = pipeline(K=K, scheduler=decaying)
    pipe.fit(data(), 20, callbacks=[*stateful(folder), StopAt(batch)], evaluate=evaluation(pipe))
    pipe.close()


def go_on(folder: Path, K: int = 3, *, load: bool = True) -> dict[str, Any]:
    """A new pipeline and new callbacks, up to where training stops early: from the newest checkpoint, or from the
    start."""
    pipe, callbacks = pipeline(K=K, scheduler=decaying), stateful(folder)
    if load:
        pipe.load(folder)
    pipe.fit(data(), 20, callbacks=callbacks, evaluate=evaluation(pipe), resume=load)
    found = contents(pipe, callbacks, folder)
    pipe.close()
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Uninterrupted training, and training that was interrupted: here, and in one process."""
    found = {"whole": go_on(folder / "whole", load=False)}
    for batch in (8, 17, 30):
        interrupt(folder / f"at {batch}", batch)
        found[f"at {batch}"] = go_on(folder / f"at {batch}")
    if (folder / "one").exists():
        found["one"] = go_on(folder / "one")
        interrupt(folder / "several", 24)
    return found


def refused(rank: int) -> list[str]:
    """Callbacks that communicate, functions that evaluate, and other options, in one process alone."""
    texts = []
    for options in ({"callbacks": [EMA()]}, {"evaluate": dict}, {"epochs": 2}, {"drain": False}):
        pipe = pipeline()
        try:
            pipe.fit(data(), **(options if rank == 1 else {}))
        except offbeat.UserError as error:
            texts.append(str(error))
        pipe.close()
    return texts


def lost(rank: int) -> str:
    """What a process gets where a callback of another one raises."""

    class Fails:
        def on_step(self, step: Any) -> None:
            raise ValueError("mine")

    with pipeline() as pipe:
        try:
            pipe.fit(data(), callbacks=[Fails()] if rank == 1 else None)
        except (ValueError, offbeat.UserError, offbeat.StageLost) as error:
            return str(error)
    return ""


METHODS = {"adl": 2, "bp": 2, "gpipe": None, "dgl": None, "2bw": 4}


def stopped_replicas(rank: int, stops: int) -> dict[str, Any]:
    """How many batches two replicas of two stages train where one process requests a stop."""
    pipe, recorder = pipeline(K=2, replicas=2), Recorder()
    pipe.fit(data(), 50, callbacks=[recorder, *([StopAt(10)] if rank == stops else [])])
    pipe.fit(data(4))
    found = {"batches": pipe.batches, "losses": recorder.found()["losses"], "weights": hexed(pipe.model.state_dict())}
    pipe.close()
    return found


def main(out: str) -> None:
    rank, folder = int(os.environ["RANK"]), Path(out)
    if os.environ["WORLD_SIZE"] == "4":
        (folder / f"{rank}.json").write_text(json.dumps([stopped_replicas(rank, stops) for stops in range(4)]))
        return
    found: dict[str, Any] = {name: observed(name, M, folder) for name, M in METHODS.items()}
    for stops in range(3):
        found[f"stop {stops}"] = stopped(rank, stops, "on_step", evaluate=False)
    found["stop at an epoch"] = stopped(rank, 2, "on_epoch_end", evaluate=True)
    found["early"], found["refused"], found["lost"] = early(rank), refused(rank), lost(rank)
    found["checkpoints"], found["resumed"] = checkpoints(folder), resumed(folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
