"""Several runs together: what was run, headline figures, learning curves, the table of results.

Runs of different tasks, such as images and text, have figures, curves and tables of their own: their metrics differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from offbeat.report import figures as charts
from offbeat.report.charts import Line
from offbeat.report.formatting import counted, duration, size
from offbeat.report.read import RunRecord
from offbeat.report.sections import Block, Drawing, Section, facts, figures, missing, table
from offbeat.report.sections import charts as drawings
from offbeat.runs.optimizers import described
from offbeat.runs.recipe import Recipe
from offbeat.runs.task import CLASSIFICATION, TASKS, LearningTask

Groups = Mapping[str, Sequence[RunRecord]]  # the runs of one setting, over its seeds, by their label


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run: its method, K and M, its network where there are several, and those settings in which
    it differs from the others."""
    known = [run.recipe for run in runs if run.recipe is not None]
    several = len({recipe.model for recipe in known}) > 1
    made = {}
    for recipe in known:
        accumulated = f" M={recipe.M}" if recipe.M > 1 else ""
        replicas = f" replicas={recipe.replicas}" if recipe.replicas > 1 else ""
        network = f" {recipe.model}" if several else ""
        made[_key(recipe)] = f"{recipe.method} K={recipe.K}{replicas}{accumulated}{network}"
    for name in DISTINGUISHING:
        values = {_key(recipe): getattr(recipe, name) for recipe in known}
        before = dict(made)
        for key, label in before.items():
            alike = {values[other] for other in before if before[other] == label}
            if len(alike) > 1 and values[key] is not None:
                made[key] = f"{label} {name.removesuffix('_per_stage').replace('_', '-')}={values[key]}"
    return [made[_key(run.recipe)] if run.recipe is not None else run.path.name for run in runs]


MOST_POINTS = 1200  # of a chart of curves: four lines of 300 epochs
# settings by which runs of a method are told apart, and those that change no result
DISTINGUISHING = (
    "data",
    "batch_size",
    "weights",
    "window",
    "corrector",
    "staleness_warmup",
    "engine",
    "optimizer",
    "lr",
    "epochs",
    "cuts",
    "precision",
    "messages",
    "threads_per_stage",
)
WITHOUT_EFFECT = ("seed", "data_workers", "trace", "diagnose", "checkpoint_every", "checkpoint_mode", "keep")


def _key(recipe: Recipe) -> str:
    """Equal for recipes that differ only in their seed, or in settings that change no result."""
    return str({name: value for name, value in recipe.as_dict().items() if name not in WITHOUT_EFFECT})


def grouped(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ only in their seed, together; others with the same label get their folder's name as well."""
    groups: dict[str, list[RunRecord]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        same = groups.get(label)
        if same and not _seeds_alone(same[0].recipe, run.recipe):
            label = f"{label} ({run.path.name})"
        groups.setdefault(label, []).append(run)
    return groups


def _seeds_alone(one: Recipe | None, other: Recipe | None) -> bool:
    return one is not None and other is not None and one.seed != other.seed and _key(one) == _key(other)


# ---- what was run


def ran(provenance: Mapping[str, Any], recipe: Recipe | None = None, *, more: Mapping[str, str] | None = None) -> Block:
    """Recipe, command, commit and hardware, as recorded."""
    shown: dict[str, str] = {}
    command = provenance.get("command")
    if isinstance(command, list):
        shown["command"] = " ".join(map(str, command))
    if recipe is not None:
        epochs, threads = counted(recipe.epochs, "epoch"), counted(recipe.threads_per_stage, "thread")
        title, corrector = recipe.make_method().title or recipe.method, f", corrector {recipe.corrector}"
        shown["network and data"] = f"{recipe.model} on {recipe.data}, {epochs}, seed {recipe.seed}"
        stages = f"K={recipe.K} stages{f' in {recipe.replicas} replicas' if recipe.replicas > 1 else ''}"
        shown["method"] = f"{title}: {stages}, M={recipe.M}, weights {recipe.weights}"
        shown["method"] += corrector if recipe.corrector else ""
        if recipe.staleness_warmup:
            shown["method"] += f", staleness warm-up {recipe.staleness_warmup}"
        shown["optimizer"] = (
            f"{described(recipe)}, batch {recipe.batch_size}, {recipe.samples_per_update} samples per update"
        )
        shown["optimizer"] += f", warm-up {recipe.warmup:g} epochs"
        shown["optimizer"] += f", then a cosine to {100 * recipe.floor:g} %" if recipe.floor is not None else ""
        compiled = ", compiled" * recipe.compile + ", fused" * recipe.fuse
        shown["run by"] = f"engine {recipe.engine}, {recipe.device}, {recipe.precision}{compiled}, {threads} per stage"
    shown.update(more or {})
    for name, key in (("machine", "machine"), ("started", "started"), ("commit", "commit")):
        if provenance.get(key):
            shown[name] = str(provenance[key])
    versions = provenance.get("versions")
    if isinstance(versions, dict):
        shown["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return facts(shown, code=("command", "commit")) if shown else missing("not known: it is not in config.json")


# ---- headline figures


def headline(run: RunRecord) -> Block:
    """The figures of one run."""
    recipe, last = run.recipe, run.epochs[-1] if run.epochs else None
    total = f" of {recipe.epochs}" if recipe else ""
    shown = []
    task, metric = run.task, run.metric if run.metric is not None else last.test if last else None
    if metric is not None:
        best = run.best
        remark = f"lowest {task.shown(best.test, space=' ')} after epoch {best.number}" if best else ""
        so_far = "" if run.metric is not None else " so far"
        shown.append((f"{task.metric}{so_far}", task.shown(metric, space=" "), remark))
    shown.append(("state", run.state, f"{len(run.epochs)}{total} epochs"))
    if run.speed:
        shown.append((f"{task.unit} per second", f"{run.speed:,.0f}", "median epoch"))
    if run.seconds:
        remark = "evaluation included" if run.state == "finished" else "of training"
        shown.append(("time", duration(run.seconds), remark))
    if run.staleness:
        late, k = _largest(run.staleness)
        shown.append(("staleness", f"{late:.2f}", f"updates, stage {k}, the stalest"))
    if run.memory:
        most, k = _largest(run.memory)
        shown.append(("peak memory", size(most), f"stage {k}, the largest of {len(run.memory)}"))
    return figures(shown)


def _largest(of_stages: Sequence[float]) -> tuple[float, int]:
    """The largest value, and its stage."""
    return max(of_stages), of_stages.index(max(of_stages)) + 1


def headlines(groups: Groups) -> Block:
    """The figures of several: the best of them, and how many there are."""
    runs = [run for group in groups.values() for run in group]
    done = sum(run.state == "finished" for run in runs)
    shown = [("runs", f"{done} of {len(runs)}" if done < len(runs) else f"{done}", "finished")]
    for task, members in by_task(groups).items():
        metrics = _medians({label: [run.metric for run in group] for label, group in members.items()})
        speeds = _medians({label: [run.speed for run in group] for label, group in members.items()})
        if metrics:
            best, worst = min(metrics, key=metrics.__getitem__), max(metrics, key=metrics.__getitem__)
            shown.append((f"lowest {task.metric}", task.shown(metrics[best], space=" "), best))
            if len(metrics) > 1:
                shown.append((f"highest {task.metric}", task.shown(metrics[worst], space=" "), worst))
        if speeds:
            fastest = max(speeds, key=speeds.__getitem__)
            shown.append((f"most {task.unit} per second", f"{speeds[fastest]:,.0f}", fastest))
    return figures(shown)


def by_task(groups: Groups) -> dict[LearningTask, Groups]:
    """The groups of each task, of those that there are."""
    found = {
        task: {label: group for label, group in groups.items() if group and group[0].task is task} for task in TASKS
    }
    return {task: members for task, members in found.items() if members}


def _medians(values: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    known = {label: [value for value in given if value is not None] for label, given in values.items()}
    return {label: median(there) for label, there in known.items() if there}


# ---- curves and errors


def curves(groups: Groups, name: str) -> Section:
    """The metric of each task by epoch and by time of training (the paper's Fig. 3)."""
    several = any(len(group) > 1 for group in groups.values())
    band = "; a line is the median of a setting's seeds, its band their range" if several else ""
    tasks = by_task(groups)
    metrics = " or ".join(task.metric for task in tasks)
    section = Section("Learning curves", f"{metrics[:1].upper()}{metrics[1:]} after each epoch{band}.")
    for task, members in tasks.items():
        drawn = _curves(task, members, name if len(tasks) == 1 else f"{name}-{task.name}")
        if drawn is not None:
            section.add(drawn)
    return section if section.blocks else section.add(missing("no epoch is complete in any run yet"))


def _curves(task: LearningTask, groups: Groups, name: str) -> Block | None:
    """The charts of runs of one task; None where no epoch is complete."""
    trained = {label: [run for run in group if run.epochs] for label, group in groups.items()}
    curves_of = {label: [run.curve for run in group] for label, group in trained.items() if group}
    if not curves_of:
        return None
    times = {label: [run.times for run in trained[label]] for label in curves_of}
    by_epoch, by_time = (charts.curve_lines(curves_of, given, task=task) for given in (None, times))
    alone = len(groups) == 1 and len(next(iter(groups.values()))) == 1
    if alone:
        (run,) = next(iter(trained.values()))
        train = [(float(epoch.number), epoch.training) for epoch in run.epochs if epoch.training is not None]
        by_epoch = [replace(by_epoch[0], label="test")]
        by_time = [replace(by_time[0], label="test")]
        end = task.shown(train[-1][1], space=" ") if train else ""
        by_epoch += [Line("training", train, colour=7, dash=1, end=end)] if train else []
    across, unit = 1 if len(by_epoch) > 5 else 2, "minutes"
    if max(line.points[-1][0] for line in by_time) < 2:
        unit = "seconds"
        by_time = [replace(line, points=[(60 * at, value) for at, value in line.points]) for line in by_time]
    what = task.axis.removeprefix("test ") if alone else task.axis
    by_epoch, every = _thinned(by_epoch)
    by_time, _ = _thinned(by_time)
    caption = f"One epoch of {every} is drawn." if every > 1 else ""
    in_time = charts.curves(by_time, across=f"{unit} of training", what=task.axis)
    return drawings(
        Drawing(f"{name}-curves", "By epoch", charts.curves(by_epoch, what=what), caption, across),
        Drawing(f"{name}-curves-time", "By time", in_time, caption, across),
    )


def _thinned(drawn: Sequence[Line]) -> tuple[list[Line], int]:
    """The lines with every nth point, the last among them, so that a page of many runs stays small; and n."""
    every = -(-sum(len(line.points) for line in drawn) // MOST_POINTS)
    return [
        replace(line, points=line.points[::-1][::every][::-1], band=line.band[::-1][::every][::-1]) for line in drawn
    ], every


def results(groups: Groups) -> Section:
    """A row per run, in a table per task."""
    tasks = by_task(groups)
    metrics = " or ".join(task.metric for task in tasks)
    text = f"{metrics[:1].upper()}{metrics[1:]} at the last epoch, and the lowest of all epochs."
    section = Section(results_title(tasks), text)
    for task, members in tasks.items():
        section.add(_results(task, members))
    return section


def results_title(tasks: Collection[LearningTask]) -> str:
    """The heading of a table of results."""
    return "Results" if any(task is not CLASSIFICATION for task in tasks) else "Errors"


def _results(task: LearningTask, groups: Groups) -> Block:
    several = any(run.top5 is not None for group in groups.values() for run in group)
    columns: dict[str, Callable[[RunRecord], str]] = {
        task.heading: lambda run: _cell(run.metric, f".{task.digits}f"),
        "lowest %" if task.percent else "lowest": lambda run: _cell(
            run.best.test if run.best else None, f".{task.digits}f"
        ),
        "at epoch": lambda run: f"{run.best.number}" if run.best else "-",
        **({"top-5 %": lambda run: _cell(run.top5)} if several else {}),
        task.speed_unit: lambda run: _cell(run.speed, ",.0f"),
        "time": lambda run: duration(run.seconds) if run.seconds else "-",
        **{name: partial(_setting, field=field) for name, field in SETTINGS.items()},
        "state": lambda run: run.state,
    }
    return table(
        [
            {"run": label, **{name: cell(run) for name, cell in columns.items()}}
            for label, group in groups.items()
            for run in group
        ]
    )


SETTINGS = {"seed": "seed", "K": "K", "M": "M", "batch": "batch_size", "lr": "lr"}  # in a table of results


def _setting(run: RunRecord, *, field: str) -> str:
    value = getattr(run.recipe, field, "-")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"
