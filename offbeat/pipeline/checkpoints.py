"""Whole checkpoints of a pipeline in one call: all processes write and read them together.

all processes    stage_states | begin | write parts | exchange facts | first process: finish | share the outcome
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat import checkpoint
from offbeat.checkpoint import Checkpoint, CheckpointDamaged, CheckpointFailed
from offbeat.checkpoint.export import model_of
from offbeat.checkpoint.folder import FOLDER, MANIFEST
from offbeat.core import state as stage_state
from offbeat.core.stage import Stage
from offbeat.correctors import as_text
from offbeat.engines import Engine
from offbeat.errors import NotRestored, UserError, attempted, result_of, warn_caller
from offbeat.method import Method
from offbeat.pipeline import state_trees

if TYPE_CHECKING:
    from offbeat.pipeline.local_stages import LocalStages


# ---- saving


def save(local: LocalStages, folder: Path, *, keep: int) -> Path:
    """Write a checkpoint; CheckpointFailed in every process if one cannot write."""
    local.settle()
    local.callback_states.settle()
    engine, t = local.engine, local.batches

    def begin() -> None:
        checkpoint.clean(folder)
        checkpoint.begin(folder, t)

    result_of(engine.share(attempted(begin) if engine.leads else None, 1), refused=CheckpointFailed)
    reports = engine.exchange(_write_parts(local, folder))
    problems = [report["failed"] for report in reports if report["failed"]]
    if engine.leads:
        part = checkpoint.begin(folder, t)
        if problems:
            checkpoint.abandon(part)
        else:
            facts = [each for report in reports for each in report["facts"]]
            problems = _finish(local, folder, part, facts, drained=not any(report["in_flight"] for report in reports))
            checkpoint.prune(folder, keep)
    problems = engine.share(problems, 1)
    if problems:
        raise CheckpointFailed(problems[0])
    return folder / FOLDER / f"{t:0{checkpoint.DIGITS}d}"


def _write_parts(local: LocalStages, folder: Path) -> dict[str, Any]:
    """Write the stages of this process; returns the facts for the manifest, or why it failed."""
    report: dict[str, Any] = {"facts": [], "failed": None, "in_flight": False}
    part = folder / FOLDER / f"{local.batches:0{checkpoint.DIGITS}d}{checkpoint.UNFINISHED}"
    try:
        if not part.is_dir():
            stages = ", ".join(map(str, local.stages))
            raise UserError(f"the process of stage {stages} does not see {folder}: give a folder that all share")
        trees = local.states(keep_on=any(stage.keeping for stage in local.all_stages))
        report["in_flight"] = any(stage.in_flight for stage in local.all_stages)
        places = {number: divmod(number - 1, local.K) for number in trees}
        parts = {checkpoint.part_name(k + 1, replica): trees[number] for number, (replica, k) in places.items()}
        for name, tree in (parts | local.callback_states.part(local)).items():
            write = partial(checkpoint.write_part, part, name, tree)
            report["facts"] += [facts.as_dict() for facts in checkpoint.with_room(folder, write)]
    except UserError as error:  # CheckpointFailed, or a state that cannot be saved
        report["failed"] = str(error)
    return report


def _finish(local: LocalStages, folder: Path, part: Path, facts: list[Any], *, drained: bool) -> list[str]:
    """Complete the checkpoint in the first process; returns why it failed, if it did."""
    epoch, first = local.epoch_start
    try:
        checkpoint.finish(
            part,
            facts,
            t=local.batches,
            mode="drained" if drained else "in-flight",
            K=local.K,
            replicas=local.replicas,
            method=local.method.name,
            run={
                "batches": local.batches,
                "epoch": epoch,
                "epoch_batches": local.batches - first,
                "micro_batches": local.iterations_per_call,
                "pipeline": {**description(local.method, local.K), "cuts": local.cuts},
            },
        )
    except CheckpointFailed as error:
        return [str(error)]
    return []


def description(method: Method, K: int) -> dict[str, Any]:
    """What must be the same to continue with batches in flight.

    >>> from offbeat.methods import ADL
    >>> description(ADL(M=2), 2)["lag"]
    [2, 0]
    """
    return {
        "method": method.name,
        "M": method.M,
        "m": method.m,
        "lag": [method.lag(k, K) for k in range(1, K + 1)],
        "window": method.window,
        "weights": method.weights,
        "correctors": as_text(method.correctors),
        "staleness_warmup": [[description(phase, K), updates] for phase, updates in method.staleness_warmup],
    }


# ---- loading


@dataclass(frozen=True)
class Found:
    """A checkpoint, the same in every process.

    epoch, done    the epoch, and how many of its batches each replica has had
    micro_batches  of each batch of the loader; None where it is not known
    pipeline       `description` of its method, with cuts; empty where `offbeat train` wrote it
    """

    path: Path
    t: int
    K: int
    replicas: int
    mode: str
    epoch: int
    done: int
    micro_batches: int | None
    pipeline: Mapping[str, Any]

    @property
    def cuts(self) -> list[int] | None:
        return self.pipeline.get("cuts")

    @property
    def M(self) -> int | None:  # noqa: N802
        return self.pipeline.get("M")

    def done_with(self, replicas: int, micro_batches: int) -> int:
        """Batches of the epoch that each replica of another pipeline leaves out, which then has all that were trained,
        and up to R-1 others where R does not divide their number."""
        before = self.micro_batches or micro_batches
        if (self.replicas, before) == (replicas, micro_batches):
            return self.done
        return -(-self.done * self.replicas // (before * replicas)) * micro_batches


def load(local: LocalStages, folder: Path) -> None:
    """Continue from a checkpoint: now, or where there are no stages once the first batch makes them."""
    local.check_drained("load")
    local.found = found = find(local.engine, folder)
    local.callback_states.load(local, found.path)
    if local.choice.measures and found.M:
        local.set_choice(local.choice.with_M(found.M))
    done = found.done_with(local.replicas, local.iterations_per_call)
    local.batches, local.epoch_start = found.t, (found.epoch, found.t - done)
    if local.assembly is not None:
        local.load_found()
        return
    if found.K == local.K and local.given_cuts is None:
        local.given_cuts = found.cuts
    load_model(local.model, found)


def find(engine: Engine, folder: Path) -> Found:
    """The newest valid checkpoint in a folder, or the one that it is; the first process looks."""

    def look() -> list[Any]:
        made, notes = _newest(folder)
        run = made.run()
        recipe = run.get("recipe", {})
        pipeline = run.get("pipeline", {"cuts": recipe.get("cuts"), "M": recipe.get("settings", {}).get("M")})
        place = [run.get("epoch", 0), run.get("epoch_batches", made.t), run.get("micro_batches")]
        for note in notes:
            warn_caller(note, NotRestored)
        name = None if made.path == folder else made.path.name
        return [name, made.t, made.K, made.replicas, made.mode, *place, pipeline]

    name, *found = result_of(engine.share(attempted(look) if engine.leads else None, 1))
    return Found(folder if name is None else folder / FOLDER / name, *found)


def _newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    if (folder / MANIFEST).exists():
        if problems := checkpoint.verify(folder):
            raise CheckpointDamaged(problems[0])
        return checkpoint.read(folder), []
    found, notes = checkpoint.newest(folder)
    if found is None:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(f"{folder} has no valid checkpoint{why}: give a folder that pipe.save or offbeat train wrote")
    return found, notes


def load_model(model: nn.Module, found: Found) -> None:
    """Put the weights of a checkpoint into a model that is not cut yet."""
    saved = model_of(checkpoint.read(found.path))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in saved and saved[name].shape == tensor.shape:
                tensor.copy_(saved[name])


def restore(local: LocalStages, found: Found) -> None:
    """Load a checkpoint into the stages of this process: with its batches in flight, where the pipeline is the same."""
    made = checkpoint.read(found.path)
    trees = stage_trees(made, local.engine) if made.K == local.K else {}
    if all(local.engine.exchange(bool(trees) and _same(local, made, found, trees))):
        local.load_states(trees, made.t)
        return
    for note in _restore_changed(local, made, found):
        if local.engine.leads:
            warn_caller(note, NotRestored)


def stage_trees(made: Checkpoint, engine: Engine) -> dict[int, Any]:
    """The states of the stages of this process, and of the same stages in replica 0, by their number; K is the same."""
    replicas = sorted({0, *engine.replicas_here} & set(range(made.replicas)))
    return {replica * engine.K + k: made.stage(k, replica=replica) for replica in replicas for k in engine.here}


def _same(local: LocalStages, made: Checkpoint, found: Found, trees: Mapping[int, Any]) -> bool:
    """Whether the stages of this process can continue exactly."""
    own = description(local.method, local.K)
    if made.method != local.method.name or any(found.pipeline.get(name, value) != value for name, value in own.items()):
        return False
    if made.replicas != local.replicas and made.mode != "drained":
        return False
    return all(set(trees[k]["stage"]["model"]) == set(stage_state.tensors(stage)) for k, stage in local.stages.items())


def _restore_changed(local: LocalStages, made: Checkpoint, found: Found) -> list[str]:
    """Load what fits a pipeline with other stages, into new ones; returns notes on what was lost."""
    parts = [made.stage(k)["stage"] for k in range(1, made.K + 1)]
    updates = state_trees.updates_after(parts, made.t, saved_M=found.M, M=local.method.M)
    merged = state_trees.merge(parts)
    ends = dict(zip(found.cuts or [], parts, strict=False))  # by where a stage ends
    heads = {cut: part for cut, part in ends.items() if part["head"] is not None and made.method == local.method.name}
    local.start_at(made.t, new=True)
    groups: list[Any] = next((part["groups"] for part in parts if part["groups"]), [])
    lost = set()
    for stage in local.all_stages:
        if stage.optimization.optimizer is not None:
            stage_state.check_kind(stage.optimization.optimizer, groups)
        stage_state.load_model(stage, merged["model"], merged["optimizer"], merged["corrections"])
        if stage.feedback.head is not None:
            head = heads.get((local.cuts or [])[stage.k - 1])
            stage_state.load_head(stage, head)
            lost |= {stage.k} if head is None else set()
        stage.advance_schedule(updates)
        stage.late_updates = state_trees.late_updates_after(parts, updates)
    missing = sorted({k for each in local.engine.exchange(sorted(lost)) for k in each})
    new = f"the heads of stages {', '.join(map(str, missing))} are new: the checkpoint has none at these cuts"
    return state_trees.lost_batches(parts, made.replicas) + [new] * bool(missing)


# ---- export


def exported(model: nn.Module, stages: Mapping[int, Stage]) -> dict[str, Any]:
    """The tensors of the model that these stages train, and the state of their optimizers in torch's flat form."""
    own = {id(tensor) for stage in stages.values() for tensor in stage_state.tensors(stage).values()}
    named = model.state_dict(keep_vars=True) if stages else {}
    optimizer: dict[str, Any] = {}
    for stage in stages.values():
        saved = stage_state.optimizer_state(stage)
        for name, values in saved["optimizer"].items():
            optimizer |= {f"state.{name}.{key}": value for key, value in values.items()}
        for group in saved["groups"]:
            options = {option: value for option, value in group.items() if option != "names"}
            optimizer |= {
                f"param_groups.{name}.{key}": value for name in group["names"] for key, value in options.items()
            }
    found = {
        name: tensor.detach() for name, tensor in named.items() if isinstance(tensor, Tensor) and id(tensor) in own
    }
    return {"model": found, "optimizer": optimizer}
