"""How a run continues from a checkpoint, also with another recipe than it began with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat import checkpoint
from offbeat.checkpoint import Checkpoint
from offbeat.checkpoint.folder import FOLDER
from offbeat.core import state as stage_state
from offbeat.core.stage import Stage
from offbeat.engines import Engine
from offbeat.errors import UserError
from offbeat.methods import settings_of
from offbeat.pipeline import Pipeline, state_trees
from offbeat.pipeline.checkpoints import stage_trees
from offbeat.runs import optimizers, transfer
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import Recipe, upgraded
from offbeat.runs.record import RunFolder

# Settings that must be the same to continue with the batches in flight, and their values in earlier recipes.
SAME = (
    "model",
    "method",
    "K",
    "replicas",
    "cuts",
    "units",
    "seed",
    "batch_size",
    "drop_last",
    "weighting",
    "precision",
    "messages",
    "optimizer",
)
EARLIER = {
    "replicas": 1,
    "precision": "fp32",
    "messages": "exact",
    "drop_last": False,
    "weighting": "batches",
    "optimizer": "sgd",
    "betas": None,
    "schedule": "steps",
    "floor": None,
}
RATES = ("lr", *optimizers.SETTINGS)
SCHEDULE = ("lr", "epochs", "warmup", "schedule", "milestones", "floor")


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint of a run, the same in every process; `run` is its run.json, empty without a checkpoint."""

    path: Path | None
    run: dict[str, Any]
    same: bool  # whether the batches in flight can be continued
    notes: list[str]


NOTHING_SAVED = NewestCheckpoint(None, {}, True, [])


def find_checkpoint(recipe: Recipe, engine: Engine, out: Path) -> NewestCheckpoint:
    """Find the newest checkpoint in the first process, and share it; the folder may have another path elsewhere."""
    shared = None
    if engine.leads:
        found, notes = find(out)
        run = found.run() if found else {}
        shared = [found and found.path.name, run, exact(recipe, run["recipe"]) if run else True, notes]
    name, run, same, notes = engine.share(shared, 1)
    return NewestCheckpoint(None if name is None else out / FOLDER / name, run, same, notes)


def resume(
    recipe: Recipe, pipe: Pipeline, found: NewestCheckpoint, folder: RunFolder | None, apart: Collection[int] = ()
) -> list[str]:
    """Load a checkpoint, if there is one, into the pipeline; returns notes on what was lost.

    apart: stages whose processes do not see the run folder.
    """
    notes = list(found.notes)
    if found.path is not None:
        with transfer.at_hand(pipe.engine, found.path, apart, whole=not found.same) as path:
            notes += restore(pipe, recipe, str(path), found.run["recipe"], same=found.same)
        pipe.engine.barrier()  # all have
    if folder:
        folder.resumed(pipe.batches, notes, exact=found.same)
    return notes


def exact(recipe: Recipe, saved: dict[str, Any]) -> bool:
    """Whether a run of this recipe can continue with the batches that were in flight."""
    now, before = recipe.as_dict(), {**EARLIER, **upgraded(saved)}
    if any(_listed(now[name]) != _listed(before.get(name)) for name in SAME):
        return False
    defaults = {name: setting.default for name, setting in settings_of(recipe.method).items()}
    free = {"recompute": None}  # a setting that changes no result
    return {**defaults, **recipe.settings, **free} == {**defaults, **before["settings"], **free}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def continued(recipe: Recipe, samples: int, run: dict[str, Any]) -> Epochs:
    """The epochs of a run of this recipe that continues from a checkpoint with this run.json; {}: a new run."""
    new = recipe.count(samples)
    if not run:
        return new
    before = {"samples": samples, "batch_size": run["recipe"]["batch_size"], **run.get("epochs", {})}
    epochs = Epochs(**before).continued(run["batches"], new)
    if epochs.position(run["batches"]) > (recipe.epochs, 0):
        done = epochs.progress(run["batches"]) / epochs.per_epoch
        raise UserError(f"epochs={recipe.epochs}, but the checkpoint was made after {done:.4g}: increase epochs=")
    return epochs


def restore(pipe: Pipeline, recipe: Recipe, path: str, saved: dict[str, Any], *, same: bool) -> list[str]:
    """Load a checkpoint of the recipe `saved` into the stages of this process; returns notes on what was lost."""
    made = checkpoint.read(Path(path))
    if same:
        pipe.load_stage_states(stage_trees(made, pipe.engine), batches=made.t)
        for stage in pipe.all_stages:
            change_rates(stage, recipe, saved)
        return []
    parts = [made.stage(k)["stage"] for k in range(1, made.K + 1)]
    notes = state_trees.lost_batches(parts, made.replicas)
    before = {**EARLIER, **saved}["optimizer"]
    if before != recipe.optimizer:
        parts = [{**part, "optimizer": {}} for part in parts]
        notes.append(f"the state of the optimizer is lost by the change from {before} to {recipe.optimizer}")
    updates = state_trees.updates_after(parts, made.t, saved_M=upgraded(saved)["settings"]["M"], M=recipe.M)
    merged = state_trees.merge(parts)
    heads = heads_by_cut(parts, saved)
    pipe.start_at(made.t)
    for stage in pipe.all_stages:
        stage_state.load_model(stage, merged["model"], merged["optimizer"], merged["corrections"])
        stage_state.load_head(stage, heads.get(_end(recipe.as_dict(), stage.k)))
        stage.resume_schedule(updates)
        stage.late_updates = state_trees.late_updates_after(parts, updates)
    return [
        *notes,
        *_lost_heads(pipe, heads, recipe, parts),
        *_new_rate(recipe, saved),
        *_late_warmup(recipe, saved, made.t),
    ]


def _late_warmup(recipe: Recipe, saved: Mapping[str, Any], batches: int) -> list[str]:
    """A note on a new staleness warm-up that was over before the checkpoint, if it does not end one that was not."""
    given, before = recipe.staleness_warmup, upgraded(dict(saved))["settings"].get("staleness_warmup")
    if not given or given == before:
        return []
    other = replace(recipe, settings={**recipe.settings, "staleness_warmup": before or given})
    if any(method.phase(batches) != method.after_warmup for method in (recipe.make_method(), other.make_method())):
        return []
    done = batches // recipe.M
    return [f"staleness_warmup={given} has no effect after {done} updates: use more updates, or leave it out"]


def _end(recipe: Mapping[str, Any], k: int) -> tuple[Any, ...]:
    """Where stage k ends, which decides whether a head still fits."""
    return (recipe["model"], recipe["method"], recipe["units"], *list(recipe["cuts"])[k - 1 : k])


def heads_by_cut(parts: list[dict[str, Any]], saved: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The parts of a checkpoint with a head, by where their stage ends."""
    return {_end(saved, part["k"]): part for part in parts if part["head"] is not None}


def _lost_heads(
    pipe: Pipeline, heads: Mapping[tuple[Any, ...], Any], recipe: Recipe, parts: list[dict[str, Any]]
) -> list[str]:
    """Notes on heads that are initialised again, and on trained heads that no stage can use."""
    wanted = {_end(recipe.as_dict(), k): k for k in range(1, pipe.K)} if pipe.method.head else {}
    new = [str(k) for end, k in wanted.items() if end not in heads]
    gone = [str(part["k"]) for end, part in heads.items() if end not in wanted]
    notes = []
    if new:
        notes.append(
            f"the heads of stages {', '.join(new)} are initialised again: the checkpoint has no heads at their cuts"
        )
    if gone:
        notes.append(f"the heads of stages {', '.join(gone)} of the checkpoint are not used")
    return notes


def _new_rate(recipe: Recipe, saved: Mapping[str, Any]) -> list[str]:
    return [f"the learning rate is {recipe.lr:g}, it was {saved['lr']:g}"] if recipe.lr != saved["lr"] else []


def change_rates(stage: Stage, recipe: Recipe, saved: dict[str, Any]) -> None:
    """Set learning rate, settings of the optimizer and schedule of the recipe, from the next update on."""
    saved = {**EARLIER, **saved}
    changed = [name for name in {*RATES, *SCHEDULE} if _listed(getattr(recipe, name)) != _listed(saved[name])]
    optimizer, scheduler = stage.optimization.optimizer, stage.optimization.scheduler
    if optimizer is None or not changed:
        return
    for group in optimizer.param_groups:
        group.update(initial_lr=recipe.lr, **optimizers.options(recipe))
    if scheduler:
        scheduler.base_lrs = [recipe.lr for _ in scheduler.base_lrs]
    stage.resume_schedule(stage.update_index)


def find(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint of a run, after removing unfinished ones; and notes."""
    checkpoint.clean(run)
    return checkpoint.newest(run)
