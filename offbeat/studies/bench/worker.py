"""A process of a row: it builds its contender, and times it on request; a line of JSON each way.

    {"row": ..., "setting": {...}, "rank": 0, "world": 2, "store": file, "cores": [0], "threads": 1}
    {"build": m}                    make the contender anew (m micro-batches), and fill it
    {"sent": null}                  -> {"bytes": ..} that it sends for a batch
    {"time": [warm_up, batches]}    -> {"seconds": .., "busy": ..} per batch: of the clock, and of the processor
    {"bound": [warm_up, batches]}   the same of its stage alone, on fixed messages
    {"release": null}               give its memory back; it is built again when it is next timed
    {"look": null}                  -> {"memory": .., "staleness": [..]}
    {"begin": {...}}                make the row anew and train it on data (row_training.py) -> {"weights": hash}
    {"train": updates}              -> {"seconds": ..} of these updates
    {"evaluate": null}              -> {"found": {"loss": .., "error": ..} or null, "order": hash of the targets read}

Between two lines it waits for its standard input, which takes no processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.core.links.network import connect
from offbeat.errors import NotFinite, StageLost, first_line
from offbeat.runs import launch
from offbeat.studies.bench.contenders import Contender, PipelineRow, Task, make
from offbeat.studies.bench.row_training import RowTraining
from offbeat.studies.bench.rows import BenchSetting, cores_here, of_row, row_of
from offbeat.studies.bench.timing import forget_peak, peak, pin, resident, sgd, timed

JOINING = timedelta(minutes=5)  # until all workers of a row have started


class RowWorker:
    """What one process knows: its place, and its contender once it is built."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.row, self.setting, self.rank = row_of(start["row"]), BenchSetting.of(start["setting"]), start["rank"]
        self.on_gpu = self.setting.device != "cpu"
        pin(set(start["cores"] or own_core()))  # before torch's threads are made: they stay where this one is
        torch.set_num_threads(start["threads"])
        if not self.row.alone and not self.on_gpu:
            join(start["store"], self.rank, start["world"])
        if self.on_gpu:
            torch.zeros(1, device=self.setting.device)
        self.wait: Callable[[], Any] = torch.cuda.synchronize if self.on_gpu else lambda: None
        small = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1))
        small(torch.ones(2, 1, 8, 8)).sum().backward()
        sgd(small.parameters()).step()  # what torch loads when it first trains is no row's
        self.empty = resident()
        self.m: int | None = None
        self.contender: Contender | None = None
        self.without_messages: Callable[[], None] | None = None
        self.training: RowTraining | None = None

    def on_build(self, m: int | None) -> dict[str, Any]:
        self.on_release()
        fresh = forget_peak()
        self.m = m
        self._made()
        return {"fresh": fresh}

    def on_sent(self, _: Any = None) -> dict[str, Any]:
        return {"bytes": self._made().sent()}

    def _made(self) -> Contender:
        if self.contender is None:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            setting = of_row(self.row, self.setting, self.m)
            self.contender = make(self.row, Task.of(setting, self.rank), self.m)
            for _ in range(self.contender.fill):
                self.contender.step()
            self.wait()
        return self.contender

    def on_time(self, given: list[int]) -> dict[str, Any]:
        return self._timed(self._made().step, given)

    def _timed(self, work: Callable[[], Any], given: list[int]) -> dict[str, Any]:
        seconds, busy = timed(work, *given, wait=self.wait)
        return {"seconds": seconds, "busy": busy}

    def on_bound(self, given: list[int]) -> dict[str, Any]:
        contender = self._made()
        assert isinstance(contender, PipelineRow)
        if self.without_messages is None:
            self.without_messages = contender.without_messages()
            for _ in range(contender.fill):
                self.without_messages()
        return self._timed(self.without_messages, given)

    def on_look(self, _: Any = None) -> dict[str, Any]:
        used = torch.cuda.max_memory_allocated() if self.on_gpu else max(0, peak() - self.empty)
        staleness = self.contender.staleness() if self.contender else []
        return {"memory": used, "staleness": staleness}

    def on_begin(self, given: dict[str, Any]) -> dict[str, Any]:
        self.on_release()
        self.training = RowTraining.of(self.row, self.setting, self.rank, given)
        return {"weights": self.training.weights}

    def on_train(self, updates: int) -> dict[str, Any]:
        assert self.training is not None
        began = time.perf_counter()
        for _ in range(updates):
            self.training.update()
        return {"seconds": time.perf_counter() - began}

    def on_evaluate(self, _: Any = None) -> dict[str, Any]:
        assert self.training is not None
        return {"found": self.training.evaluate(), "order": self.training.order}

    def on_release(self, _: Any = None) -> dict[str, Any]:
        if self.contender:
            self.wait()
            self.contender.close()
        self.contender = self.without_messages = None
        forget_peak()
        return {}


def own_core() -> list[int]:
    """The core of this worker among those of its machine, where torchrun has started several processes on it."""
    cores = cores_here()
    return [cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]]


def join(name: str, rank: int, world: int) -> None:
    """Join the group of the row: by a file of this name or, under torchrun, in torch's store under this name."""
    if "MASTER_ADDR" not in os.environ:
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=world)
        return
    place = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(name, place)
    trial = connect(store, rank, world, patience=JOINING)  # which also chooses the interface
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    del trial


def serve(make: Callable[[dict[str, Any]], Any] = RowWorker) -> None:
    """Answer until the standard input closes: make a worker of the first line, and call its method on_NAME for each
    request {NAME: argument}."""
    launch.die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    worker: Any = None
    for line in sys.stdin:
        request, answer = json.loads(line), dict[str, Any]()
        try:
            if worker is None:
                worker = make(request)
            else:
                ((what, given),) = request.items()
                answer = getattr(worker, f"on_{what}")(given)
        except Exception as error:  # whatever it is, the row is left out, with this for a reason
            answer = {"failed": f"{type(error).__name__}: {first_line(error)}"}
            answer |= {"diverged": True} if isinstance(error, NotFinite) else {}
            answer |= {"lost": True} if isinstance(error, StageLost) else {}
        print(json.dumps(answer), file=replies)
        if "failed" in answer:
            break
    with contextlib.suppress(OSError):
        replies.flush()
    os._exit(0)  # whatever its communication threads still wait for
