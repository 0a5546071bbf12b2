"""Schedules count updates, not batches: how many there are, and whether a schedule fits them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.optim import lr_scheduler

from offbeat.core.stage import Stage
from offbeat.errors import ScheduleLength, warn_caller
from offbeat.method import Method
from offbeat.ops import Update
from offbeat.pipeline.choice import MethodChoice
from offbeat.recommended import ONE_IN


def count_updates(method: Method, K: int, batches: int) -> int:
    """Updates that each of K stages makes on batches 0, 1, ..., drained at the end; after a drain all stages have
    equally many.

    >>> from offbeat.methods import ADL, GPipe
    >>> count_updates(ADL(M=4), 2, 10), count_updates(GPipe(m=4), 2, 10)
    (3, 10)
    """
    done = first = 0
    for phase, updates in method.staleness_warmup:
        length = min(batches - first, updates * phase.M)
        done += _count(phase, K, first, length)
        first += length
    return done + _count(method.after_warmup, K, first, batches - first)


def _count(method: Method, K: int, first: int, batches: int) -> int:
    """Of one phase, which starts with an empty pipeline at batch `first`."""
    whole = 0  # windows of steady state, which need not be counted one by one
    if method.order is None:
        whole = max(0, (batches - method.fill(K) - 2 * method.M) // method.M)
    counted = range(first, first + batches - whole * method.M)
    programs = (method.program(k, K, counted) for k in range(1, K + 1))
    return whole + max(sum(type(each) is Update for turn in program for each in turn) for program in programs)


def warmup_text(method: Method) -> str:
    """The staleness warm-up as it is given: updates of back-propagation, or phases.

    >>> from offbeat.methods import named
    >>> warmup_text(named("adl", staleness_warmup=20)), warmup_text(named("adl", staleness_warmup="bp@20+adl-1f1b@12"))
    ('20', 'bp@20+adl-1f1b@12')
    """
    phases = [(phase.name, updates) for phase, updates in method.staleness_warmup]
    if [name for name, _ in phases] == ["bp"]:
        return str(phases[0][1])
    return "+".join(f"{name}@{updates}" for name, updates in phases)


def warn_of_warmup(method: Method, batches: int, *, whole: bool) -> None:
    """Warn of a staleness warm-up that is not over after that many batches; `whole`: no others follow."""
    if method.staleness_warmup and method.phase(batches - 1) != method.after_warmup:
        warn_caller(
            f"staleness_warmup={warmup_text(method)} with {math.ceil(batches / method.M)} updates "
            + (f"in all: {method.name} never begins" if whole else f"in this fit: {method.name} does not begin in it")
            + "; use fewer updates",
            ScheduleLength,
        )


def warn_of_diagnosis(every: int, updates: int) -> None:
    """Warn of a diagnosis every so many updates that a run does not reach."""
    if updates < every:
        warn_caller(
            f"diagnose={every} with {updates} updates in all: nothing is measured; use {updates} or fewer",
            ScheduleLength,
        )


def warn_of_synchronous_start(choice: MethodChoice, batches: int, *, drained: bool = False) -> None:
    """Before that many batches: warn of a synchronous start, chosen by method "auto", of more than half of them;
    `drained`: after them, of all of them."""
    if choice.settings is None or "staleness_warmup" in choice.settings:
        return
    updates = batches // choice.method.M
    for _, synchronous in choice.method.staleness_warmup:
        if updates < (synchronous + 1 if drained else 2 * synchronous):
            fewer = f"{updates // ONE_IN}, or " if updates >= ONE_IN else ""
            so_far, then = (" so far", "if training ends here, ") if drained else ("", "")
            warn_caller(
                f'method="auto": {min(synchronous, updates)} of {updates} updates{so_far} are synchronous '
                f"(staleness_warmup={synchronous}): {then}give staleness_warmup={fewer}0",
                ScheduleLength,
            )


def length(scheduler: Any) -> int | None:
    """Steps after which a scheduler has reached its end; None where it has none, or where the learning rate is meant to
    stay there (a warm-up).

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> length(lr_scheduler.CosineAnnealingLR(sgd, T_max=10)), length(lr_scheduler.StepLR(sgd, 10))
    (10, None)
    """
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = length(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return max((found for each in scheduler._schedulers if (found := length(each)) is not None), default=None)
    names = {
        lr_scheduler.OneCycleLR: "total_steps",
        lr_scheduler.CosineAnnealingLR: "T_max",
        lr_scheduler.PolynomialLR: "total_iters",
    }
    found = next((getattr(scheduler, name) for kind, name in names.items() if isinstance(scheduler, kind)), None)
    return None if found is None else int(found)


def warn_of_lengths(stages: Iterable[Stage]) -> None:
    """After training: warn of a scheduler whose length is not the number of updates; those of all stages are alike."""
    for stage in stages:
        scheduler = stage.optimization.scheduler
        steps = length(scheduler)
        made = stage.update_index
        if steps is not None and steps != made:
            name = type(scheduler).__name__
            what = "was passed" if made > steps else "was not used up"
            warn_caller(
                f"scheduler {name} has {steps} steps and {what}: training made {made} updates. A scheduler is stepped "
                "once per update, not per batch: give it pipe.updates(batches) steps",
                ScheduleLength,
            )
            return
