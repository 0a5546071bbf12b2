"""One worker of a row of benchmarks/network.py: it builds its part of the row, and times it on request.

It gets lines of JSON on its standard input and answers each with one line:

    {"row": .., "network": {..}, "K": 2, "rank": 0, "cuts": [..], "store": file, "interface": name, "core": 0}
    {"run": updates}      -> {"seconds": .., "busy": ..} per update: of the clock, and of the processor
    {"costs": repeats}    -> seconds of its stage and of the whole network, bytes of messages: what predictions need
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from network_rows import INNER_STEPS, ROWS, SAMPLES, M, Network
from torch import Tensor, nn

from offbeat.core.compression import Compression
from offbeat.core.links import Message
from offbeat.core.links.wire import pack
from offbeat.methods import named
from offbeat.pipeline import Pipeline
from offbeat.runs.build import cross_entropy
from offbeat.studies.bench.contenders import DataParallel, Loop, Task, TorchPipelining
from offbeat.studies.bench.rows import BenchSetting
from offbeat.studies.bench.timing import pin, sgd, timed
from offbeat.studies.bench.worker import serve

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # of the outer Nesterov SGD of local SGD


class Accumulating(DataParallel):
    """DDP over micro-batches, the last of which averages the gradients."""

    def __init__(self, task: Task, parts: int) -> None:
        super().__init__(task)
        self.batches = list(zip(self.x.tensor_split(parts), self.y.tensor_split(parts), strict=True))

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        for number, (x, y) in enumerate(self.batches, start=1):
            with self.model.no_sync() if number < len(self.batches) else contextlib.nullcontext():
                loss = cross_entropy(self.model(x), y) / len(self.batches)
                loss.backward()
        self.optimizer.step()
        return loss.detach()


class LocalSgd(Loop):
    """DiLoCo: each worker trains alone, then all average their changes, which an outer Nesterov SGD applies."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.x, self.y = (tensor.tensor_split(dist.get_world_size())[task.rank] for tensor in (task.x, task.y))
        self.weights = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        self.velocity = torch.zeros_like(self.weights)

    def outer_step(self) -> None:
        parameters = list(self.model.parameters())
        change = self.weights - nn.utils.parameters_to_vector(parameters).detach()
        dist.all_reduce(change)
        change /= dist.get_world_size()
        self.velocity.mul_(OUTER_MOMENTUM).add_(change)
        self.weights -= OUTER_LR * (change + OUTER_MOMENTUM * self.velocity)
        nn.utils.vector_to_parameters(self.weights.clone(), parameters)  # parameters become views of what is given


class NetworkWorker:
    """This process's part of a row; `steps` calls of `step` are an update."""

    def __init__(self, start: dict[str, Any]) -> None:
        pin({start["core"]})
        torch.set_num_threads(1)
        self.row, self.network = ROWS[start["row"]], Network.of(start["network"])
        self.K, self.rank, self.cuts = start["K"], start["rank"], tuple(start["cuts"])
        os.environ["GLOO_SOCKET_IFNAME"] = start["interface"]
        dist.init_process_group("gloo", init_method=f"file://{start['store']}", rank=self.rank, world_size=self.K)
        self.steps = self.row.parts if self.row.late else 1
        self.fill, self.outer_step = 0, None
        self.step = self._build()
        for _ in range(self.fill or 2):
            self.step()

    def _task(self, samples: int) -> Task:
        network = self.network
        setting = BenchSetting(
            network.model, network.shape, network.classes, samples, self.K, M, cuts=self.cuts, units="blocks"
        )
        return Task.of(setting, self.rank)

    def _build(self) -> Callable[[], Any]:
        task, row = self._task(SAMPLES // self.steps), self.row
        if row.kind == "ddp":
            return Accumulating(task, row.parts).step
        if row.kind == "local-sgd":
            made = LocalSgd(task)
            self.outer_step = made.outer_step
            return made.step
        if row.kind == "torch":
            return TorchPipelining(task, row.setting, row.parts).step
        method = named(row.setting, **({"M": row.parts} if row.late else {"m": row.parts}))
        pipe = Pipeline(
            task.model,
            self.K,
            method=method,
            loss=cross_entropy,
            optimizer=sgd,
            sample=task.x,
            cuts=list(self.cuts),
            units="blocks",
            engine="processes",
            messages=row.messages,
        )
        if row.late:
            self.fill = -(-(method.fill(self.K) + 2) // self.steps) * self.steps  # whole updates
        return lambda: pipe.step(task.x, task.y)

    def on_run(self, updates: int) -> dict[str, Any]:
        """Seconds per update; of local SGD with its share of an outer step. `updates`: whose bytes were sent.

        Between two runs all stages stop at the same batch. A late method first runs until its stages are as far apart
        as in training, which on a slow line takes as long as several batches.
        """
        seconds, busy = (self.steps * value for value in timed(self.step, self.fill, updates * self.steps))
        updates += self.fill // self.steps
        if self.outer_step is not None:
            outer, outer_busy = timed(self.outer_step, 0, 1)
            seconds, busy, updates = seconds + outer / INNER_STEPS, busy + outer_busy / INNER_STEPS, INNER_STEPS
        return {"seconds": seconds, "busy": busy, "updates": updates}

    # ---- what predictions need

    def on_costs(self, repeats: int) -> dict[str, Any]:
        """Medians of seconds, all workers at the same time, and bytes of messages.

        stages     [forward, backward, update] of this worker's stage, by samples
        whole      [forward, backward with update] of the whole network, by samples
        bytes      [activations, gradients] of a message of a batch, by format
        encoding   seconds to encode and decode it
        """
        batch = SAMPLES // M
        stages = {samples: self._stage(samples) for samples in (batch, batch // 2)}
        sizes = {samples: self._task(samples) for samples in (SAMPLES // self.K, SAMPLES // self.K // M)}
        output = stages[batch].output
        formats: tuple[Any, ...] = ("exact", "bf16", "int8") if self.rank < self.K - 1 else ()
        encoded = {messages: _encoding(messages, output, repeats) for messages in formats}
        return {
            "stages": {samples: _medians(stage.times, repeats) for samples, stage in stages.items()},
            "whole": {samples: _medians(_Whole(task).times, repeats) for samples, task in sizes.items()},
            "bytes": {messages: sent for messages, (_, sent) in encoded.items()},
            "encoding": {messages: seconds for messages, (seconds, _) in encoded.items()},
            "parameters": sum(parameter.nbytes for parameter in self._task(1).model.parameters()),
        }

    def _stage(self, samples: int) -> _StageAlone:
        task = self._task(samples)
        parts, x = task.parts(self.cuts, "blocks"), task.x
        with torch.no_grad():
            for part in parts[: self.rank]:
                x = part(x)
        return _StageAlone(parts[self.rank], x, task.y if self.rank == self.K - 1 else None)


class _StageAlone:
    """A stage without messages."""

    def __init__(self, part: nn.Module, x: Tensor, y: Tensor | None) -> None:
        self.part, self.y = part, y
        self.x = x.detach().requires_grad_(x.is_floating_point())
        self.optimizer = sgd(part.parameters())
        self.output = part(self.x)

    def times(self) -> Sequence[float]:
        began = time.perf_counter()
        self.output = self.part(self.x)
        root = self.output if self.y is None else cross_entropy(self.output, self.y)
        forwarded = time.perf_counter()
        root.backward(torch.ones_like(root))
        backwarded = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forwarded - began, backwarded - forwarded, time.perf_counter() - backwarded


class _Whole:
    """The whole network without messages."""

    def __init__(self, task: Task) -> None:
        self.stage = _StageAlone(task.model, task.x, task.y)

    def times(self) -> Sequence[float]:
        forward, backward, update = self.stage.times()
        return forward, backward + update


def _medians(times: Callable[[], Sequence[float]], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        found.append(times())
    return [median(each) for each in zip(*found[1:], strict=True)]


def _encoding(messages: Any, output: Tensor, repeats: int) -> tuple[float, list[int]]:
    """Seconds to encode and decode a message, and the bytes of activations and of gradients."""
    compression, gradient = Compression(messages), output.detach()
    began = time.perf_counter()
    for _ in range(repeats):
        compression.received(compression.activations(output))
        compression.received(compression.gradients([gradient]))
    seconds = (time.perf_counter() - began) / repeats / 2
    sent = [compression.activations(output), compression.gradients([gradient])]
    return seconds, [pack(Message(0, content)).numel() for content in sent]


if __name__ == "__main__":
    serve(NetworkWorker)
