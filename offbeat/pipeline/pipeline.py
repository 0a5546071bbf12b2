"""Pipeline: a model, a method and an engine, trained batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from offbeat import partitioning as cutting
from offbeat.core.batch_guard import OnNan
from offbeat.core.clipping import ClipOver
from offbeat.core.compression import Messages, check_messages
from offbeat.core.links import Link, Message
from offbeat.core.links.local import Entrance
from offbeat.core.metrics import Meter, Metric
from offbeat.core.optimization import MakeOptimizer, MakeScheduler
from offbeat.core.precision import Precision, PrecisionPolicy
from offbeat.core.stage import Stage
from offbeat.core.stage_network import Loss
from offbeat.core.stage_report import Report, Staleness
from offbeat.core.window import Weighting
from offbeat.core.worker import SAVE, Worker
from offbeat.engines import Engine
from offbeat.engines.choose import choose_engine
from offbeat.engines.processes import TIMEOUT, seconds_of
from offbeat.errors import NotFinite, UserError
from offbeat.method import Method, StalenessWarmup
from offbeat.observe.tracing import Notify, Tracing
from offbeat.pipeline import batches, checkpoints, checks, evaluation, saving, schedules, training
from offbeat.pipeline.assembly import Assembler, Assembly
from offbeat.pipeline.callback_states import CallbackStates
from offbeat.pipeline.choice import MethodChoice
from offbeat.pipeline.guard import Guard
from offbeat.pipeline.late_losses import LossChain
from offbeat.pipeline.model_state import ModelState
from offbeat.pipeline.observation import Observation
from offbeat.pipeline.training import Batches, Loader
from offbeat.pipeline.training_loop import Evaluation, TrainingLoop
from offbeat.recommended import Recommendation

AfterEpoch = Callable[[int], object]  # returns an iterator of work that is left, done a little at a time, or anything


class Pipeline:
    """Train a model cut by depth into K stages that never wait for each other.

    model       any module that can be traced (also of Hugging Face, timm, torchvision); an nn.Sequential is cut between
                its entries; or a list of K stages
    method      offbeat.ADL(M=4) and the like, or a name with M=...; "auto": chosen for K, `batch` and `latency`, with M
                from times measured on the first batch, and corrector "auto" (see recommended.py)
    batch       optional: samples per update. A call of step takes that many and splits them into M micro-batches, each
                a local iteration, so that one call is one update; the last batch of an epoch may have fewer
    latency     of method "auto": seconds that a message between stages takes, one way, if it is known
    staleness_warmup
                optional: that many updates of back-propagation before the method, or a list of (method, updates); the
                pipeline is drained in between, and optimizer and scheduler, which are made again, continue
    loss        loss(output, target) -> the mean over the batch; None: the loss that the model computes itself
                (`output.loss`, output["loss"] or the first of a tuple), as models of Hugging Face do with labels
    optimizer   called once per stage with (name in the whole model, parameter) pairs, as torch's optimizers take them;
                a function of two arguments, lambda parameters, stage: ..., also gets the stage: `stage.k`, `K`,
                `delay` of its gradients in updates, `lag` in batches, `M` gradients per update
    scheduler   optional: called with that optimizer; a torch scheduler that counts steps, stepped once per update
    cuts        optional: cut before these units, or modules by name; default: chosen for the first batch, or `sample`
    by          what chosen cuts balance: "flops" (the same cuts on every machine) or "measured" time of this one
    trace       how units are found: "fx" (torch.fx), "sample" (run on the first batch, or `sample`), or "auto"
    tied        a parameter that several stages use: "shared" (the first trains it, the others receive it with every
                batch; BP is that of the unsplit model) or "copies" (each trains a copy: the model is untied)
    units       "blocks" (entries of an nn.Sequential) or "layers" (also inside blocks); default: "blocks" if K allows
    clip_norm   optional: largest norm of the gradient of an update
    clip_over   the parameters that this norm is of: those of each "stage", or of the "model". Without lag (BP, GPipe)
                the latter is torch's clip_grad_norm_ of the whole model. With lag no stage waits for a norm: a stage
                uses its own, and those of the other stages that have arrived: a window old, or as old as the lag
    weighting   of the gradients of an update: equal for all "batches" (also for a short one), or by their "samples"
    on_nan      what a loss or gradient that is not finite does: "stop" raises NotFinite, "skip" leaves the batch out
    replicas    R copies of the K stages, each of which trains on its own batches; an update applies the mean of the R*M
                gradients of a stage. Random numbers and statistics of BatchNorm are each replica's own, as in torch's
                DistributedDataParallel; the model, evaluation and checkpoints have those of replica 0
    left_out    batches whose gradients are not used
    precision   "fp32", "tf32" (CUDA) or "bf16"; master weights, sums of gradients and optimizer state are float32
    messages    activations and gradients between stages: "exact", or for slow links rounded to "bf16" or "int8" (see
                core/compression.py); the same bits in all engines
    compile     whether torch.compile makes a graph of each stage; a stage that cannot be compiled runs eagerly
    fuse        whether BatchNorm, a sum after it and ReLU become two fused kernels, and in bf16 3x3 convolutions with
                few channels one; on a GPU in tf32 or bf16
    engine      "simulate" (all stages in this process, one after the other), "processes" (one stage per process, K*R
                of them, under torchrun) or "streams" (all stages in this process, at the same time on one GPU); by
                default chosen by how this process was started
    timeout     seconds that a call waits for other processes, by default 10 minutes; then all raise CallTimeout, which
                names the call of each. Give more where a process may take longer between two calls (slow data, a
                first compilation, work of your own in one process), or float("inf")

    A batch is step(x, y), or step(batch) with a dict (any mapping) whose keys are arguments of forward: input_ids,
    attention_mask, labels. Then the target of the loss is the batch. Without `sample`, the stages are made with the
    first batch; if `cuts` are given, torch.fx can trace the model and forward has a single argument, at once.

    In several processes each one makes the same calls. Batches are read in the first stage's process alone; what the
    others pass is ignored. `drain`, `gather`, `evaluate`, `fit` and the first `step` are collective.

    With replicas, each process passes the batches of its replica (`pipe.replica`) to `step`; in one process,
    step([x0, x1], [y0, y1]) takes the batches of all R.

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
        loss: Loss | None = None,
        optimizer: MakeOptimizer,
        M: int | None = None,
        batch: int | None = None,
        latency: float | None = None,
        staleness_warmup: StalenessWarmup = None,
        replicas: int = 1,
        scheduler: MakeScheduler | None = None,
        cuts: Sequence[int | str] | None = None,
        units: cutting.Units | None = None,
        by: cutting.By = "flops",
        trace: cutting.Trace = "auto",
        tied: cutting.Tied = "shared",
        sample: Any = None,
        clip_norm: float | None = None,
        clip_over: ClipOver = "stage",
        device: torch.device | str | None = None,
        engine: Engine | str | None = None,
        seed: int = 0,
        weighting: Weighting = "batches",
        on_nan: OnNan = "stop",
        left_out: Sequence[int] = (),
        precision: Precision = "fp32",
        messages: Messages = "exact",
        compile: bool = False,
        fuse: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        if isinstance(model, nn.Module):
            self._model: nn.Module = model
        else:
            self._model, cuts = checks.chained(model, K, cuts)
            K = len(self._model)
        self.K = 1 if K is None else K
        checks.whole(replicas, "replicas", least=1)
        self.replicas, self.batch = replicas, checks.batch_of_replica(batch, replicas)
        self._choice = MethodChoice.of(
            method, self.K, M=M, batch=self.batch, latency=latency, staleness_warmup=staleness_warmup
        )
        self.method = self._choice.method
        self.method.check(self.K)
        checks.check_replicas(self.method, replicas)
        timeout = seconds_of(timeout, "timeout")
        wanted = checks.device_of(device)
        if not isinstance(engine, str | None):
            checks.check_engine(engine, self.K, replicas)
            wanted = engine.device_for(wanted)
        self.precision = PrecisionPolicy.of(precision, wanted or torch.device("cpu"))
        self.messages = check_messages(messages, self.K, streams=engine == "streams")
        checks.check_clipping(clip_norm, clip_over, self.method)
        checks.check_options(seed=seed, left_out=left_out, compile=compile, fuse=fuse)
        cutting.check_cutting(cuts=cuts, units=units, by=by, trace=trace, tied=tied)
        checks.check_loss(loss, self.method)
        checks.check_makers(optimizer, scheduler)
        cutting.check_stages(self._model, self.K)
        checks.check_hooks(self._model)
        blocks = by == "flops" and cutting.default_units(self._model, self.K, cuts) == "blocks"
        self.units: cutting.Units = units or ("blocks" if blocks else "layers")
        if cuts is not None and self.units == "blocks":
            # refuses wrong ones before anything starts
            cuts = cutting.cut(self._model, self.K, cuts=cutting.block_cuts(self._model, cuts))
        self._given_cuts = cuts
        self.cuts: list[int] | None = None  # where it is cut, once it is
        self._cut = partial(cutting.partition, self._model, self.K, units=self.units, by=by, trace=trace, tied=tied)
        if isinstance(engine, str | None):
            engine = choose_engine(
                engine,
                self.K,
                method=self.method,
                device=wanted or torch.device("cpu"),
                replicas=replicas,
                timeout=timeout,
            )
        self.engine: Engine = engine
        self.device = self.engine.device_for(wanted)
        self.batches = 0  # t of the next batch
        self.epoch_start = (0, 0)  # an epoch, and the number of its first batch
        self._model_state = ModelState(whole=len(self.engine.here) == self.K)
        self._found: checkpoints.Found | None = None  # a checkpoint to load once there are stages
        self.entrance: Link = Entrance()
        self._guard = Guard(self.engine, self.precision)
        self._observation = Observation(self.engine, self.method, self.device)
        self._loss = batches.own_loss if loss is None else loss
        self._make_stage = partial(
            Stage,
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            clip_over=clip_over,
            device=self.device,
            seed=seed,
            on_nan=checks.one_of(on_nan, OnNan, "on_nan"),
            left_out=left_out,
            precision=self.precision,
            compile=compile,
            fuse=fuse,
            weighting=checks.one_of(weighting, Weighting, "weighting"),
        )
        self._assembler = Assembler(
            self.engine,
            self._model,
            self.method,
            self.device,
            self.precision,
            self._cut,
            self._loss,
            self._make_stage,
            self.messages,
        )
        check_messages(self.messages, self.K, streams=self.engine.on_one_device)
        self._assembly: Assembly | None = None
        self.callback_states = CallbackStates()
        self._loop: TrainingLoop | None = None  # during a call of fit that has callbacks in some process
        late = (
            self._choice.measures
            or self.method.head is not None
            or cutting.needs_batch(self._model, self.K, cuts=cuts, units=self.units, trace=trace)
        )
        if sample is not None or not late:
            self._assembled(cutting.as_dict(sample))

    def _assembled(self, sample: Any) -> Assembly:
        """The stages of this process; made with the first batch, where they could not be made before."""
        if self._assembly is None:
            self._choose_method(sample)
            with self._guard():
                self._assembly = self._assembler.assemble(self._given_cuts, sample, self.entrance, batch=self.batches)
                self.cuts = self._assembly.cuts
                self._observation.begin(self._assembly, self.batches)
            self._load_found()
        return self._assembly

    def _choose_method(self, sample: Any) -> None:
        """Method "auto": choose M and the lag, once; the first process measures, on the first batch or `sample`."""
        if self._choice.measures:
            with self._guard():
                self._set_choice(
                    self._choice.made(self.engine, self._model, sample, device=self.device, precision=self.precision)
                )

    def _set_choice(self, choice: MethodChoice) -> None:
        self._choice, self.method = choice, choice.method
        self._observation.method = self.method
        self._assembler = replace(self._assembler, method=self.method)

    # ---- what there is in this process

    @property
    def model(self) -> nn.Module:
        """The model, with the newest weights of the stages of this process.

        The weights of stages in other processes are as of the last `drain`, `gather` or `load`; reading an outdated
        model warns once (`offbeat.ModelOutdated`).
        """
        self._model_state.check()
        return self._model

    @property
    def replica(self) -> int:
        """The replica of this process, from 0; 0 where one process has all of them."""
        return self.engine.replicas_here[0]

    @property
    def leads(self) -> bool:
        """Whether this process decides for all: it holds the first stage of replica 0."""
        return self.engine.leads

    @property
    def first(self) -> bool:
        """Whether this process holds the first stage (of its replica), where batches enter."""
        return 1 in self.engine.here

    @property
    def last(self) -> bool:
        """Whether this process holds the last stage, where the loss is."""
        return self.K in self.engine.here

    @property
    def parts(self) -> list[nn.Module]:
        """The part of the model of every stage; empty until the model is cut."""
        return self._assembly.parts if self._assembly else []

    @property
    def notes(self) -> list[str]:
        """What could not be traced, and so stays one unit."""
        return self._assembly.notes if self._assembly else []

    @property
    def recommendation(self) -> Recommendation | None:
        """What method "auto" chose, with its measurements (in the process of the first stage); None otherwise."""
        return self._choice.recommendation

    @property
    def correctors(self) -> list[str]:
        """The correctors of every stage, as text; empty until the model is cut.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> pipe = Pipeline(layers, K=2, method="adl:M=2,corrector=auto", loss=torch.nn.functional.mse_loss, cuts=[1],
        ...                 optimizer=torch.optim.Adam)
        >>> pipe.correctors
        ['lookahead+sc', 'none']
        """
        return self._assembly.correctors if self._assembly else []

    def __repr__(self) -> str:
        """Method, stages, balance, engine, and the staleness of every stage, in updates; printed by `print(pipe)`.

        Balance is the mean work of the stages divided by the largest. It is known where the pipeline chose the cuts.

        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> pipe = Pipeline(layers, K=2, M=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD,
        ...                 sample=torch.ones(1, 4))
        >>> print(pipe)
        Pipeline(method=adl, K=2, M=2, engine=simulate, balance=1.00)
          stage 1: 40 parameters, 50 % of the work, staleness 1, corrector none
          stage 2: 40 parameters, 50 % of the work, staleness 0, corrector none
        """
        costs = self._assembly.costs if self._assembly else ()
        chosen = " (auto)" * (self._choice.recommendation is not None)
        method = "auto (measured on the first batch)" if self._choice.measures else f"{self.method.name}{chosen}"
        facts = {
            "method": method,
            "K": self.K,
            "M": None if self._choice.measures else self.method.M,
            "batch": self.batch * self.replicas if self.batch else None,
            "replicas": self.replicas if self.replicas > 1 else None,
            "engine": type(self.engine).__name__.lower(),
            "balance": f"{sum(costs) / len(costs) / max(costs):.2f}" if any(costs) else None,
        }
        first = f"Pipeline({', '.join(f'{name}={value}' for name, value in facts.items() if value is not None)})"
        return "\n".join([first, *map(self._stage_line, range(1, len(self.parts) + 1))])

    def _stage_line(self, k: int) -> str:
        assert self._assembly is not None
        costs, parameters = self._assembly.costs, sum(p.numel() for p in self.parts[k - 1].parameters())
        work = f"{100 * costs[k - 1] / sum(costs):.0f} % of the work, " if any(costs) else ""
        staleness = f"staleness {self.method.staleness(k, self.K):g}, corrector {self.correctors[k - 1]}"
        return f"  stage {k}: {parameters:,} parameters, {work}{staleness}"

    @property
    def stages(self) -> dict[int, Stage]:
        """The stages of this process, by k; empty until the model is cut."""
        return self._assembly.stages if self._assembly else {}

    @property
    def workers(self) -> list[Worker]:
        """What runs the stages of this process, in the same order."""
        return self._assembly.workers if self._assembly else []

    @property
    def all_stages(self) -> list[Stage]:
        """The stages of all replicas of this process."""
        return [worker.stage for worker in self._assembly.all_workers] if self._assembly else []

    # ---- training

    def step(self, x: Any = None, y: Any = None) -> Tensor | None:
        """Complete local iteration t of every stage: forward t, backward t-lag, the update if one is due.

        x may be a dict of keyword arguments of forward; without y it is the target, too.
        Returns the loss of batch t in the process that holds the last stage, None elsewhere. With `batch=` a call is
        M local iterations, one per micro-batch, and the loss is the mean of theirs. Where this process has several
        replicas, x and y are lists with a batch of each, and the loss is the mean of theirs.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, M=1,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> loss = pipe.step(torch.ones(4, 2), torch.zeros(4, 1))
        >>> loss.shape, pipe.batches
        (torch.Size([]), 1)
        """
        known = []
        given = batches.of_replicas(x, y, len(self.engine.replicas_here), first=self.first)
        for parts in zip(*(self._micro_batches(*one) for one in given), strict=True):
            self._step(list(parts))
            known += self.newest_losses()
        return known[0] if len(known) == 1 else torch.stack(known).mean() if known else None

    def newest_losses(self) -> list[Tensor]:
        """The newest loss of each replica whose last stage is in this process."""
        assembly = self._assembled(None)
        losses = [each.workers[-1].loss for each in assembly.replicas] if self.last else []
        return [self.engine.give(loss) for loss in losses if loss is not None]

    def _micro_batches(self, x: Any, y: Any) -> list[tuple[Any, Any]]:
        """The micro-batches of an update, if `batch` is given; otherwise the batch itself."""
        if self.batch is None:
            return [(x, y)]
        if self._assembly is None:
            self._choose_method(cutting.as_dict(x))
        if not self.first or x is None:
            return [(x, y)] * self.method.M
        return training.split(x, y, M=self.method.M, batch=self.batch, t=self.batches)

    def _step(self, given: list[tuple[Any, Any]]) -> None:
        """`step` without a loss for the caller, with a batch for each replica of this process."""
        read = self._loss is not batches.own_loss
        entering = [batches.input_and_target(x, y, target_is_read=read) for x, y in given]
        assembly = self._assembled(entering[0][0])
        assembly.check_trained()
        t = self.batches
        with self._guard():
            if self.first:
                for replica, each in zip(assembly.replicas, entering, strict=True):
                    batch = self.engine.take(each, self.device)
                    training.enter(t, *batch, entrance=replica.links[1].inputs, m=self.method.m)
            try:
                work = [worker.iteration(t, wait=self.engine.waits) for worker in assembly.all_workers]
                self._observation.run(t, work)
            except NotFinite:
                assembly.settle()  # another stage may have found the cause
                raise
            except KeyboardInterrupt:
                self._guard.failure = f"it was interrupted within batch {t}, which some of its stages have done"
                raise
        self.batches += 1
        self._model_state.newest = False
        if self.method.phase(self.batches) != assembly.method:
            self._change_method(assembly)

    def _change_method(self, before: Assembly) -> None:
        """Continue with the method of the next batch, after a drain; in all processes after the same batch."""
        self._finish()
        with self._guard():
            diagnoses = self._observation.diagnoses
            states = [saving.states(one, diagnoses, keep_on=True) for one in before.replicas]
            after = self.start_at(self.batches)
            for old, new, trees in zip(before.replicas, after.replicas, states, strict=True):
                saving.hand_over(old, new, diagnoses, trees, self.batches)

    def start_at(self, batches: int, *, new: bool = False) -> Assembly:
        """Stages of the method that trains the next batch, after that many batches; `new`: made again, with new
        optimizers and schedulers."""
        self.batches, assembly, method = batches, self._assembled(None), self.method.phase(batches)
        if new or assembly.method != method:
            assembly = self._assembly = self._assembler.with_method(assembly, method)
            self._observation.change_stages(assembly, batches)
        return assembly

    def fit(
        self,
        loader: Loader | None = None,
        epochs: int = 1,
        *,
        callbacks: Sequence[Any] | None = None,
        evaluate: Evaluation | None = None,
        evaluate_every: int = 1,
        first_epoch: int = 0,
        resume: bool = False,
        drain: bool = True,
        own_share: bool = False,
    ) -> None:
        """Train for some epochs; only the first stage's process reads the loader.

        `loader` is an iterable of (x, y) or of dicts (see `step`), or a function of the epoch that returns one. With R
        replicas it is the same in all of them: replica r trains on its batches r, r + R, ...; those that are left over
        at the end of an epoch, fewer than R, are not used. With `own_share` the loader of each process has the batches
        of its own replica alone, equally many in all, as with a torch DistributedSampler for R and `pipe.replica`.
        With `batch=` the loader gives batches of that size (divided by R, with replicas).

        Epochs do not flush the pipeline; `drain` finishes the batches in flight after the last one. Epochs are counted
        from 0 to `epochs`; `first_epoch` begins with that epoch, of which the loader gives the rest.

        With `resume` it continues where the checkpoint that was loaded, or an earlier call that was interrupted, has
        stopped: in the same epoch, of which the loader gives all batches again, in the same order; those that have
        been trained are left out. A loader that shuffles must be a function of the epoch, with a seed of its own. The
        callbacks get their saved states. Without either, `resume` changes nothing: training starts with epoch 0.

        `callbacks` are objects with some of the methods of `offbeat.callbacks.Callback`, called in this process; other
        processes may have others, or none. `evaluate` is given to `evaluate()` after every `evaluate_every` epochs,
        without draining; only the first process reads it. It may be a function without arguments that returns a dict
        of figures, such as lambda: pipe.evaluate(loader, metric=f): this one is called in every process.

        >>> from offbeat.callbacks import EarlyStopping
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> pipe = Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss,
        ...                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 8
        >>> class LastLoss:
        ...     def on_step(self, step):
        ...         self.loss, self.batch = step.loss, step.loss_batch
        >>> last = LastLoss()
        >>> pipe.fit(batches, epochs=5, callbacks=[last, EarlyStopping(patience=2)], evaluate=batches)
        >>> last.batch, last.loss < 0.5
        (39, True)
        """
        loop = TrainingLoop(self, callbacks, epochs=epochs, evaluate=evaluate, evaluate_every=evaluate_every)
        with self._guard(computes=False):
            observed = loop.agree()
        self.callback_states.begin(loop if observed else None, resume=resume)
        options: dict[str, Any] = {
            "first_epoch": first_epoch,
            "resume": resume,
            "drain": drain,
            "own_share": own_share,
        }
        if not observed:
            for _ in self.steps(loader, epochs, **options):
                pass
        else:
            self._fit(loop, loader, epochs, **options)
        if drain and not loop.stopped and self.leads:
            schedules.warn_of_lengths(self.stages.values())

    def _fit(self, loop: TrainingLoop, loader: Loader | None, epochs: int, **options: Any) -> None:
        """`fit` with the callbacks of the loop."""
        self._loop = loop
        try:
            for _ in self.steps(loader, epochs, after_step=loop.after_step, after_epoch=loop.after_epoch, **options):
                pass
            with self._guard():
                loop.finish()
        finally:
            self._loop = None
            loop.end()

    @cached_property
    def loss_chain(self) -> LossChain:
        """Brings losses and requests to stop from process to process during `fit`."""
        return LossChain(self)

    def updates(self, batches: int) -> int:
        """Updates that each stage makes on that many batches, drained at the end: the length of a scheduler, such as
        OneCycleLR(total_steps=pipe.updates(epochs * len(loader))). With replicas, batches of one of them; with
        `batch=`, batches as the loader gives them.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> pipe = Pipeline(layers, K=2, M=4, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.updates(10)
        3
        """
        checks.whole(batches, "batches", least=0)
        if self._choice.measures:
            raise UserError('updates() with method="auto" before the first batch, which M is measured on: give sample=')
        return schedules.count_updates(self.method, self.K, batches * (self.method.M if self.batch else 1))

    def steps(
        self,
        loader: Loader | None = None,
        epochs: int = 1,
        *,
        first_epoch: int = 0,
        resume: bool = False,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
        after_epoch: AfterEpoch | None = None,
        drain: bool = True,
        own_share: bool = False,
    ) -> Iterator[None]:
        """`fit` a little at a time: yields after every batch and every epoch, so that several pipelines of one process
        can take turns. Closed before its end, it leaves the batches in flight as they are.

        Instead of callbacks it has functions, called in every process after the same operations of its stages:
        `before_step(t)`, `after_step(t)`, `after_epoch(epoch)`; t counts micro-batches where `batch=` is given.
        """
        checks.whole(epochs, "epochs", least=1)
        checks.whole(first_epoch, "first_epoch", least=0)
        checks.check_functions(before_step=before_step, after_step=after_step, after_epoch=after_epoch)
        checks.check_flags(drain=drain, own_share=own_share, resume=resume)
        if resume and first_epoch:
            raise UserError(
                f"first_epoch={first_epoch} with resume=True, which continues in the saved epoch: leave one out"
            )
        if own_share and self.replicas > 1 and len(self.engine.replicas_here) == self.replicas:
            raise UserError("own_share=True with all replicas in one process: leave it out, the loader is divided here")
        if self.first and loader is not None and not callable(loader):
            checks.check_loader(loader)
        with self._guard(computes=False):  # other pipelines take turns between its steps
            begun = self.epoch_start if resume else (first_epoch, self.batches)
            for epoch in range(begun[0], epochs):
                self.epoch_start = begun if epoch == begun[0] else (epoch, self.batches)
                for batch in self._epoch(loader, epoch, own_share=own_share):
                    if before_step:
                        before_step(self.batches)
                    self._step(batch)
                    if after_step:
                        after_step(self.batches - 1)
                    yield
                if self._loop and self._loop.stopped:
                    break
                self.epoch_start = (epoch + 1, self.batches)
                if after_epoch:
                    left = after_epoch(epoch)
                    if isinstance(left, Iterator):
                        yield from left
                yield
                if self._loop and self._loop.stopped:
                    break
        if drain:
            self.drain()

    def _split(self, groups: Iterator[list[tuple[Any, Any]]]) -> Iterator[list[tuple[Any, Any]]]:
        for shares in groups:
            yield from map(list, zip(*(self._micro_batches(*batch) for batch in shares), strict=True))

    def _epoch(self, loader: Loader | None, epoch: int, *, own_share: bool) -> Iterator[list[tuple[Any, Any]]]:
        """The batches of an epoch in the first stage's process, as many empty ones in others; then the mark that ends
        the epoch, or all training, is passed on."""
        loop = self._loop
        if loop:
            loop.epoch = epoch
        if self.first:
            trained = self.batches - self.epoch_start[1]
            read = training.read_epoch(loader, epoch, self.batches - trained)
            divided = (1, [0]) if own_share else (self.replicas, self.engine.replicas_here)
            stops = loop.stops if loop else None
            groups = self._split(training.until(stops, training.shares(read, *divided)))
            if self._found is not None:  # the trained batches may be all
                ahead = next(groups)
                self._assembled(batches.input_and_target(*ahead[0])[0])
                groups = chain([ahead], groups)
            yield from training.after(trained, epoch, groups)
            mark = Message(self.batches, loop.stopped if loop else None, kind=training.EPOCH_END)
        else:
            yield from training.follow_epoch(lambda: self._assembled(None).workers[0], self.batches)
            mark = self._assembled(None).workers[0].ahead()
            if loop:
                loop.stopped = mark.content
        self._compare_replicas()
        for assembly in self._assembly.replicas if self._assembly else ():
            training.pass_on(mark, assembly.workers)

    def drain(self) -> nn.Module:
        """Finish every batch in flight and the open window; then the newest weights are in `model` in every process.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, M=1,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> _ = pipe.step(torch.ones(4, 2), torch.zeros(4, 1))
        >>> [len(stage.in_flight) for stage in pipe.stages.values()]
        [1, 0]
        >>> _ = pipe.drain()
        >>> [len(stage.in_flight) for stage in pipe.stages.values()]
        [0, 0]
        """
        self._finish()
        return self.gather()

    def _finish(self) -> None:
        if self._found is not None and self._found.mode != "drained":
            raise UserError(f"drain() before the first batch, which loads {self._found.path}: give sample=")
        with self._guard():
            self.engine.settle()  # a drain is many turns in one
            with self._observation.draining(self.batches):
                workers = self._assembly.all_workers if self._assembly else []
                if self._loop and self._loop.observes_updates:
                    self._drain_in_turns(self._loop, workers)
                else:
                    self.engine.run([worker.drain(wait=self.engine.waits) for worker in workers])
                self._settle()
            self._compare_replicas()
            done = self.engine.exchange([stage.update_index for stage in self.stages.values()])
            for worker in workers:
                worker.stage.catch_up(max(chain.from_iterable(done)))

    def _compare_replicas(self) -> None:
        """Raise where another replica has had other batches, instead of waiting for it without end."""
        for worker in self.workers:
            if worker.window_sum is not None:
                worker.window_sum.end(worker.stage.window, batches=self.batches)

    def _drain_in_turns(self, loop: TrainingLoop, workers: list[Worker]) -> None:
        """Drain one local iteration at a time, in each of which a stage makes at most one update."""
        loop.after_turn()
        for turn in zip_longest(*(worker.draining(wait=self.engine.waits) for worker in workers)):
            self.engine.run([iteration for iteration in turn if iteration is not None])
            loop.after_turn()

    def gather(self) -> nn.Module:
        """The newest weights of all stages, in `model`, in every process; training continues as if nothing happened.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, M=1,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.gather() is pipe.model
        True
        """
        if self._assembly is not None:
            with self._guard():
                self._assembly.settle()
                self._assembly.share_weights()
                self._observation.share_staleness(self._assembly)
        self._model_state.newest = True
        return self._model

    def _settle(self) -> None:
        if self._assembly is not None:
            self._assembly.settle()

    # ---- evaluation

    def evaluate(self, loader: Batches | None = None, *, metric: Metric | None = None) -> dict[str, Any]:
        """{loss, error, top5, samples} on the newest weights, without draining; the same in every process.

        error and top5 are percentages of wrong answers (None where outputs are not class scores, and
        top5 for five classes or fewer).
        `metric(output, target)`, a mean over the batch, replaces error; if it returns a dict, the result has the means
        under its keys. Where the loader gives dicts, the target is the batch. If the loader, the model or the metric
        raises, training can continue; in several processes the others raise a UserError with the reason.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, M=1,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.evaluate([(torch.ones(4, 2), torch.zeros(4, 1))])["samples"]
        4
        """
        steps = self.evaluating(loader, metric=metric)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: dict[str, Any] = end.value
                return result

    def evaluating(
        self, loader: Batches | None = None, *, metric: Metric | None = None
    ) -> Generator[None, None, dict[str, Any]]:
        """`evaluate` a little at a time, as `steps` trains: yields after every batch."""
        checks.check_functions(metric=metric)
        entering = evaluation.batches_of(loader if self.leads and loader is not None else ())
        with self.engine.guard():  # without stages, other processes cannot continue
            ahead = next(entering, None) if self._assembly is None else None
        assembly = self._assembled(ahead[0] if ahead else None)
        entering_all = chain([ahead] if ahead else [], entering)
        meter, failure, began = Meter(metric), evaluation.EvaluationFailure(), time.perf_counter_ns()
        with self._guard():
            assembly.settle()
            while self.replica == 0 and evaluation.forward_next(
                assembly, entering_all, meter, failure, loss=self._loss, device=self.device
            ):
                yield
                assembly = self._assembled(None)
                self.engine.settle()  # the caller may have trained meanwhile
            result, failure.reason = self.engine.share(
                (None if failure.reason else meter.read(), failure.reason) if self.last else None, self.K
            )
            self._observation.share_staleness(assembly)
        self._observation.evaluated(time.perf_counter_ns() - began)
        failure.check()
        if not result["samples"]:
            raise UserError("the loader is empty: give at least one batch")
        return result

    # ---- saving

    def save(self, folder: str | Path, *, drain: bool = False, keep: int = 3) -> Path:
        """Write a checkpoint into a folder, in the format of `offbeat train`; returns its own folder in there.

        It has everything: weights, optimizers, schedulers, random streams, batches in flight, the position in the
        epoch of `fit`, and the states of its callbacks. A pipeline that loads it continues with the same bits. The
        folder may have several, of which the newest `keep` remain. In several processes every process calls it, and all
        see the folder. If it cannot be written, all raise CheckpointFailed, and training can continue.

        drain   finish the batches in flight first, which changes results as `drain` does; such a checkpoint can be
                loaded without loss at another K. weights="hybrid" needs it, or `keep()` some batches ahead

        >>> import tempfile
        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> _ = pipe.step(torch.ones(4, 2), torch.zeros(4, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pipe.save(folder).name
        '000000001'
        """
        checks.check_flags(drain=drain)
        checks.whole(keep, "keep", least=1)
        if self._assembly is None:
            raise UserError(
                "save() before there are stages, which the first batch makes: train a batch, or give sample="
            )
        if drain:
            self.drain()
        with self._guard():
            self._assembly.settle()
        return checkpoints.save(self, checks.path_of(folder), keep=keep)

    def load(self, folder: str | Path) -> None:
        """Continue from the newest valid checkpoint in a folder that `save` or `offbeat train` wrote, or from one
        checkpoint by its own folder.

        The pipeline must be built in the same way. Then it continues with the same bits, with batches in flight or
        drained; `fit(..., resume=True)` continues in the middle of the epoch, and restores its callbacks. It may have
        another K, other cuts, another M or another engine: then weights, the state of the optimizer and the learning
        rate continue, and batches in flight are lost, with a `NotRestored` warning. In several processes every process
        calls it.

        Before there are stages, the checkpoint is loaded when the first batch makes them.

        >>> import tempfile
        >>> def build():
        ...     torch.manual_seed(0)
        ...     return Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2,
        ...                     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> first, second, batch = build(), build(), (torch.ones(4, 2), torch.zeros(4, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = first.step(*batch), first.save(folder), second.load(folder)
        ...     bool(first.step(*batch) == second.step(*batch)), second.batches
        (True, 2)
        """
        if any(stage.in_flight for stage in self.stages.values()):
            raise UserError("load() with batches in flight: call drain() before, or load into a new pipeline")
        self._found = found = checkpoints.find(self.engine, checks.path_of(folder))
        self.callback_states.load(self, found.path)
        self.batches, self.epoch_start = found.t, found.epoch_start
        if self._assembly is not None:
            self._load_found()
            return
        if found.K == self.K and self._given_cuts is None:
            self._given_cuts = found.cuts
        if self._choice.measures and found.M:
            self._set_choice(self._choice.with_M(found.M))
        checkpoints.load_model(self._model, found)

    def _load_found(self) -> None:
        """Load the checkpoint that was found, into stages."""
        found, self._found = self._found, None
        if found is not None:
            with self._guard():
                self._settle()
                checkpoints.restore(self, found)
            self.gather()
            if self._loop:
                self._loop.count_updates()

    def state_dict(self) -> dict[str, Any]:
        """The model and the optimizers' state of the stages of this process, by the names of the unsplit model, for
        `torch.distributed.checkpoint`.

        `model` has parameters and buffers. `optimizer` has torch's flat form (`flatten_optimizer_state_dict`):
        `state.<parameter>.<key>` and `param_groups.<parameter>.<option>`. Every process has the names of its own
        stages, so `dcp.save(pipe.state_dict(), checkpoint_id=folder)` in all processes writes one checkpoint of the
        whole model, which loads into a plain model: `dcp.load({"model": model.state_dict()}, checkpoint_id=folder)`.
        The tensors are not copies. To continue training, use `save` and `load`.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1, bias=False)), K=2,
        ...                 cuts=[1], loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> list(pipe.state_dict()["model"]), pipe.state_dict()["optimizer"]["param_groups.1.weight.lr"]
        (['0.weight', '0.bias', '1.weight'], 0.001)
        """
        if self._assembly is not None:
            with self._guard():
                self._assembly.settle()
        return checkpoints.exported(self._model, self.stages if self.replica == 0 else {})

    def keep(self) -> None:
        """From the next batch on, keep what is needed to save this process's stages with their batches in flight; it is
        complete after `lag` more batches."""
        for worker in self._assembly.all_workers if self._assembly else ():
            worker.stage.keep()

    def mark(self, batches: int, *, stop: str = "") -> None:
        """In the first process, ahead of a batch: have all stages save after that many batches, and stop there if a
        reason is given."""
        if len(self.workers) == self.K:
            for worker in self._assembled(None).all_workers:
                worker.marks[batches] = stop
                worker.stage.keep()
        else:
            self.entrance.send(Message(batches, stop, SAVE))

    @property
    def marks(self) -> dict[int, str]:
        """After which batches the first stage asked this process to save, and the reason to stop there, or ""."""
        return self.workers[-1].marks

    def stage_states(self, *, keep_on: bool = False) -> dict[int, Any]:
        """The state of each stage of this process between batches: a tree of its own tensors, to be written at once.

        Stage k of replica r has the key r K + k. Replicas above 0 have only what differs from replica 0: their
        batches in flight, gradients, buffers and random streams.

        With weights="hybrid" and batches in flight, `keep` must have been called far enough ahead; with `keep_on` the
        stages continue to keep what the next call needs.
        """
        if self._assembly is None:
            return {}
        with self._guard():
            self._assembly.settle()
        found = {}
        for assembly in self._assembly.replicas:
            for k, tree in saving.states(assembly, self._observation.diagnoses, keep_on=keep_on).items():
                own = saving.without_first(tree, assembly.stages[k]) if assembly.replica else tree
                found[saving.number(k, assembly)] = own
        return found

    def load_stage_states(self, trees: Mapping[int, Any], batches: int) -> None:
        """Continue from saved states of the same method, K, cuts, optimizer and scheduler, after that many batches.

        With replicas each process needs the states of its stages in its own replica and in replica 0. A state without
        batches in flight and without an open window can be loaded with another number of replicas.
        """
        if self._assembly is None:
            raise UserError("load_stage_states() before there are stages, which the first batch makes: give sample=")
        if any(stage.in_flight for stage in self.stages.values()):
            raise UserError(
                "load_stage_states() with batches in flight: call drain() before, or load into a new pipeline"
            )
        with self._guard():
            self._assembly.settle()
            for replica in self.start_at(batches).replicas:
                saving.load(replica, self._observation.diagnoses, trees, batches)

    # ---- observing

    def trace(self, turns: int, path: str | Path, *, notify: Notify | None = None) -> None:
        """Record what every stage does and when, over that many local iterations, once all stages are full (after a
        `staleness_warmup`); the first process then writes it (see observe/tracing.py) and calls `notify` with one line.
        Changes no result.

        At any time; in several processes in all of them, since it compares their clocks.
        """
        checks.check_functions(notify=notify)
        self._observation.request_trace(turns, checks.path_of(path), notify)
        self._begin_observing()

    def diagnose(self, every: int) -> None:
        """From the next batch on, measure once every `every` updates of each stage how stale its gradients are: the
        distance of the weights from those that forwarded the batch, the cosine between the stale gradient and the
        one that the present weights give for the same input and the same gradient from above, and the change of the
        loss that each of the two predicts for the update: `fresh_change / predicted_change`, summed over updates, is
        the share of the predicted decrease that the stage gets (see observe/diagnosis.py).

        The figures are in `diagnosis` of `reports`. Changes no result.
        """
        if self.replicas > 1:
            raise UserError(
                f"diagnose() with replicas={self.replicas}: it compares an update with the batches of one replica, use "
                "replicas=1 with the same M"
            )
        self._observation.request_diagnosis(every)
        self._begin_observing()

    def _begin_observing(self) -> None:
        if self._assembly is not None:
            with self._guard():
                self._observation.begin(self._assembly, self.batches)

    @property
    def tracing(self) -> Tracing | None:
        """The trace that is being recorded or collected, if any."""
        return self._observation.tracing

    @property
    def trace_requested(self) -> bool:
        """Whether a trace has yet to begin: before the first batch, or in the warm-up of the staleness."""
        return self._observation.trace_requested

    def reports(self) -> list[Report]:
        """Figures of the stages of this process since the last call."""
        if self._assembly is None:
            return []
        with self._guard():
            self._assembly.settle()
        return self._observation.reports(self._assembly)

    @property
    def staleness(self) -> list[Staleness]:
        """Measured staleness of every stage, counted from when it is full.

        In several processes the stages elsewhere are as of the last drain, gather or evaluate.
        """
        return self._observation.staleness(self._assembly)

    def close(self) -> None:
        """End the links to other processes; the model stays. A `with` statement does the same at its end.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> with Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD) as pipe:
        ...     pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))])
        """
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: TracebackType | None) -> None:
        """Close the pipeline; an exception is reported to the other processes, which then end."""
        if isinstance(error, Exception):
            with suppress(Exception), self.engine.guard():
                raise error.with_traceback(where)
        self.close()
