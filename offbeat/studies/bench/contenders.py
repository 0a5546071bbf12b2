"""Each row as one of its workers: an object with a `step()`, which also counts what it sends.

All train the same network with the same loss and optimizer: on one batch of random numbers where they are timed, on the
batches of a data set where they are trained (row_training.py). Gradients are means over the whole batch in all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat import models
from offbeat.core.links import Message
from offbeat.core.links.wire import pack
from offbeat.core.metrics import Meter
from offbeat.core.optimization import MakeScheduler
from offbeat.core.worker import Links, Worker
from offbeat.partitioning import partition
from offbeat.pipeline import Pipeline
from offbeat.runs.build import cross_entropy
from offbeat.studies.bench.flat_stage import Counter, Flat, announced, tried
from offbeat.studies.bench.rows import BenchRow, BenchSetting, batches_per_update, method_of
from offbeat.studies.bench.timing import FixedMessages, RecordingLink, received, sgd

Batch = tuple[Tensor, Tensor]
RECORDING = 60  # batches in which stages on streams fill, and record what they do


class Contender(Protocol):
    """A worker of a row.

    fill    steps until it is in steady state
    reads   whether this worker needs the batches on which it is trained
    """

    fill: int
    reads: bool

    def step(self) -> Tensor | None:
        """One batch; the loss (of a pipeline: in the worker that has the last stage), where it is cheap to read."""

    def sent(self) -> int:
        """Bytes that this worker sends for a batch; takes a step or more, of which nothing is timed."""

    def staleness(self) -> list[float | None]:
        """Mean measured level of the stages that are here; None before a stage has applied a batch of steady state."""

    def update(self, batch: Batch | None) -> None:
        """One update on the samples of a batch, which is None in workers that do not need it."""

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, Any] | None:
        """Loss and error on the newest weights; None in workers that do not know them."""

    def close(self) -> None: ...


@dataclass
class Task:
    """The network, the batch, and the place of this worker.

    optimizer   makes one for named parameters
    scheduler   of the learning rate, where the row is trained; None where it is timed
    """

    setting: BenchSetting
    rank: int
    model: nn.Module
    x: Tensor
    y: Tensor
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    scheduler: MakeScheduler | None = None

    @classmethod
    def of(cls, setting: BenchSetting, rank: int, model: nn.Module | None = None) -> Task:
        """The same numbers in every process; `model` takes the place of the named one."""
        torch.manual_seed(0)
        built = model or models.build(setting.model, shape=setting.shape, classes=setting.classes)
        random = torch.Generator().manual_seed(1)
        x = models.random_batch(setting.batch_size, setting.shape, setting.classes, generator=random)
        each = setting.shape if models.takes_tokens(setting.shape) else ()  # targets of a sample
        y = torch.randint(setting.classes, (setting.batch_size, *each), generator=random)
        return cls(setting, rank, built.to(setting.device), x.to(setting.device), y.to(setting.device))

    def parts(self, cuts: tuple[int, ...], units: Any) -> list[nn.Module]:
        return partition(self.model, len(cuts) + 1, self.x, cuts=list(cuts), units=units).stages

    def optimize(self, parameters: Iterable[Tensor]) -> ScheduledOptimizer:
        """The optimizer of these parameters of the model, which it takes with their names."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        named = [(names[parameter], parameter) for parameter in parameters]
        if not named:  # a stage without parameters
            return ScheduledOptimizer()
        optimizer = self.optimizer(named)
        return ScheduledOptimizer(optimizer, self.scheduler(optimizer) if self.scheduler else None)


@dataclass
class ScheduledOptimizer:
    """An optimizer, if there is anything to optimize, with the schedule of its learning rate."""

    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None

    def zero_grad(self) -> None:
        if self.optimizer:
            self.optimizer.zero_grad()

    def step(self) -> None:
        if self.optimizer:
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()


def evaluated(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Any]:
    """Loss and error of the whole model in evaluation mode."""
    meter = Meter()
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            scores = model(x)
            meter.add(float(cross_entropy(scores, y)), scores, y)
    model.train()
    return meter.read()


def make(row: BenchRow, task: Task, m: int | None = None) -> Contender:
    """This worker of the row; m is its number of micro-batches, where it has one."""
    if row.kind == "loop":
        return Loop(task) if task.setting.device == "cpu" else PipelineRow(row, task, alone=True)
    if row.kind == "ddp":
        return DataParallel(task)
    if row.kind == "pipelining":
        assert m is not None
        return TorchPipelining(task, row.setting, m)
    return PipelineRow(row, task, m)


class Loop:
    """Back-propagation in a plain loop."""

    fill = 1
    reads = True

    def __init__(self, task: Task) -> None:
        self.whole = self.model = task.model
        self.x, self.y = task.x, task.y
        self.optimizer = task.optimize(self.model.parameters())

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sent(self) -> int:
        return 0

    def staleness(self) -> list[float | None]:
        return [0.0]

    def update(self, batch: Batch | None) -> None:
        assert batch is not None
        self.x, self.y = batch
        self.step()

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, Any] | None:
        return evaluated(self.whole, batches())

    def close(self) -> None:
        pass


class DataParallel(Loop):
    """torch's DistributedDataParallel: the whole network on a part of the batch, gradients averaged by all."""

    fill = 2  # it arranges its buckets after the first step

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.rank = task.rank
        self.model = nn.parallel.DistributedDataParallel(task.model)
        self.x, self.y = self._share(task.x), self._share(task.y)

    def _share(self, tensor: Tensor) -> Tensor:
        """The samples of this worker."""
        return tensor.tensor_split(dist.get_world_size())[self.rank].contiguous()

    def update(self, batch: Batch | None) -> None:
        assert batch is not None
        x, y = batch
        super().update((self._share(x), self._share(y)))

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, Any] | None:
        return super().evaluate(batches) if self.rank == 0 else None

    def sent(self) -> int:
        """By the formula of a ring: 2(K-1)/K of the gradients; and the first worker's buffers to all others."""
        K = dist.get_world_size()
        gradients = sum(parameter.nbytes for parameter in self.whole.parameters() if parameter.requires_grad)
        buffers = sum(buffer.nbytes for buffer in self.whole.buffers())
        return 2 * (K - 1) * gradients // K + (buffers * (K - 1) if dist.get_rank() == 0 else 0)


class TorchPipelining:
    """torch.distributed.pipelining, on the cuts of the run; interleaved: on 2K chunks, two a worker."""

    fill = 2

    def __init__(self, task: Task, schedule: str, m: int) -> None:
        from torch.distributed import pipelining

        setting, K = task.setting, task.setting.K
        self.task, self.counter = task, Counter()
        several = schedule == "ScheduleInterleaved1F1B"
        if several:
            assert setting.chunk_cuts is not None
            parts = task.parts(setting.chunk_cuts, "layers")
        else:
            parts = task.parts(setting.cuts, setting.units)
        n, x = len(parts), task.x[: setting.batch_size // m]
        stages = []
        self.parts = dict(enumerate(parts))
        self.parameters: list[Tensor] = []
        buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
        for index, part in enumerate(parts):
            y, unused = tried(part.train(), x)
            if index % K == task.rank:
                flat = Flat(part, x, self.counter, unused=unused, last=index == n - 1)
                given, made = announced(x, crosses=index > 0), announced(y, crosses=not flat.last)
                stages.append(
                    pipelining.PipelineStage(flat, index, n, task.x.device, input_args=given, output_args=made)
                )
                self.parameters += list(part.parameters())
            x = y
        for name, buffer in task.model.named_buffers():  # the forwards have changed the statistics of BatchNorm
            buffer.copy_(buffers[name])
        kind = getattr(pipelining, schedule)
        self.schedule = kind(stages if several else stages[0], m, loss_fn=cross_entropy)
        self.optimizer = task.optimize(self.parameters)
        self.first, self.last = task.rank == 0, (n - 1) % K == task.rank
        self.reads = self.first or self.last

    def step(self) -> Tensor | None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (self.task.x,) if self.first else ()
        options: dict[str, Any] = {"target": self.task.y, "losses": losses} if self.last else {}
        self.schedule.step(*given, **options)
        self.optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    def sent(self) -> int:
        with self.counter.counting():
            self.step()
        return self.counter.bytes

    def staleness(self) -> list[float | None]:
        return [0.0]

    def update(self, batch: Batch | None) -> None:
        if batch is not None:
            self.task.x, self.task.y = batch
        self.step()

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, Any] | None:
        """In the first worker, which gets the weights of the others' stages."""
        K, rank = self.task.setting.K, self.task.rank
        mine = {index: part.state_dict() for index, part in self.parts.items() if index % K == rank}
        found: list[dict[int, Any]] | None = [{}] * K if self.first else None
        dist.gather_object(mine, found)
        if found is None:
            return None
        for index, state in (item for states in found for item in states.items()):
            self.parts[index].load_state_dict(state)
        return evaluated(self.task.model, batches())

    def close(self) -> None:
        pass


class CountingLink:
    """A link that counts the bytes of what is sent."""

    def __init__(self, link: Any, counter: Counter) -> None:
        self.link, self.counter = link, counter

    def send(self, message: Message) -> None:
        self.counter.see(pack(message))
        self.link.send(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


@dataclass
class PipelineRow:
    """A Pipeline of this package: a stage in each of K processes, or all on streams of one GPU."""

    row: BenchRow
    task: Task
    m: int | None = None
    alone: bool = False  # back-propagation in one worker
    pipe: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        setting = self.task.setting
        on_gpu = setting.device != "cpu"
        K = 1 if self.alone else setting.K
        method: Any = "bp" if self.alone else method_of(self.row, setting, self.m)
        if not self.alone and self.task.scheduler is None:  # timed as it is after a staleness warm-up
            method = method.after_warmup
        units: Any = setting.units
        recorded = on_gpu and not (self.alone and not self.row.all_cores)
        self.pipe = Pipeline(
            self.task.model,
            K,
            method=method,
            loss=cross_entropy,
            optimizer=partial(sgd, fused=True) if on_gpu else self.task.optimizer,
            scheduler=self.task.scheduler,
            sample=self.task.x,
            cuts=None if self.alone else list(setting.cuts),
            units=None if self.alone else units,
            device=setting.device,
            precision=setting.precision,  # type: ignore[arg-type]
            replicas=setting.replicas,
            engine=("streams" if recorded else "simulate") if on_gpu else "processes",
        )
        self.fill = RECORDING if on_gpu else self.pipe.method.fill(K) + 2
        self.reads = self.pipe.first

    def step(self) -> Tensor | None:
        if self.pipe.engine.defers:  # without waiting for the loss
            self.pipe._local.step([(self.task.x, self.task.y)])
            return None
        return self.pipe.step(self.task.x, self.task.y)

    def sent(self) -> int:
        """Of every message with its header, in a step once the pipeline is full."""
        if len(self.pipe.workers) != 1 or self.pipe.K == 1:
            return 0
        links, counter = self.pipe.workers[0].links, Counter()
        kept = links.outputs, links.feedback
        links.outputs, links.feedback = (CountingLink(link, counter) if link else None for link in kept)
        with counter.counting():
            self.step()
        links.outputs, links.feedback = kept
        return counter.bytes

    def staleness(self) -> list[float | None]:
        return [stage.staleness.mean if stage.staleness else None for stage in self.pipe.stages.values()]

    def update(self, batch: Batch | None) -> None:
        M = batches_per_update(self.row, self.task.setting, self.m)
        parts: Iterable[tuple[Any, Any]] = [(None, None)] * M
        if batch is not None:
            parts = zip(*(tensor.tensor_split(M) for tensor in batch), strict=True)
        for x, y in parts:
            self.pipe._local.step([(x, y)])

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, Any] | None:
        return self.pipe.evaluate(batches() if self.reads else None)

    def without_messages(self) -> Callable[[], None]:
        """The stage that is here, without its neighbours. Takes a step."""
        return without_messages(self.pipe, self.task.rank % self.pipe.K, self.step)

    def close(self) -> None:
        self.pipe.close()


def without_messages(pipe: Pipeline, rank: int, step: Callable[[], object]) -> Callable[[], None]:
    """A local iteration of this process's stage on fixed messages, those of a step that is made for it: what the stage
    takes where nothing is sent."""
    links, method, K = pipe.workers[0].links, pipe.method, pipe.K
    recording = {
        name: RecordingLink(getattr(links, name), method.m) for name in ("inputs", "gradients") if getattr(links, name)
    }
    kept = links.inputs, links.gradients
    for name, link in recording.items():
        setattr(links, name, link)
    step()
    links.inputs, links.gradients = kept
    loss = cross_entropy if rank == K - 1 or method.feedback == "local" else None
    part, assembly = copy.deepcopy(pipe.parts[rank]), pipe._local.assembled(None)
    stage = pipe._local.assembler.make_stage(rank + 1, K, part, method=method, loss=loss, output=assembly.outputs[rank])
    sources, unsent = {"inputs": rank, "gradients": rank + 2}, FixedMessages()
    fixed: dict[str, Any] = {
        name: FixedMessages(link.contents, received(method, rank + 1, K, sources[name]))
        for name, link in recording.items()
    }
    fixed |= {"outputs": unsent if rank < K - 1 else None, "feedback": unsent if rank else None}
    bare, index = Worker(stage, method, Links(**fixed)), count()

    def iteration() -> None:
        for _ in bare.iteration(next(index), wait=True):
            pass

    return iteration
