"""Begin a run in this process: join the other processes, enter the run folder, resume from a checkpoint."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offbeat import data
from offbeat.correctors import AutoCorrector, by_stage
from offbeat.data.text import Text
from offbeat.engines import Engine
from offbeat.engines.choose import choose_engine
from offbeat.errors import FolderTaken, attempted, result_of, stage_name
from offbeat.runs import build, lock, resuming
from offbeat.runs.build import Facts
from offbeat.runs.recipe import Recipe
from offbeat.runs.record import RunFolder
from offbeat.runs.signals import stopping
from offbeat.runs.training_run import REPORTS_PER_EPOCH, TrainingRun


def train_here(
    recipe: Recipe,
    out: Path,
    *,
    show: bool = True,
    folder_ready: bool = False,
    rewrite: bool = False,
    silence: float | None = None,
    timeout: float | None = None,
) -> dict[str, Any] | None:
    """Train the stages of this process; returns the result in the process of the first stage.

    folder_ready   the run folder exists; if it contains a checkpoint, the run continues from there
    rewrite        write config.json again, since the recipe may have changed; the earlier one is kept beside it
    silence, timeout    see `offbeat.train`
    """
    run = begin(recipe, out, show=show, folder_ready=folder_ready, rewrite=rewrite, silence=silence, timeout=timeout)
    try:
        with stopping(run.stop):
            with run.pipe.engine.guard():  # none trains while a signal would still kill another without a checkpoint
                run.pipe.engine.barrier()
            return run.fit()
    finally:
        run.close()


def begin(
    recipe: Recipe,
    out: Path,
    *,
    show: bool = True,
    folder_ready: bool = False,
    data_set: data.DataSet | None = None,
    name: str = "",
    reports: int = REPORTS_PER_EPOCH,
    rewrite: bool = False,
    silence: float | None = None,
    timeout: float | None = None,
) -> TrainingRun:
    """A run that is ready to train (see `train_here`): by `fit`, or batch by batch with `steps`.

    data_set   of the recipe, if it is open already; runs of one process can share it
    name       of one of several runs on the screen
    reports    per epoch
    """
    torch.set_num_threads(recipe.threads_per_stage)
    torch.backends.cudnn.benchmark = recipe.tune
    device, method = torch.device(recipe.device), recipe.make_method()
    engine = choose_engine(
        recipe.engine,
        recipe.K,
        method=method,
        device=device,
        replicas=recipe.replicas,
        silence=silence,
        timeout=math.inf if timeout is None else timeout,
    )
    with engine.guard(), ExitStack() as locks:
        known = None
        if 1 in engine.here:
            data_set = data_set or build.open_data(recipe)
            known = build.facts(recipe, data_set)
            if recipe.cuts is None and engine.leads:
                recipe = replace(recipe, **build.choose_cuts(recipe, known))
        shared = engine.share(known and [known.shape, known.classes, known.samples, recipe.cuts, recipe.units], 1)
        known = Facts(*shared[:3])
        recipe = replace(recipe, cuts=tuple(shared[3]), units=shared[4])
        folder, apart = enter(recipe, out, engine, locks, ready=folder_ready, rewrite=rewrite)
        found = resuming.find_checkpoint(recipe, engine, out) if folder_ready else resuming.NOTHING_SAVED
        epochs = resuming.continued(recipe, known.samples, found.run)
        pipe = build.make_pipeline(recipe, known, epochs, engine)
        notes = resuming.resume(recipe, pipe, found, folder, apart) if folder_ready else []
        if any(isinstance(corrector, AutoCorrector) for corrector in method.correctors):
            notes.append(f"corrector auto: {by_stage(pipe.correctors)}")
            if folder is not None:
                folder.line("correctors", stages=pipe.correctors)
        if folder is not None and isinstance(data_set, Text):
            notes += folder.text(data_set.as_record())
        data_set, others = build.move_data(recipe, data_set)
        if apart:
            names = ", ".join(stage_name(number - 1, recipe.K, recipe.replicas) for number in apart)
            others.append(f"stages that do not see {out} send their parts of checkpoints to stage 1: {names}")
        return TrainingRun(
            recipe,
            known,
            epochs,
            pipe,
            folder,
            data_set,
            show,
            out,
            found.run,
            notes=[*notes, *others],
            name=name,
            reports=reports,
            apart=apart,
            locks=locks.pop_all(),
        )


def enter(
    recipe: Recipe, out: Path, engine: Engine, locks: ExitStack, *, ready: bool, rewrite: bool
) -> tuple[RunFolder | None, list[int]]:
    """Lock the run folder in all processes. Returns it in the process of the first stage, and the processes that do not
    see it, from 1 in the order of stages and replicas.

    If the folder cannot be used, all processes raise the same error.
    """
    folder: RunFolder | None = None

    def make() -> str:
        nonlocal folder
        token = locks.enter_context(lock.held(out))
        folder = RunFolder(out) if ready and not rewrite else RunFolder.create(out, recipe, again=rewrite)
        return token

    token = result_of(engine.share(attempted(make) if engine.leads else None, 1), refused=FolderTaken)
    sees = folder is not None or locks.enter_context(lock.joined(out, token))
    return folder, [k for k, there in enumerate(engine.exchange(sees), start=1) if not there]
