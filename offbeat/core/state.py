"""The whole state of a stage as a tree of tensors and plain values, and back.

Graphs cannot be written down. A batch in flight is kept as what made its graph: its input, the weights of its forward
and the random state before it; loading repeats the forward, which leaves BatchNorm's statistics alone. Stash has those
weights anyway; hybrid does not, and keeps copies of them from `stage.keep()` on until they are saved. A stage that
recomputes saves the same, and leaves the repeated forward to the backward: a state fits with and without `recompute`.

Parameters, gradients and optimizer state go by their names in the unsplit model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.in_flight import InFlight
from offbeat.core.optimization import options_of
from offbeat.core.stage import Stage
from offbeat.core.stage_network import differentiable
from offbeat.core.weights import Version
from offbeat.errors import UserError

Tree = dict[str, Any]
KINDS = {"momentum", "betas", "alpha", "rho", "lr_decay", "etas", "hidden"}  # options by which optimizers differ
IMPLEMENTATION = ("capturable", "differentiable", "foreach", "fused")  # options that belong to the device
CORRECTION = ("compensation", "keep_direction")  # options that correctors set


def save(stage: Stage) -> Tree:
    """Everything that the rest of training depends on, of a stage whose launcher is settled.

    The tensors are the stage's own: write them before the next batch.
    """
    if stage.weights.forgets and any(batch.kept is None for batch in stage.in_flight.values()):
        raise UserError(
            f"stage {stage.k} has not kept the weights of its batches in flight: call keep() "
            f"{stage.method.lag(stage.k, stage.K) + 1} batches before saving, or drain() first"
        )
    versions: list[Version] = []
    in_flight = [_save_batch(stage, t, batch, versions) for t, batch in stage.in_flight.items()]
    policy = stage.weights.save(versions)
    feedback, optimization, network = stage.feedback, stage.optimization, stage.network
    return {
        "k": stage.k,
        "K": stage.K,
        "model": dict(tensors(stage)),
        "head": None if feedback.head is None else dict(feedback.head.state_dict()),
        "teacher": None if feedback.teacher is None else feedback.teacher.state_dict(),
        **optimizer_state(stage),
        "scheduler": optimization.scheduler.state_dict() if optimization.scheduler else None,
        "corrections": {
            name: dict(optimization.corrections.place.memory.get(p, {})) for name, p in stage.parameters.items()
        },
        "random": network.random.state,
        "evaluation_random": network.evaluation_random.state,
        "window": {
            "levels": list(stage.window.levels),
            "batches": list(stage.window.batches),
            "weights": list(stage.window.weights),
            "gradients": stage.window.gradients(),
        },
        "bad": sorted(stage.guard.not_finite),
        "versions": [version.tensors for version in versions],
        "policy": policy,
        "in_flight": in_flight,
        "lessons": [[t, h, target] for t, (h, target) in feedback.lessons.items()],
        "counters": _counters(stage),
        "staleness": [[level, count] for level, count in stage.staleness.items()],
        "meter": {"samples": stage.figures.meter.samples, "sums": dict(stage.figures.meter.sums)},
    }


def _counters(stage: Stage) -> dict[str, int | None]:
    figures = stage.figures
    return {
        "update_index": stage.update_index,
        "late_updates": stage.late_updates,
        "samples": figures.samples,
        "last_batch": figures.last_batch,
        "backwards": figures.backwards,
        "most_held": figures.most_held,
        "held_bytes": stage.network.batch_bytes,
        **({"graph_bytes": stage.network.graph_bytes} if stage.weights.replays else {}),
        "skipped": stage.guard.skipped,
        "full_batch": stage.batch_weights.full_batch,
    }


def tensors(stage: Stage) -> dict[str, Tensor]:
    """Parameters (also frozen ones) and buffers, by name."""
    return {**dict(stage.network.module.named_parameters()), **dict(stage.network.module.named_buffers())}


def optimizer_state(stage: Stage) -> Tree:
    """The per-parameter state and the groups of the optimizer, by names."""
    optimizer = stage.optimization.optimizer
    if optimizer is None:
        return {"optimizer": {}, "groups": []}
    names = {id(parameter): name for name, parameter in stage.parameters.items()}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if values}
    groups = [
        {**options_of(group), "names": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return {"optimizer": state, "groups": groups}


def _save_batch(stage: Stage, t: int, batch: InFlight, versions: list[Version]) -> Tree:
    used = Version(None) if stage.weights.replays_on_current else batch.kept or batch.version
    if used.tensors is not None and used not in versions:
        versions.append(used)
    marked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in batch.inputs]
    return {
        "t": t,
        "x": pytree.tree_unflatten([_plain(leaf) for leaf in batch.inputs], batch.structure),
        **({} if marked == _usually_required(stage, batch.inputs) else {"requires_grad": marked}),
        "target": batch.target,
        "version": versions.index(used) if used.tensors is not None else None,
        "update": batch.update,
        "steady": batch.steady,
        "random": batch.random,
        "share": batch.share,
        "weight": batch.weight,
        **({"buffers": dict(batch.buffers)} if batch.buffers else {}),
    }


def _usually_required(stage: Stage, inputs: list[Any]) -> list[bool]:
    """Which inputs require gradients where a file does not state it: all that can, if the stage below gets any."""
    return [stage.network.sends_gradients and differentiable(leaf) for leaf in inputs]


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def load(stage: Stage, tree: Tree) -> None:
    """Put a stage of the same k, K, method and cuts into the state that was saved."""
    load_model(stage, tree["model"], tree["optimizer"], tree["corrections"])
    load_head(stage, tree)
    _load_groups(stage, tree["groups"])
    network = stage.network
    if stage.optimization.scheduler:
        stage.optimization.scheduler.load_state_dict(tree["scheduler"])
    network.random.state = list(tree["random"])
    network.evaluation_random.state = list(tree["evaluation_random"])
    _load_counters(stage, tree)
    stage.feedback.lessons = {t: (network.to_device(h), network.to_device(target)) for t, h, target in tree["lessons"]}
    window = tree["window"]
    stage.window.load(list(window["levels"]), list(window["batches"]), window["gradients"], window.get("weights"))
    stage.guard.not_finite = set(tree["bad"])
    versions = [
        Version({name: tensor.to(network.device).requires_grad_() for name, tensor in tensors.items()})
        for tensors in tree["versions"]
    ]
    stage.weights.load(tree["policy"], versions)
    for t in list(stage.in_flight):
        stage.leave(t)
    for entry in tree["in_flight"]:
        batch = stage.in_flight[entry["t"]] = _load_batch(stage, entry, versions)
        batch.version.batches += 1


def of_another_method(tree: Tree, before: Stage, stage: Stage) -> Tree:
    """The state of a drained stage, for a new stage of another method at the same place.

    Options and schedule of the optimizer continue, unless it was made with other options for this method: then it has
    those, at the same update of its schedule.
    """
    assert not tree["in_flight"], "only a drained stage can change its method"
    same = before.optimization.made == stage.optimization.made
    return {
        **tree,
        **({} if same else _own_options(stage, tree["counters"]["update_index"])),
        "corrections": {},
        "versions": [],
        "policy": stage.weights.save([]),
        "counters": {**tree["counters"], "backwards": 0},  # the first backward of a method is checked
        "staleness": [],
    }


def _own_options(stage: Stage, updates: int) -> Tree:
    """The options and the schedule of a new stage, after that many updates."""
    stage.advance_schedule(updates)
    rates, groups = stage.optimization.learning_rates(), optimizer_state(stage)["groups"]
    scheduler = stage.optimization.scheduler
    return {
        "groups": [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)],
        "scheduler": scheduler.state_dict() if scheduler else None,
    }


def _load_counters(stage: Stage, tree: Tree) -> None:
    saved = {**_counters(stage), **tree["counters"]}  # older files lack some
    all_late = saved["update_index"] if stage.late else 0
    figures, meter = stage.figures, stage.figures.meter
    stage.update_index, stage.late_updates = saved["update_index"], tree["counters"].get("late_updates", all_late)
    figures.samples, figures.last_batch = saved["samples"], saved["last_batch"]
    figures.backwards, figures.most_held = saved["backwards"], saved["most_held"]
    if ("graph_bytes" in tree["counters"]) == stage.weights.replays:  # else they are measured again
        stage.network.batch_bytes, stage.network.graph_bytes = saved["held_bytes"], saved.get("graph_bytes")
    stage.guard.skipped = saved["skipped"]
    stage.batch_weights.full_batch = saved["full_batch"]
    stage.staleness.clear()
    stage.staleness.update(dict(tree["staleness"]))
    meter.samples, meter.sums = tree["meter"]["samples"], dict(tree["meter"]["sums"])


def load_model(
    stage: Stage, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], corrections: Mapping[str, Any]
) -> None:
    """Parameters, buffers and per-parameter state of the stage's part of the model by name, from one stage or from all
    of another cut."""
    stage.launcher.reset()
    own = tensors(stage)
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in model or model[name].shape != tensor.shape:
                there = f"of shape {list(model[name].shape)}" if name in model else "not there"
                raise UserError(f"{name} of shape {list(tensor.shape)} is {there} in the checkpoint: use its model")
            tensor.copy_(model[name])
    if stage.optimization.optimizer is not None:
        stage.optimization.optimizer.state.clear()  # a parameter without state in the checkpoint has none yet
    stage.optimization.corrections.place.memory.clear()
    _load_state(stage, [name for name in stage.parameters if name in own], optimizer, corrections)


def load_head(stage: Stage, tree: Tree | None) -> None:
    """The auxiliary head of a stage that ended where this one does, with its optimizer's state; None: it stays new."""
    feedback = stage.feedback
    if feedback.head is None or tree is None:
        return
    feedback.head.load_state_dict(tree["head"])
    if feedback.teacher is not None:
        feedback.teacher.load_state_dict(_as_torch(tree["teacher"]))
    own = tensors(stage)
    _load_state(stage, [name for name in stage.parameters if name not in own], tree["optimizer"], tree["corrections"])


def _load_state(stage: Stage, names: list[str], optimizer: Mapping[str, Any], corrections: Mapping[str, Any]) -> None:
    """What the optimizer and the correctors remember of these parameters, in new tensors: several replicas of one
    process may load the same."""
    made, memory = stage.optimization.optimizer, stage.optimization.corrections.place.memory
    on_device = _counting_on_device(made)
    for name in names:
        parameter = stage.parameters[name]
        if made is not None and name in optimizer:
            counts_there = parameter in on_device
            made.state[parameter] = {
                key: value.to(parameter.device if value.dim() or counts_there else value.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in optimizer[name].items()
            }
        for key, value in corrections.get(name, {}).items():
            memory[parameter][key] = value.to(parameter.device, copy=True)


def _counting_on_device(optimizer: torch.optim.Optimizer | None) -> set[Tensor]:
    """The parameters whose steps the optimizer counts on their device, as torch's optimizers do with these options."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {p for group in groups if group.get("capturable") or group.get("fused") for p in group["params"]}


def _load_groups(stage: Stage, groups: list[Tree]) -> None:
    optimizer = stage.optimization.optimizer
    if optimizer is None:
        return
    _check_groups(stage, optimizer, groups)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for option, value in saved.items():
            if isinstance(group.get(option), Tensor) and not isinstance(value, Tensor):
                group[option].fill_(value)
            elif option not in ("names", *IMPLEMENTATION, *CORRECTION):
                group[option] = value


def check_kind(optimizer: torch.optim.Optimizer, groups: list[Tree]) -> None:
    """Raise UserError if the groups were saved by another kind of optimizer."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        if KINDS & group.keys() != KINDS & saved.keys():
            theirs = ", ".join(sorted(KINDS & saved.keys())) or "other options"
            kind = type(optimizer).__name__
            raise UserError(f"this state is of another optimizer than {kind}, with {theirs}: make the same one")


def _check_groups(stage: Stage, optimizer: torch.optim.Optimizer, groups: list[Tree]) -> None:
    """Raise UserError unless the parameter groups were saved by the same kind of optimizer."""
    check_kind(optimizer, groups)
    kind = type(optimizer).__name__
    names = {id(parameter): name for name, parameter in stage.parameters.items()}
    own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if own != [list(saved["names"]) for saved in groups]:
        raise UserError(f"this state has other parameter groups than this {kind}: make the same ones")


def _load_batch(stage: Stage, entry: Tree, versions: list[Version]) -> InFlight:
    """The batch, with its graph computed again."""
    forwarded = versions[entry["version"]] if entry["version"] is not None else Version(None)
    network = stage.network
    leaves, structure = pytree.tree_flatten(network.to_device(entry["x"]))  # already in the type of the stage
    wanted = entry.get("requires_grad", _usually_required(stage, leaves))
    batch = InFlight(
        [leaf.requires_grad_() if marked else leaf for leaf, marked in zip(leaves, wanted, strict=True)],
        structure,
        network.to_device(entry["target"]),
        forwarded,
        entry["update"],
        entry["steady"],
        list(entry["random"]),
        entry["share"],
        forwarded if stage.weights.forgets else None,
        weight=entry.get("weight", 1.0),
        buffers=network.to_device(entry.get("buffers", {})),
    )
    if stage.weights.replays:
        return batch
    with stage.weights.again(forwarded) as version:
        batch.version = version
        with network.random.drawing(replay=batch.random):
            batch.roots = network.roots(network.repeat(entry["t"], batch, version))
    return batch


def _as_torch(saved: Tree) -> Tree:
    """An optimizer's state_dict, whose keys are the indices of parameters."""
    return {
        "state": {int(number): values for number, values in saved["state"].items()},
        "param_groups": saved["param_groups"],
    }
