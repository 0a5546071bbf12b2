"""Pipeline: a model, a method and an engine, trained batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from offbeat import partitioning as cutting
from offbeat.core.batch_guard import OnNan
from offbeat.core.clipping import ClipOver
from offbeat.core.compression import Messages
from offbeat.core.links import Link
from offbeat.core.metrics import Metric
from offbeat.core.optimization import MakeOptimizer, MakeScheduler
from offbeat.core.precision import Precision
from offbeat.core.stage import Stage
from offbeat.core.stage_network import Loss
from offbeat.core.stage_report import Report
from offbeat.core.window import Weighting
from offbeat.engines import Engine
from offbeat.engines.meshes import size_of
from offbeat.engines.processes import TIMEOUT
from offbeat.errors import UserError
from offbeat.method import Method, StalenessWarmup
from offbeat.observe.tracing import Notify
from offbeat.pipeline import batches, checkpoints, checks, evaluation, schedules, training_loop
from offbeat.pipeline import epochs as training_epochs
from offbeat.pipeline.assembly import Assembler, Assembly
from offbeat.pipeline.choice import MethodChoice
from offbeat.pipeline.epochs import AfterEpoch
from offbeat.pipeline.late_losses import LossChain
from offbeat.pipeline.loading import Batches, Loader
from offbeat.pipeline.local_stages import LocalStages
from offbeat.pipeline.model_cut import ModelCut
from offbeat.pipeline.placement import Placement
from offbeat.pipeline.training_loop import Evaluation
from offbeat.pipeline.view import PipelineView

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Pipeline(PipelineView):
    """Train a model cut by depth into K stages that never wait for each other.

    model       any module that can be traced (also of Hugging Face, timm, torchvision); an nn.Sequential is cut between
                its entries; or a list of K stages
    method      offbeat.ADL(M=4) and the like, or a name with M=...; "auto": chosen for K, `batch` and `latency`, with M
                from times measured on the first batch, and corrector "auto" (see recommended.py)
    batch       optional: samples per update. A call of step takes that many and splits them into M micro-batches, each
                a local iteration, so that one call is one update; the last batch of an epoch may have fewer
    latency     of method "auto": seconds that a message between stages takes, one way, if it is known
    staleness_warmup
                optional: that many updates of back-propagation before the method, whose M batches fill and drain the
                pipeline, or a list of (method, updates); the pipeline is drained in between, and optimizer and
                scheduler, which are made again, continue; options that depend on `stage.delay` are the new ones.
                Method "auto": 150 if stage 1 is more than half an update late; `fit` warns if most updates are these
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
    mesh        optional: a torch DeviceMesh of all processes with the dimensions ("replica", "stage"), or ("stage",); K
                and replicas are taken from it
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
        mesh: DeviceMesh | None = None,
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
        K, replicas = size_of(mesh, K, replicas)
        whole, K, cuts = checks.model_of(model, K, cuts)
        self.K, self.replicas, self.batch = K, replicas, checks.batch_of_replica(batch, replicas)
        choice = MethodChoice.of(method, K, M=M, batch=self.batch, latency=latency, staleness_warmup=staleness_warmup)
        choice.method.check(K)
        checks.check_replicas(choice.method, replicas)
        placement = Placement.of(
            engine,
            K,
            replicas=replicas,
            mesh=mesh,
            device=device,
            timeout=timeout,
            precision=precision,
            messages=messages,
        )
        checks.check_clipping(clip_norm, clip_over, choice.method)
        checks.check_options(seed=seed, left_out=left_out, compile=compile, fuse=fuse)
        checks.check_loss(loss, choice.method)
        checks.check_makers(optimizer, scheduler)
        checks.check_hooks(whole)
        cut = ModelCut.of(whole, K, cuts=cuts, units=units, by=by, trace=trace, tied=tied)
        self.engine: Engine = placement.start(choice.method)
        self.device, self.precision = self.engine.device_for(placement.device), placement.precision
        self.messages, self.units = messages, cut.units
        make_stage = partial(
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
        assembler = Assembler(
            self.engine,
            cut,
            choice.method,
            self.device,
            self.precision,
            batches.own_loss if loss is None else loss,
            make_stage,
            messages,
        )
        self._local = LocalStages(assembler, choice, batch=self.batch)
        self.entrance: Link = self._local.entrance
        if sample is not None or not self._local.needs_batch:
            self._local.assembled(cutting.as_dict(sample))

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
        if self._local.loss is not batches.own_loss and len(self.engine.replicas_here) == 1:
            batches.check_pair(self._local.model, x, y)
        known = []
        given = batches.of_replicas(x, y, len(self.engine.replicas_here), first=self.first)
        for parts in zip(*(self._local.micro_batches(*one) for one in given), strict=True):
            self._local.step(list(parts))
            known += self.newest_losses()
        return known[0] if len(known) == 1 else torch.stack(known).mean() if known else None

    def newest_losses(self) -> list[Tensor]:
        """The newest loss of each replica whose last stage is in this process.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> _ = pipe.step(torch.ones(4, 2), torch.zeros(4, 1))
        >>> [loss.shape for loss in pipe.newest_losses()]
        [torch.Size([])]
        """
        return self._local.newest_losses()

    def start_at(self, batches: int, *, new: bool = False) -> Assembly:
        """Stages of the method that trains the next batch, after that many batches; `new`: made again, with new
        optimizers and schedulers.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, cuts=[1])
        >>> list(pipe.start_at(8).stages), pipe.batches
        ([1, 2], 8)
        """
        return self._local.start_at(batches, new=new)

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
        training_loop.fit(
            self,
            self._local,
            loader,
            epochs,
            callbacks=callbacks,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            first_epoch=first_epoch,
            resume=resume,
            drain=drain,
            own_share=own_share,
        )

    @cached_property
    def loss_chain(self) -> LossChain:
        """Brings losses and requests to stop from process to process during `fit`.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, cuts=[1])
        >>> pipe.loss_chain.receive()  # in one process there is nothing to bring
        ({}, False)
        """
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
        if self._local.choice.measures:
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

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> for _ in pipe.steps([(torch.ones(4, 2), torch.zeros(4, 1))] * 2, epochs=1):
        ...     print(pipe.batches, pipe.epoch_start)
        1 (0, 0)
        2 (0, 0)
        2 (1, 2)
        """
        return training_epochs.steps(
            self._local,
            loader,
            epochs,
            first_epoch=first_epoch,
            resume=resume,
            before_step=before_step,
            after_step=after_step,
            after_epoch=after_epoch,
            drain=drain,
            own_share=own_share,
        )

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
        self._local.finish()
        if self.leads and self.batches and not self._local.start_named:
            self._local.start_named = True
            schedules.warn_of_synchronous_start(self._local.choice, self.batches, drained=True)
        return self.gather()

    def gather(self) -> nn.Module:
        """The newest weights of all stages, in `model`, in every process; training continues as if nothing happened.

        >>> pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, M=1,
        ...                 loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.gather() is pipe.model
        True
        """
        return self._local.gather()

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
        return evaluation.evaluate(self._local, loader, metric)

    def evaluating(
        self, loader: Batches | None = None, *, metric: Metric | None = None
    ) -> Generator[None, None, dict[str, Any]]:
        """`evaluate` a little at a time, as `steps` trains: yields after every batch.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> passes = pipe.evaluating([(torch.ones(4, 2), torch.zeros(4, 1))] * 2)
        >>> sum(1 for _ in passes)  # batches; other work may be done after each
        2
        """
        return evaluation.evaluating(self._local, loader, metric)

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
        if self._local.assembly is None:
            raise UserError(
                "save() before there are stages, which the first batch makes: train a batch, or give sample="
            )
        if drain:
            self.drain()
        return checkpoints.save(self._local, checks.path_of(folder), keep=keep)

    def load(self, folder: str | Path) -> None:
        """Continue from the newest valid checkpoint in a folder that `save` or `offbeat train` wrote, or from one
        checkpoint by its own folder.

        The pipeline must be built in the same way. Then it continues with the same bits, with batches in flight or
        drained; `fit(..., resume=True)` continues in the middle of the epoch, and restores its callbacks. It may have
        another K, other cuts, another M, number of replicas or engine: then weights, optimizer state and the learning
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
        checkpoints.load(self._local, checks.path_of(folder))

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
        self._local.settle()
        return checkpoints.exported(self._local.model, self.stages if self.replica == 0 else {})

    def keep(self) -> None:
        """From the next batch on, keep what is needed to save this process's stages with their batches in flight; it is
        complete after `lag` more batches.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, method="adl:M=1,weights=hybrid", loss=torch.nn.functional.mse_loss,
        ...                 optimizer=torch.optim.SGD, cuts=[1])
        >>> pipe.keep()
        >>> for _ in range(4):
        ...     _ = pipe.step(torch.ones(4, 2), torch.zeros(4, 1))
        >>> sorted(pipe.stage_states())
        [1, 2]
        """
        for stage in self.all_stages:
            stage.keep()

    def mark(self, batches: int, *, stop: str = "") -> None:
        """In the first process, ahead of a batch: have all stages save after that many batches, and stop there if a
        reason is given.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, cuts=[1])
        >>> pipe.mark(3, stop="enough")
        >>> pipe.marks
        {3: 'enough'}
        """
        self._local.mark(batches, stop=stop)

    def stage_states(self, *, keep_on: bool = False) -> dict[int, Any]:
        """The state of each stage of this process between batches: a tree of its own tensors, to be written at once.

        Stage k of replica r has the key r K + k. Replicas above 0 have only what differs from replica 0: their
        batches in flight, gradients, buffers and random streams.

        With weights="hybrid" and batches in flight, `keep` must have been called far enough ahead; with `keep_on` the
        stages continue to keep what the next call needs.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> for _ in range(3):
        ...     _ = pipe.step(*batch)
        >>> {k: len(state["stage"]["in_flight"]) for k, state in pipe.stage_states().items()}
        {1: 2, 2: 0}
        """
        return self._local.states(keep_on=keep_on)

    def load_stage_states(self, trees: Mapping[int, Any], batches: int) -> None:
        """Continue from saved states of the same method, K, cuts, optimizer and scheduler, after that many batches.

        With replicas each process needs the states of its stages in its own replica and in replica 0. A state without
        batches in flight and without an open window can be loaded with another number of replicas.

        >>> def build():
        ...     torch.manual_seed(0)
        ...     return Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)), K=2, cuts=[1],
        ...                     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> first, second, batch = build(), build(), (torch.ones(4, 2), torch.zeros(4, 1))
        >>> _ = first.step(*batch)
        >>> second.load_stage_states(first.stage_states(), batches=1)
        >>> bool(first.step(*batch) == second.step(*batch))
        True
        """
        self._local.load_states(trees, batches)

    # ---- observing

    def trace(self, turns: int, path: str | Path, *, notify: Notify | None = None) -> None:
        """Record what every stage does and when, over that many local iterations, once all stages are full (after a
        `staleness_warmup`); the first process then writes it (see observe/tracing.py) and calls `notify` with one line.
        Changes no result.

        At any time; in several processes in all of them, since it compares their clocks.

        >>> import tempfile
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pipe.trace(2, f"{folder}/trace.json")
        ...     pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 8)
        ...     [file.name for file in Path(folder).iterdir()]
        ['trace.json']
        """
        checks.check_functions(notify=notify)
        self._local.observation.request_trace(turns, checks.path_of(path), notify)
        self._local.begin_observing()

    def diagnose(self, every: int) -> None:
        """From the next batch on, measure once every `every` updates of each stage what staleness changes: the
        distance of the weights from those that forwarded the batch, the cosine between the late gradient and the
        one that the present weights give for the same input and the same gradient from above, and the change of the
        loss that each of the two predicts for the update: `fresh_change / predicted_change`, summed over updates, is
        the share of the predicted decrease that the stage gets (see observe/diagnosis.py).

        The figures are in `diagnosis` of `reports`. Changes no result.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.diagnose(every=2)
        >>> pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 8)
        >>> [(line["update"], line["lag"]) for line in pipe.reports()[0].diagnosis]
        [(1, 1), (3, 2), (5, 2), (7, 2)]
        """
        if self.replicas > 1:
            raise UserError(
                f"diagnose() with replicas={self.replicas}: it compares an update with the batches of one replica, use "
                "replicas=1 with the same M"
            )
        self._local.observation.request_diagnosis(every)
        self._local.begin_observing()

    def reports(self) -> list[Report]:
        """Figures of the stages of this process since the last call.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = Pipeline(layers, K=2, M=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 8)
        >>> [(report.k, report.updates, report.samples, report.staleness) for report in pipe.reports()]
        [(1, 8, 32, {2: 6}), (2, 8, 32, {0: 8})]
        """
        self._local.settle()
        return self._local.observation.reports(self._local.assembly) if self._local.assembly else []

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
