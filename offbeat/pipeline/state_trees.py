"""The state of the stages between batches, as trees of tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core import state as stage_state
from offbeat.core.stage import Stage
from offbeat.core.worker import Worker
from offbeat.errors import UserError, first_line
from offbeat.observe.diagnosis import Diagnosis
from offbeat.pipeline.assembly import Assembly

Diagnoses = Mapping[int, Diagnosis]  # of the stages of this process that have one
SAME_IN_REPLICAS = ("optimizer", "groups", "scheduler", "versions", "policy")


def states(assembly: Assembly, diagnoses: Diagnoses, *, keep_on: bool) -> dict[int, Any]:
    """The state of each stage of this process and replica, which has settled: a tree of the stage's own tensors."""
    replicas = assembly.engine.replicas
    found: dict[int, Any] = {
        worker.stage.k: {
            "stage": stage_state.save(worker.stage),
            "worker": worker.save(),
            **({"replicas": replicas} if replicas > 1 else {}),
        }
        for worker in assembly.workers
    }
    for k, diagnosis in diagnoses.items():
        found[k]["diagnosis"], found[k]["diagnosed_window"] = diagnosis.lines(), diagnosis.open_window()
    for stage in assembly.stages.values():
        stage.keep(keep_on)
    return found


def states_of_replicas(assembly: Assembly, diagnoses: Diagnoses, *, keep_on: bool) -> dict[int, Any]:
    """The states of all replicas of this process, by `number`; of those above 0 only what differs from replica 0."""
    found = {}
    for replica in assembly.replicas:
        for k, tree in states(replica, diagnoses, keep_on=keep_on).items():
            own = without_first(tree, replica.stages[k]) if replica.replica else tree
            found[number(k, replica)] = own
    return found


def number(k: int, assembly: Assembly) -> int:
    """The number of stage k of this replica among the stages of all replicas."""
    return assembly.replica * assembly.engine.K + k


def without_first(tree: Any, stage: Stage) -> Any:
    """The state of a stage of another replica, without what is the same in replica 0."""
    differs = any(corrector.differs_in_replicas for corrector in stage.optimization.corrections.active)
    same = SAME_IN_REPLICAS if differs else (*SAME_IN_REPLICAS, "corrections")
    own = {name: value for name, value in tree["stage"].items() if name not in same}
    own["model"] = dict(stage.network.module.named_buffers())
    return {**tree, "stage": own}


def load(assembly: Assembly, diagnoses: Diagnoses, trees: Mapping[int, Any], batches: int) -> None:
    """Put the stages of this process and replica, which have settled, into states of the same method, K, cuts,
    optimizer and scheduler; trees: by `number`."""
    for worker in assembly.workers:
        _load(worker, lambda stage: _of_replica(stage, trees, assembly), diagnoses, batches, assembly)


def _load(
    worker: Worker, state: Callable[[Stage], Any], diagnoses: Diagnoses, batches: int, assembly: Assembly
) -> None:
    stage = worker.stage
    try:
        tree = _copied(state(stage))  # may be loaded again
        _check_place(stage, tree, batches)
        with assembly.engine.stage_context():
            stage_state.load(stage, tree["stage"])
            worker.load(tree["worker"])
        if stage.k in diagnoses:
            diagnoses[stage.k].take_up(tree.get("diagnosis", []), tree.get("diagnosed_window"))
    except (KeyError, IndexError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"the state of stage {stage.k} is not one of a pipeline like this "
            f"({type(error).__name__}: {first_line(error)}): load what stage_states() returned with the "
            "same method, K, cuts, optimizer and scheduler"
        ) from error


def _of_replica(stage: Stage, trees: Mapping[int, Any], assembly: Assembly) -> Any:
    """The complete state of a stage of this replica."""
    first, replicas = trees[stage.k], assembly.engine.replicas
    saved = first.get("replicas", 1)
    if saved != replicas and (first["stage"]["in_flight"] or first["stage"]["window"]["levels"]):
        raise UserError(
            f"a state of {saved} replica{'s' * (saved > 1)} with batches in flight or an open window, where there are "
            f"replicas={replicas}: give replicas={saved}, or drain() before saving"
        )
    if assembly.replica == 0:
        return first
    if saved != replicas:  # with a random stream of its own
        return {**first, "stage": {**first["stage"], "random": stage.network.random.state}}
    own = trees[number(stage.k, assembly)]
    model = {**first["stage"]["model"], **own["stage"]["model"]}
    return {**own, "stage": {**first["stage"], **own["stage"], "model": model}}


def hand_over(before: Assembly, after: Assembly, diagnoses: Diagnoses, states: Mapping[int, Any], batches: int) -> None:
    """Continue with new stages of another method from the states of drained ones. The weights, the optimizer, the
    schedule, the random streams and all counters continue; the memory of correctors and the measured staleness, which
    belong to a method, start anew, and so do options that the optimizer was made with for the delay of a method."""
    for old, new in zip(before.workers, after.workers, strict=True):
        new.marks = old.marks
        with after.engine.stage_context():
            new.loss = None if old.loss is None else old.loss.clone()  # a recorded stage has it in its own memory
    trees = {
        k: {**tree, "stage": stage_state.of_another_method(tree["stage"], before.stages[k], after.stages[k])}
        for k, tree in states.items()
    }
    for worker in after.workers:
        _load(worker, lambda stage: trees[stage.k], diagnoses, batches, after)


def merge(parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The whole model of a checkpoint by parameter name, with the state of optimizers and correctors. Without heads,
    whose names are the same in several stages."""
    merged: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "corrections": {}}
    for part in parts:
        for kind, values in merged.items():
            values.update({name: value for name, value in part[kind].items() if name in part["model"]})
    return merged


def updates_after(parts: list[dict[str, Any]], batches: int, *, saved_M: int | None, M: int) -> int:
    """Updates from which a schedule continues: those that were made, or with another M as many as it makes on these
    batches. A drain may have ended windows early."""
    return max(part["counters"]["update_index"] for part in parts) if saved_M == M else batches // M


def late_updates_after(parts: list[dict[str, Any]], updates: int) -> int:
    """How many of the updates from which a schedule continues had late gradients; in older files all of them, if any
    gradient was late."""
    counters = [part["counters"] for part in parts]
    made = max(each["update_index"] for each in counters)
    all_late = made if any(level > 0 for part in parts for level, _ in part["staleness"]) else 0
    late = max(each.get("late_updates", all_late) for each in counters)
    return late * updates // made if made else 0


def lost_batches(parts: list[dict[str, Any]], replicas: int) -> list[str]:
    """A note on the batches in flight, if there are any, which another pipeline cannot continue; parts: the stages of
    one replica, of which the others have had as many batches."""
    lost = sorted({entry["t"] for part in parts for entry in part["in_flight"]})
    if not lost:
        return []
    each = f" of each of {replicas} replicas" if replicas > 1 else ""
    if len(lost) == 1:
        return [f"batch {lost[0]}{each}, which was in flight, is lost by the change"]
    return [f"{len(lost)} batches{each} that were in flight ({lost[0]} to {lost[-1]}) are lost by the change"]


def _copied(tree: Any) -> Any:
    """The tree with tensors of its own; what was one tensor in several places stays one."""
    made: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda one: made.setdefault(id(one), one.detach().clone()), tree)


def _check_place(stage: Stage, tree: Mapping[str, Any], batches: int) -> None:
    """Refuse a state that was not saved after that many batches, or with another number of batches in flight than the
    method has there."""
    begun, entered = tree["worker"]["entered"] or (batches, batches)  # empty right after a drain
    if entered != batches:
        raise UserError(f"batches={batches}, but this state was saved after {entered} batches: give that")
    held, resting = len(tree["stage"]["in_flight"]), stage.method.resting(stage.k, stage.K, entered - begun)
    if not stage.method.order and held != resting:
        raise UserError(
            f"a state of stage {stage.k} with {held} batches in flight, where {stage.method.name} has "
            f"{resting}: load what the same method saved, or drain() before saving"
        )
