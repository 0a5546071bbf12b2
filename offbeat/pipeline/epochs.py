"""Epochs of a loader through the stages of this process: every batch, then the mark that ends the epoch for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from offbeat.core.links import Message
from offbeat.errors import UserError
from offbeat.pipeline import batches, checks, loading, schedules
from offbeat.pipeline.loading import Loader
from offbeat.pipeline.local_stages import Given, LocalStages

AfterEpoch = Callable[[int], object]  # returns an iterator of work that is left, done a little at a time, or anything


def steps(
    local: LocalStages,
    loader: Loader | None,
    epochs: int,
    *,
    first_epoch: int,
    resume: bool,
    before_step: Callable[[int], None] | None,
    after_step: Callable[[int], None] | None,
    after_epoch: AfterEpoch | None,
    drain: bool,
    own_share: bool,
) -> Iterator[None]:
    """Train for some epochs; yields after every batch and every epoch. See `Pipeline.steps`."""
    checks.whole(epochs, "epochs", least=1)
    checks.whole(first_epoch, "first_epoch", least=0)
    checks.check_functions(before_step=before_step, after_step=after_step, after_epoch=after_epoch)
    checks.check_flags(drain=drain, own_share=own_share, resume=resume)
    _check_loader(local, loader, first_epoch, resume=resume, own_share=own_share)
    with local.guard(computes=False):  # other pipelines take turns between its steps
        begun = local.epoch_start if resume else (first_epoch, local.batches)
        for epoch in range(begun[0], epochs):
            local.epoch_start = begun if epoch == begun[0] else (epoch, local.batches)
            for batch in _epoch(local, loader, epoch, own_share=own_share):
                if before_step:
                    before_step(local.batches)
                local.step(batch)
                if local.batches == 1:
                    _warn_of_start(local, loader, epochs - first_epoch, own_share=own_share)
                if after_step:
                    after_step(local.batches - 1)
                yield
            if local.loop and local.loop.stopped:
                break
            local.epoch_start = (epoch + 1, local.batches)
            if after_epoch:
                left = after_epoch(epoch)
                if isinstance(left, Iterator):
                    yield from left
            yield
            if local.loop and local.loop.stopped:
                break
    if drain:
        if local.found is not None and local.found.mode != "drained":  # all epochs were trained, and batches in flight
            _make_stages(local, loader, epochs - 1)
        local.finish()
        local.gather()


def _warn_of_start(local: LocalStages, loader: Loader | None, epochs: int, *, own_share: bool) -> None:
    """In the process that reads the loader, where it has a length; the method has been chosen."""
    try:
        batches = len(loader) // (1 if own_share else local.replicas)  # type: ignore[arg-type]
    except TypeError:  # a function of the epoch, or a stream
        return
    batches *= epochs * local.iterations_per_call
    if local.choice.settings is None or "staleness_warmup" in local.choice.settings:
        schedules.warn_of_warmup(local.choice.method, batches, whole=False)
    else:
        local.start_named = True
        schedules.warn_of_synchronous_start(local.choice, batches)


def _check_loader(
    local: LocalStages, loader: Loader | None, first_epoch: int, *, resume: bool, own_share: bool
) -> None:
    if resume and first_epoch:
        raise UserError(
            f"first_epoch={first_epoch} with resume=True, which continues in the saved epoch: leave one out"
        )
    if own_share and local.replicas > 1 and len(local.engine.replicas_here) == local.replicas:
        raise UserError("own_share=True with all replicas in one process: leave it out, the loader is divided here")
    if local.first and loader is not None and not callable(loader):
        checks.check_loader(loader)


def _epoch(local: LocalStages, loader: Loader | None, epoch: int, *, own_share: bool) -> Iterator[Given]:
    """The batches of an epoch in the first stage's process, as many empty ones in others; then the mark that ends
    the epoch, or all training, is passed on."""
    loop = local.loop
    if loop:
        loop.epoch = epoch
    if local.first:
        yield from _read(local, loader, epoch, own_share=own_share)
        mark = Message(local.batches, loop.stopped if loop else None, kind=loading.EPOCH_END)
    else:
        yield from loading.follow_epoch(lambda: local.assembled(None).workers[0], local.batches)
        mark = local.assembled(None).workers[0].ahead()
        if loop:
            loop.stopped = mark.content
    local.compare_replicas()
    for assembly in local.assembly.replicas if local.assembly else ():
        loading.pass_on(mark, assembly.workers)


def _read(local: LocalStages, loader: Loader | None, epoch: int, *, own_share: bool) -> Iterator[Given]:
    """The batches of an epoch that have not been trained, up to where a callback stops training."""
    begin = local.epoch_start[1]
    read = loading.read_epoch(loader, epoch, begin)
    divided = (1, [0]) if own_share else (local.replicas, local.engine.replicas_here)
    stops = local.loop.stops if local.loop else None
    groups = _split(local, loading.until(stops, loading.shares(read, *divided)))
    if local.found is not None:  # the trained batches may be all
        ahead = next(groups)
        local.assembled(batches.input_and_target(*ahead[0])[0])
        groups = chain([ahead], groups)
    yield from loading.after(local.batches - begin, epoch, groups)


def _make_stages(local: LocalStages, loader: Loader | None, epoch: int) -> None:
    """Load the checkpoint that was found into stages, made with a batch that is not trained."""
    with local.guard(computes=False):
        sample = next(loading.read_epoch(loader, epoch, 0)) if local.first else (None, None)
        local.assembled(batches.input_and_target(*sample)[0] if local.first else None)


def _split(local: LocalStages, groups: Iterator[Given]) -> Iterator[Given]:
    for shares in groups:
        yield from map(list, zip(*(local.micro_batches(*batch) for batch in shares), strict=True))
