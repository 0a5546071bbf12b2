"""Pipeline: a model, a method and an engine, trained batch by batch."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat import methods
from offbeat import partitioning as cutting
from offbeat.core import state as stage_state
from offbeat.core.batch_guard import OnNan
from offbeat.core.links import Link, Message
from offbeat.core.links.local import Entrance
from offbeat.core.metrics import Meter, Metric
from offbeat.core.micro_batches import micro_batches
from offbeat.core.optimization import MakeOptimizer, MakeScheduler
from offbeat.core.outputs import shapes_and_classes
from offbeat.core.precision import Precision, PrecisionPolicy
from offbeat.core.stage import Stage
from offbeat.core.stage_network import Loss
from offbeat.core.stage_report import Report, Staleness
from offbeat.core.window import Weighting
from offbeat.core.worker import SAVE, Links, Worker
from offbeat.engines import Engine
from offbeat.engines.processes import Processes, available
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import NotFinite, NotRecorded, UserError, earliest, first_line, unknown
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.method import Method
from offbeat.observe import diagnosis as stage_diagnosis
from offbeat.observe import tracing
from offbeat.observe.diagnosis import Diagnosis
from offbeat.observe.tracing import Tracing
from offbeat.ops import LESSON, Backward

EPOCH_END = "epoch"  # the kind of a mark behind the last batch of an epoch; its number is that of batches so far
END = Message(-1, kind="end")
Loader = Iterable[tuple[Any, Any]]
AfterEpoch = Callable[[int], object]  # an iterator of what is left to do, a little at a time, or anything else


class Pipeline:
    """Train a model cut by depth into K stages that never wait for each other.

    model       any module that torch.fx can trace; an nn.Sequential is cut between its entries; or a list of K stages
    method      offbeat.ADL(M=4) and the like, or a name with M=...
    loss        loss(output, target) -> the mean over the batch
    optimizer   called once a stage with (name in the whole model, parameter) pairs, as torch's optimizers take them
    scheduler   optional: called with that optimizer, a torch scheduler that counts steps; stepped once an update
    cuts        optional: cut before these units, instead of by equal forward FLOPs of the first batch (or of `sample`)
    units       "blocks" (entries of an nn.Sequential) or "layers" (also inside blocks); default: the first that will do
    clip_norm   optional: largest norm of an update's gradient, stage by stage
    weighting   the mean of a window's gradients, over "batches" (a short one counts as much as the others) or "samples"
    on_nan      a loss or gradient that is not finite: "stop" with NotFinite, or "skip" it
    left_out    batches whose gradients are not used
    precision   "fp32", "tf32" (CUDA) or "bf16"; master weights, sums of gradients and optimizer are float32 in all
    compile     whether torch.compile makes a graph of each stage; one that it cannot compile runs as it is
    fuse        whether BatchNorm, a sum behind it and ReLU become two kernels of ours, and in bf16 3x3 convolutions of
                few channels one; on a GPU in tf32 or bf16
    engine      "simulate" (all stages here, one after the other), "processes" (one each, under torchrun) or "streams"
                (all stages here, at once, on one GPU); by default as it was started

    In several processes every one makes the same calls. Batches come from the first stage's process alone; what the
    others pass is ignored. `drain`, `gather`, `evaluate`, `fit` and the first `step` are collective.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> pipe = Pipeline(layers, K=2, method="adl", M=2, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> losses = [float(pipe.step(x, y)) for _ in range(20)]
    >>> _ = pipe.drain()
    >>> losses[-1] < losses[0], [stage.mean for stage in pipe.staleness]
    (True, [1.0, 0.0])
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        K: int | None = None,
        *,
        method: Method | str = "adl",
        loss: Loss,
        optimizer: MakeOptimizer,
        M: int | None = None,
        scheduler: MakeScheduler | None = None,
        cuts: Sequence[int] | None = None,
        units: cutting.Units | None = None,
        sample: Any = None,
        clip_norm: float | None = None,
        device: torch.device | str | None = None,
        engine: Engine | str | None = None,
        seed: int = 0,
        weighting: Weighting = "batches",
        on_nan: OnNan = "stop",
        left_out: Sequence[int] = (),
        precision: Precision = "fp32",
        compile: bool = False,
        fuse: bool = False,
    ) -> None:
        self.parts: list[nn.Module] = []
        if isinstance(model, nn.Module):
            self.model: nn.Module = model
        else:
            self.model, cuts = _chain(model, K, cuts)
            K = len(self.model)
        self.K = 1 if K is None else K
        self.method = _method(method, M)
        self.method.check(self.K)
        self.device = _device(device)
        self.numbers = PrecisionPolicy.of(precision, self.device)
        if compile and fuse:
            raise UserError("compile and fuse: both join operations of a stage, so give one of them")
        _check_loss(loss)
        _check_makers(optimizer, scheduler)
        if clip_norm is not None and not clip_norm > 0:
            raise UserError(f"clip_norm = {clip_norm}: use a number above 0, or None for no clipping")
        cutting.check_stages(self.model, self.K)
        _check_hooks(self.model)
        self.units: cutting.Units = units or cutting.default_units(self.model, self.K)
        self.cuts = None if cuts is None else list(cuts)
        if self.cuts is not None and self.units == "blocks":
            cutting.cut(self.model, self.K, cuts=self.cuts)  # refuses wrong ones before anything starts
        self.notes: list[str] = []  # what could not be traced
        self.engine = engine if not isinstance(engine, str | None) else self._engine(engine)
        self.batches = 0  # t of the next batch
        self.failure: str | None = None  # why it cannot go on
        self.stages: dict[int, Stage] = {}
        self.workers: list[Worker] = []
        own = self.engine.link("entrance", 0, 1, capacity=0) if self.engine.records else None
        self.entrance: Link = own or Entrance()
        if isinstance(self.engine, Processes):
            if device is not None and self.device.type != self.engine.device.type:
                raise UserError(f"device {device} but an engine on {self.engine.device}: give it the same device")
            self.device = self.engine.device
        self._launch_queue = self.engine.make_launch_queue(self.method)
        self._make_stage = partial(
            Stage,
            method=self.method,
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            device=self.device,
            seed=seed,
            on_nan=_one_of(on_nan, OnNan, "on_nan"),
            left_out=left_out,
            precision=self.numbers,
            compile=compile,
            fuse=fuse,
            weighting=_one_of(weighting, Weighting, "weighting"),
        )
        self._loss = loss
        self._elsewhere: dict[int, Staleness] = {}
        self.tracing: Tracing | None = None  # while there is something to record, or to bring together
        self.diagnoses: dict[int, Diagnosis] = {}  # of this process's stages, where they are asked for
        self._trace_links: tracing.TraceLinks | None = None
        self._looks: dict[str, Callable[[], None]] = {}  # what to begin once there are stages
        if sample is not None or (self.method.head is None and (self.cuts is not None or self.K == 1)):
            self._build(sample)

    # ---- building

    def _engine(self, name: str | None) -> Engine:
        if name is None:
            recorded = self.device.type == "cuda" and self.K > 1 and self.method.why_not_capturable() is None
            name = "processes" if available() > 1 else "streams" if recorded else "simulate"
        if name == "processes":
            return Processes(self.K, device=self.device)
        if name == "streams":
            if self.device.type != "cuda":
                raise UserError(
                    f"engine streams on {self.device.type}: it runs the stages on streams of one GPU: give "
                    "device='cuda', or use simulate or processes"
                )
            reason = self.method.why_not_capturable()
            if reason is None:
                return Streams(self.K, _there(self.device))
            told = f"{self.method.name} {reason}: its stages are not recorded, and run one after the other"
            warnings.warn(told, NotRecorded, stacklevel=3)
            name = "simulate"
        if name == "simulate":
            return Simulate(self.K)
        raise unknown("engine", name, ["simulate", "processes", "streams"])

    def _build(self, sample: Any) -> None:
        """Cut, agree on cuts and initial weights, make this process's stages. The first stage's process decides."""
        with self._guard():
            self.model.to(_there(self.device))
            self.numbers.lay_out(self.model)
            self.parts = self._agree_on_cuts(sample)
            self._same_model()
            self.engine.share_tensors(list(_tensors(self.model)), 1)
            outputs = self._outputs(sample) if self.method.head else [None] * self.K
            for k in self.engine.here:
                loss = self._loss if k == self.K or self.method.feedback == "local" else None
                self.stages[k] = self._make_stage(k, self.K, self.parts[k - 1], loss=loss, output=outputs[k - 1])
            self._connect()

    def _outputs(self, sample: Any) -> list[Any]:
        """Shape of one sample's output of every stage, and the number of classes, found by the first process."""
        found: dict[str, Any] = {}
        if self.first:
            try:
                found = shapes_and_classes(self.model, self.parts, sample, self.device, self.method.name)
            except UserError as error:
                found = {"refused": str(error)}
        found = self.engine.share(found, 1)
        if "refused" in found:
            raise UserError(found["refused"])
        return [(tuple(shape), found["classes"]) for shape in found["shapes"]]

    def _agree_on_cuts(self, sample: Any) -> list[nn.Module]:
        """The stages by the first process's cuts, or its refusal in all of them, so that none is left waiting."""
        decision: dict[str, Any] = {}
        made = None
        if self.first:
            try:
                made = cutting.partition(self.model, self.K, sample, cuts=self.cuts, units=self.units)
                decision["cuts"] = made.cuts
            except UserError as error:
                decision["refused"] = str(error)
        decision = self.engine.share(decision, 1)
        if "refused" in decision:
            raise UserError(decision["refused"])
        self.cuts = list(decision["cuts"])
        made = made or cutting.partition(self.model, self.K, cuts=self.cuts, units=self.units)
        self.notes = made.notes
        return made.stages

    @contextmanager
    def _guard(self, *, computes: bool = True) -> Iterator[None]:
        """Around everything that runs stages: after a failure their programs no longer agree, so nothing goes on. What
        others may compute meanwhile is none of its business (`computes`)."""
        if self.failure is not None:
            raise UserError(f"this pipeline has stopped, make a new one: {self.failure}")
        try:
            with self.engine.guard(), self.numbers.switched() if computes else nullcontext():
                yield
        except Exception as error:
            self.failure = self.failure or first_line(error)
            raise

    def _same_model(self) -> None:
        names = [f"{name} {list(tensor.shape)}" for name, tensor in _named_tensors(self.model)]
        first = self.engine.share(names, 1)
        for here, there in zip([*names, "nothing"], [*first, "nothing"], strict=False):
            if here != there:
                raise UserError(f"this process built {here} where the first has {there}: build one model in all")

    def _connect(self) -> None:
        """Links between neighbours; a stage can leave at most its batches in flight there, and a mark behind each."""
        up: dict[int, Link | None] = {0: self.entrance, self.K: None}
        down: dict[int, Link | None] = {0: None, self.K: None}
        self._evaluate_links: dict[int, Link | None] = {}
        free = self.method.feedback == "local"  # nothing comes back, so a full link is what holds the lower stage
        for k in range(1, self.K):
            bound = 2 * (self.method.held(k, self.K) + LESSON) + (8 * self.K if self.method.order else 0)
            up[k] = self.engine.link("activations", k, k + 1, capacity=bound, patient=free)
            sent = self.method.sends(Backward(0), k + 1, self.K) is not None
            down[k] = self.engine.link("gradients", k + 1, k, capacity=bound) if sent else None
            self._evaluate_links[k] = self.engine.link("evaluate", k, k + 1, capacity=4, patient=True)
        for k, stage in self.stages.items():
            inputs = up[k - 1]
            assert inputs is not None
            links = Links(inputs, outputs=up[k], gradients=down[k], feedback=down[k - 1])
            queue = self._launch_queue
            executor = None if queue is None else RecordedStage(stage, launch_queue=queue)
            self.workers.append(Worker(stage, self.method, links, executor=executor, barrier=self.engine.barrier))
        for begin in self._looks.values():
            begin()
        self._looks.clear()

    @property
    def first(self) -> bool:
        """Whether this process holds the first stage, where batches enter."""
        return 1 in self.engine.here

    @property
    def last(self) -> bool:
        """Whether this process holds the last stage, where the loss is."""
        return self.K in self.engine.here

    # ---- training

    def step(self, x: Any = None, y: Any = None) -> Tensor | None:
        """Complete local iteration t of every stage: forward t, backward t-lag, the update if one is due.

        Returns the loss of batch t in the process that holds the last stage, None elsewhere.
        """
        self._step(x, y)
        loss = self.workers[-1].loss if self.last else None
        if loss is not None and isinstance(self.engine, Streams):
            return self.engine.later(loss, self.K)
        if loss is not None and self.workers[-1].stage.launcher.reuses_outputs:
            return loss.detach().clone()
        return loss

    def _step(self, x: Any, y: Any) -> None:
        if not self.workers:
            self._build(x)
        t = self.batches
        with self._guard():
            if self.first:
                if x is None:
                    raise UserError(f"step() without a batch in the first stage's process: pass x and y for batch {t}")
                # What stays in flight is copied, since the caller may use its memory again.
                if self.engine.records:
                    x, y = self._moved(x), self._moved(y)
                elif self.method.lag(1, self.K) or self.method.feedback == "synthesiser":
                    x, y = pytree.tree_map_only(Tensor, Tensor.clone, (x, y))
                for message in micro_batches(t, x, y, self.method.m):
                    self.entrance.send(message)
            try:
                work = [worker.iteration(t, wait=self.engine.waits) for worker in self.workers]
                if self.tracing is None:
                    self.engine.run(work)
                else:
                    self._traced(t, work)
            except NotFinite:
                self._settle()  # another stage may have noted what it came from
                raise
            except KeyboardInterrupt:
                self.failure = f"it was interrupted within batch {t}, which some of its stages have done"
                raise
        self.batches += 1

    def _moved(self, content: Any) -> Any:
        """A copy on the device, for which nobody waits."""
        if not isinstance(content, Tensor):
            return pytree.tree_map_only(Tensor, self._moved, content)
        if content.is_cuda or self.device.type != "cuda":
            return content.to(self.device, copy=True)
        return content.pin_memory().to(self.device, non_blocking=True)

    def fit(
        self,
        loader: Loader | Callable[[int], Loader] | None = None,
        epochs: int = 1,
        *,
        first_epoch: int = 0,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
        after_epoch: AfterEpoch | None = None,
        drain: bool = True,
    ) -> None:
        """Train for some epochs; only the first stage's process reads the loader.

        `loader` is an iterable of (x, y), or a function of the epoch that returns one. Epochs do not flush the
        pipeline; `drain` finishes what is in flight at the very end. The callbacks run in every process, at the same
        cut: `before_step(t)`, `after_step(t)`, `after_epoch(epoch)`. Epochs are counted from 0 to `epochs`; a run that
        goes on begins with `first_epoch`, of which the loader gives what is left.
        """
        for _ in self.steps(
            loader,
            epochs,
            first_epoch=first_epoch,
            before_step=before_step,
            after_step=after_step,
            after_epoch=after_epoch,
            drain=drain,
        ):
            pass

    def steps(
        self,
        loader: Loader | Callable[[int], Loader] | None = None,
        epochs: int = 1,
        *,
        first_epoch: int = 0,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
        after_epoch: AfterEpoch | None = None,
        drain: bool = True,
    ) -> Iterator[None]:
        """`fit` a little at a time: yields behind every batch and every epoch, so that several pipelines of one process
        can take turns. Left before its end, it leaves what is in flight where it is."""
        with self._guard(computes=False):  # other pipelines take turns between its steps
            for epoch in range(first_epoch, epochs):
                for batch in self._epoch(loader, epoch):
                    if before_step:
                        before_step(self.batches)
                    self._step(*batch)
                    if after_step:
                        after_step(self.batches - 1)
                    yield
                if after_epoch:
                    left = after_epoch(epoch)
                    if isinstance(left, Iterator):
                        yield from left
                yield
        if drain:
            self.drain()

    def _epoch(self, loader: Loader | Callable[[int], Loader] | None, epoch: int) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch where they enter; elsewhere as many empty ones, until the mark that ends it."""
        if self.first:
            if loader is None:
                raise UserError("no loader in the first stage's process: give an iterable of (x, y)")
            before, given = self.batches, loader(epoch) if callable(loader) else loader
            if not isinstance(given, Iterable):
                raise UserError(f"the loader is {_kind(given)}: give an iterable of (x, y), or a function of the epoch")
            for batch in given:
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    length = f" with {len(batch)} entries" if isinstance(batch, tuple | list) else ""
                    raise UserError(
                        f"batch {self.batches} of the loader is {_kind(batch)}{length}: give pairs (x, y), "
                        "each of which may be a tuple or a dict of tensors"
                    )
                yield batch[0], batch[1]
            if self.batches == before:
                raise UserError(
                    f"the loader gave no batch in epoch {epoch}: give a list, a DataLoader, or a function "
                    "of the epoch; a generator is empty after one"
                )
        else:
            if not self.workers:
                self._build(None)
            # Not every stage gets a message in every iteration (see dgl_async.py): the mark says how many there are.
            while (ahead := self.workers[0].ahead()).kind != EPOCH_END or self.batches < ahead.t:
                yield None, None
        self._pass_on(Message(self.batches, kind=EPOCH_END))

    def _pass_on(self, mark: Message) -> None:
        """Send a mark through the stages of this process, behind the batches."""
        for worker in self.workers:
            if worker.stage.k > 1:
                worker.ahead()
                received = worker.links.inputs.receive()
                assert received == mark, f"expected {mark}, got {received}"
            if worker.links.outputs:
                worker.links.outputs.send(mark)

    def drain(self) -> nn.Module:
        """Finish every batch in flight and the open window; then the newest weights are in `model` in every process."""
        with self._guard():
            self.engine.settle()  # a drain is many turns in one
            with self.tracing.draining(self.batches) if self.tracing else nullcontext():
                self.engine.run([worker.drain(wait=self.engine.waits) for worker in self.workers])
                self._settle()
            if self.tracing is not None and self.tracing.finished:
                self.tracing = None
            done = self.engine.exchange([stage.update_index for stage in self.stages.values()])
            for stage in self.stages.values():
                stage.catch_up(max(chain.from_iterable(done)))
        return self.gather()

    def gather(self) -> nn.Module:
        """The newest weights of all stages, in `model`, in every process; training goes on as if nothing happened."""
        if self.workers:
            with self._guard():
                self._settle()
                for k, part in enumerate(self.parts, start=1):
                    self.engine.share_tensors(list(_tensors(part)), k)
                self._share_staleness()
        return self.model

    def _settle(self) -> None:
        """Have all done that was asked for; raises for what was first found to be not finite, from above: gradients
        come from the loss."""
        self.engine.settle()
        found = []
        for stage in reversed(self.stages.values()):
            try:
                stage.launcher.settle()
            except NotFinite as error:
                found.append(error)
        if found:
            raise earliest(found)

    # ---- saving

    def keep(self) -> None:
        """From the next batch on, keep what is needed to save this process's stages with their batches in flight; all
        of it is there after `lag` batches more."""
        for stage in self.stages.values():
            stage.keep()

    def mark(self, batches: int, *, stop: str = "") -> None:
        """In the first process, ahead of a batch: have all stages save behind so many batches, and stop if told why."""
        if len(self.workers) == self.K:
            for worker in self.workers:
                worker.marks[batches] = stop
                worker.stage.keep()
        else:
            self.entrance.send(Message(batches, stop, SAVE))

    @property
    def marks(self) -> dict[int, str]:
        """Where the first stage has asked this process to save, and why to stop there, if so."""
        return self.workers[-1].marks

    def state(self, *, keep_on: bool = False) -> dict[int, Any]:
        """The state of each stage of this process between batches: a tree of its own tensors, to be written at once.

        With weights="hybrid" and batches in flight, `keep` must have been called far enough ahead; `keep_on` says that
        the next time is near enough to need what is kept now.
        """
        with self._guard():
            self._settle()
        found: dict[int, Any] = {
            worker.stage.k: {"stage": stage_state.save(worker.stage), "worker": worker.save()}
            for worker in self.workers
        }
        for k, diagnosis in self.diagnoses.items():
            found[k]["diagnosis"] = diagnosis.lines()
        for stage in self.stages.values():
            stage.keep(keep_on)
        return found

    def load(self, trees: Mapping[int, Any], batches: int) -> None:
        """Go on from saved states of the same method, K, cuts, optimizer and scheduler, behind so many batches."""
        if not self.workers:
            raise UserError("load() before there are stages, which the first batch would make: give sample= or cuts=")
        if any(stage.in_flight for stage in self.stages.values()):
            raise UserError("load() with batches in flight: call drain() before, or load into a new pipeline")
        with self._guard():
            self._settle()
            for worker in self.workers:
                k = worker.stage.k
                try:
                    tree = _copied(trees[k])  # may be loaded again
                    _check_place(worker.stage, tree, batches)
                    with self.engine.beside(k):
                        stage_state.load(worker.stage, tree["stage"])
                        worker.load(tree["worker"])
                    if k in self.diagnoses:
                        self.diagnoses[k].take_up(tree.get("diagnosis", []))
                except (KeyError, IndexError, TypeError, AttributeError, AssertionError) as error:
                    raise UserError(
                        f"the state of stage {k} is not one of a pipeline like this "
                        f"({type(error).__name__}: {first_line(error)}): load what state() gave with the "
                        "same method, K, cuts, optimizer and scheduler"
                    ) from error
            self.batches = batches

    # ---- looking

    def trace(self, turns: int, path: str | Path, *, tell: tracing.Tell | None = None) -> None:
        """Record what every stage does and when, over so many local iterations from when all stages are full; the first
        process writes it then (see observe/tracing.py) and calls `tell` with one line. Changes no number.

        At any time, and in several processes in all of them: it compares their clocks.
        """
        tracing.check(turns)
        if self.tracing is not None or "trace" in self._looks:
            raise UserError("a trace is being recorded: wait until it is written before the next")
        self._look("trace", partial(self._begin_trace, turns, Path(path), tell))

    def _begin_trace(self, turns: int, path: Path, tell: tracing.Tell | None) -> None:
        self._trace_links = self._trace_links or tracing.TraceLinks.of(self.engine)
        self.tracing = Tracing(
            self.engine,
            self.workers,
            self.method,
            turns=turns,
            path=path,
            at=self.batches,
            links=self._trace_links,
            device=self.device,
            tell=tell,
        )

    def _traced(self, t: int, work: list[Iterator[bool]]) -> None:
        assert self.tracing is not None
        self.tracing.run(t, work)
        if self.tracing.finished:
            self.tracing = None

    def diagnose(self, every: int) -> None:
        """From the next batch on, measure every so many updates of each stage how stale its gradients are: the distance
        of the weights from those that forwarded the batch, and the cosine between the stale gradient and the one that
        the present weights give for the same input and the same gradient from above (see observe/diagnosis.py).

        The figures come as `diagnosis` of `reports`. Changes no number.
        """
        stage_diagnosis.check(every, self.method)
        if self.tracing is not None and self.tracing.recording:
            raise UserError("a trace is being recorded: diagnose before it, or when it is written")
        self._look("diagnosis", partial(self._begin_diagnosis, every))

    def _begin_diagnosis(self, every: int) -> None:
        for worker in self.workers:
            worker.actor = self.diagnoses[worker.stage.k] = Diagnosis(worker, every)

    def _look(self, name: str, begin: Callable[[], None]) -> None:
        """Begin to look on, now or when there are stages."""
        if not self.workers:
            self._looks[name] = begin
            return
        with self._guard():
            begin()

    def evaluate(self, loader: Loader | None = None, *, metric: Metric | None = None) -> dict[str, Any]:
        """{loss, error, top5, samples} on the newest weights, without draining; the same in every process.

        error and top5 are percentages of wrong answers (None where outputs are not class scores);
        `metric(output, target)`, a mean over the batch, takes the place of error.
        """
        steps = self.evaluating(loader, metric=metric)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: dict[str, Any] = end.value
                return result

    def evaluating(
        self, loader: Loader | None = None, *, metric: Metric | None = None
    ) -> Generator[None, None, dict[str, Any]]:
        """`evaluate` a little at a time, as `steps` trains: yields behind every batch."""
        batches = iter(() if loader is None else loader) if self.first else iter(())
        if not self.workers:
            ahead = next(batches, None)
            self._build(ahead[0] if ahead else None)
            batches = chain([ahead] if ahead else [], batches)
        meter, began = Meter(metric), time.perf_counter_ns()
        with self._guard():
            self._settle()
            while self._evaluate_next(batches, meter).kind == "batch":
                yield
                self.engine.settle()  # whoever took their turn meanwhile may have trained
            result = self.engine.share(meter.read() if self.last else None, self.K)
            self._share_staleness()
        if self.tracing is not None:
            self.tracing.evaluated(time.perf_counter_ns() - began)
        if not result["samples"]:
            raise UserError("the loader is empty: give at least one batch of (x, y)")
        return result

    def _evaluate_next(self, batches: Iterator[tuple[Any, Any]], meter: Meter) -> Message:
        """Take one batch, or the end, through the stages of this process."""
        message = END
        for k, stage in self.stages.items():
            below, above = self._evaluate_links.get(k - 1), self._evaluate_links.get(k)
            if below is None:
                batch = next(batches, None)
                message = END if batch is None else Message(0, batch)
            else:
                message = below.receive()
            if message.kind == "batch":
                x, y = message.content
                output = stage.evaluate(x)
                if above is None:
                    y = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), y)
                    meter.add(float(self._loss(output, y)), output, y)
                message = Message(0, (output, y))
            if above is not None:
                above.send(message)
        return message

    def reports(self) -> list[Report]:
        """What the stages of this process tell about themselves since they were last asked."""
        with self._guard():
            self._settle()
        told = {k: diagnosis.take() for k, diagnosis in self.diagnoses.items()}
        return [replace(stage.report(), diagnosis=told.get(k, [])) for k, stage in self.stages.items()]

    @property
    def staleness(self) -> list[Staleness]:
        """Measured staleness of every stage, counted from when it is full.

        In several processes the stages elsewhere are as of the last drain, gather or evaluate.
        """
        here = {k: stage.staleness for k, stage in self.stages.items()}
        return [here.get(k) or self._elsewhere.get(k) or Staleness() for k in range(1, self.K + 1)]

    def _share_staleness(self) -> None:
        here = {k: dict(stage.staleness) for k, stage in self.stages.items()}
        for told in self.engine.exchange(here):
            self._elsewhere.update({k: Staleness(counts) for k, counts in told.items()})

    def close(self) -> None:
        """End the links to other processes; the model stays."""
        self.engine.close()


def _chain(stages: Sequence[nn.Module], K: int | None, cuts: object) -> tuple[nn.Sequential, list[int]]:
    """A list of K stages as one sequence that is cut between all of them."""
    listed = list(stages)
    if not listed or not all(isinstance(stage, nn.Module) for stage in listed):
        raise UserError("model must be an nn.Module or a list of them, one a stage")
    if K not in (None, len(listed)) or cuts is not None:
        raise UserError(f"a list of {len(listed)} stages is cut already: leave out cuts, and K or say K={len(listed)}")
    return nn.Sequential(*listed), list(range(1, len(listed)))


def _method(method: Method | str, M: int | None) -> Method:
    if isinstance(method, str):
        return methods.with_settings(*methods.parsed(method, M=M))
    if not isinstance(method, Method):
        raise UserError(f"method {method!r}: use offbeat.ADL(M=4) and the like, or a name")
    if M is not None:
        raise UserError(f"M={M} beside a method that has its own M: {_with_M(method, M)}")
    return method


def _with_M(method: Method, M: int) -> str:  # noqa: N802
    """What to do to give a method an M."""
    make = methods.METHODS.get(method.name)
    if make is None or "M" not in inspect.signature(make).parameters:
        return "leave one of them out"
    return f"use offbeat.{make.__name__}(M={M})"


def _one_of(given: str, allowed: Any, name: str) -> Any:
    if given not in get_args(allowed):
        raise unknown(name, str(given), get_args(allowed))
    return given


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"device {device!r}: {first_line(error)}") from error


def _there(device: torch.device) -> torch.device:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device '{device}', but torch sees no CUDA device here: use 'cpu'")
    return device


def _copied(tree: Any) -> Any:
    """The tree with tensors of its own; what was one tensor in several places stays one."""
    made: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda one: made.setdefault(id(one), one.detach().clone()), tree)


def _check_place(stage: Stage, tree: Mapping[str, Any], batches: int) -> None:
    """Whether the state of a stage is that behind so many batches, with as many in flight as its method has then."""
    begun, entered = tree["worker"]["entered"] or (batches, batches)  # nothing right behind a drain
    if entered != batches:
        raise UserError(f"load(..., batches={batches}), but this is a state behind {entered} batches: give that")
    held, resting = len(tree["stage"]["in_flight"]), stage.method.resting(stage.k, stage.K, entered - begun)
    if not stage.method.order and held != resting:
        raise UserError(
            f"a state of stage {stage.k} with {held} batches in flight, of which {stage.method.name} has "
            f"{resting} by then: load what the same method gave, or drain() before state()"
        )


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"parameter {name} has a hook on its gradient, which late gradients would pass by, since "
                "stages differentiate copies: remove it (clip_norm and the optimizer see all)"
            )


def _check_loss(loss: Loss) -> None:
    if not callable(loss):
        raise UserError(f"loss {loss!r}: give a function of (output, target) that returns the mean")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UserError("the loss has parameters of its own, which no stage would train: make them part of the model")


def _check_makers(optimizer: MakeOptimizer, scheduler: MakeScheduler | None) -> None:
    """Every stage has an optimizer of its own: one that is made already holds the parameters of all."""
    if not callable(optimizer):
        raise UserError(
            f"optimizer is {_kind(optimizer)}: give a function that makes one of a stage's parameters, "
            "such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if scheduler is not None and not callable(scheduler):
        raise UserError(
            f"scheduler is {_kind(scheduler)}: give a function that makes one of a stage's optimizer, "
            "such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )


def _kind(thing: object) -> str:
    return f"of type {type(thing).__name__}"


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for _, tensor in _named_tensors(module))
