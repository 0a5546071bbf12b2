"""Several runs together: what was run, headline figures, learning curves, the table of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from offbeat.report import figures as charts
from offbeat.report.charts import Line
from offbeat.report.formatting import counted, duration, size
from offbeat.report.read import RunRecord
from offbeat.report.sections import Block, Drawing, Section, facts, figures, missing, table
from offbeat.report.sections import charts as drawings
from offbeat.runs.recipe import Recipe

Groups = Mapping[str, Sequence[RunRecord]]  # the runs of one setting, over its seeds, by their label


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run: its method, K and M, its network where there are several, and those settings in which
    it differs from the others."""
    known = [run.recipe for run in runs if run.recipe is not None]
    several = len({recipe.model for recipe in known}) > 1
    made = {}
    for recipe in known:
        accumulated = f" M={recipe.M}" if recipe.M > 1 else ""
        made[_key(recipe)] = f"{recipe.method} K={recipe.K}{accumulated}{f' {recipe.model}' if several else ''}"
    for name in MORE:
        values = {_key(recipe): getattr(recipe, name) for recipe in known}
        before = dict(made)
        for key, label in before.items():
            alike = {values[other] for other in before if before[other] == label}
            if len(alike) > 1 and values[key] is not None:
                made[key] = f"{label} {name.removesuffix('_per_stage').replace('_', '-')}={values[key]}"
    return [made[_key(run.recipe)] if run.recipe is not None else run.path.name for run in runs]


MOST_POINTS = 1200  # of a chart of curves: four lines of 300 epochs
MORE = (
    "data",
    "batch_size",
    "weights",
    "window",
    "corrector",
    "engine",
    "lr",
    "epochs",
    "cuts",
    "precision",
    "threads_per_stage",
)


BESIDE = (
    "seed",
    "data_workers",
    "trace",
    "diagnose",
    "checkpoint_every",
    "checkpoint_mode",
    "keep",
)  # that change no result


def _key(recipe: Recipe) -> str:
    """Equal for recipes that differ only in their seed, or in settings that change no result."""
    return str({name: value for name, value in recipe.as_dict().items() if name not in BESIDE})


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
        shown["method"] = f"{title}: K={recipe.K} stages, M={recipe.M}, weights {recipe.weights}"
        shown["method"] += corrector if recipe.corrector else ""
        shown["optimizer"] = (
            f"SGD, batch {recipe.batch_size}, lr {recipe.lr:g}, momentum {recipe.momentum:g}, weight decay "
            f"{recipe.weight_decay:g}, warm-up {recipe.warmup:g} epochs"
        )
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
    error = run.error if run.error is not None else last.test_error if last else None
    if error is not None:
        best = run.best
        remark = f"lowest {best.test_error:.2f} % after epoch {best.number}" if best else ""
        shown.append(("test error" if run.error is not None else "test error so far", f"{error:.2f} %", remark))
    shown.append(("state", run.state, f"{len(run.epochs)}{total} epochs"))
    if run.samples_per_second:
        shown.append(("samples per second", f"{run.samples_per_second:,.0f}", "median epoch"))
    if run.seconds:
        remark = "evaluation included" if run.state == "finished" else "of training"
        shown.append(("time", duration(run.seconds), remark))
    if run.staleness:
        stalest = max(range(len(run.staleness)), key=lambda here: run.staleness[here] if run.staleness else 0)
        shown.append(("staleness", f"{run.staleness[stalest]:.2f}", f"updates, stage {stalest + 1}, the stalest"))
    if run.memory:
        most = max(range(len(run.memory)), key=lambda here: run.memory[here] if run.memory else 0)
        shown.append(("peak memory", size(run.memory[most]), f"stage {most + 1}, the largest of {len(run.memory)}"))
    return figures(shown)


def headlines(groups: Groups) -> Block:
    """The figures of several: the best of them, and how many there are."""
    runs = [run for group in groups.values() for run in group]
    done = sum(run.state == "finished" for run in runs)
    shown = [("runs", f"{done} of {len(runs)}" if done < len(runs) else f"{done}", "finished")]
    errors = {
        label: middle
        for label, group in groups.items()
        if (middle := _middle([run.error for run in group])) is not None
    }
    speeds = {
        label: middle
        for label, group in groups.items()
        if (middle := _middle([run.samples_per_second for run in group]))
    }
    if errors:
        best = min(errors, key=lambda label: errors[label])
        shown.append(("lowest test error", f"{errors[best]:.2f} %", best))
    if len(errors) > 1:
        worst = max(errors, key=lambda label: errors[label])
        shown.append(("highest test error", f"{errors[worst]:.2f} %", worst))
    if speeds:
        fastest = max(speeds, key=lambda label: speeds[label])
        shown.append(("most samples per second", f"{speeds[fastest]:,.0f}", fastest))
    return figures(shown)


def _middle(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None


# ---- curves and errors


def curves(groups: Groups, name: str) -> Section:
    """Test error by epoch and by time of training (the paper's Fig. 3)."""
    several = any(len(group) > 1 for group in groups.values())
    band = "; a line is the median of a setting's seeds, its band their range" if several else ""
    section = Section("Learning curves", f"Test error after each epoch{band}.")
    trained = {label: [run for run in group if run.epochs] for label, group in groups.items()}
    errors_of = {label: [run.errors for run in group] for label, group in trained.items() if group}
    if not errors_of:
        return section.add(missing("no epoch is complete in any run yet"))
    times = {label: [run.times for run in trained[label]] for label in errors_of}
    by_epoch, by_time = (charts.curve_lines(errors_of, given) for given in (None, times))
    alone = len(groups) == 1 and not several
    if alone:
        (run,) = next(iter(trained.values()))
        train = [(float(epoch.number), epoch.train_error) for epoch in run.epochs if epoch.train_error is not None]
        by_epoch = [replace(by_epoch[0], label="test")]
        by_time = [replace(by_time[0], label="test")]
        by_epoch += [Line("training", train, colour=7, dash=1, end=f"{train[-1][1]:.2f} %")] if train else []
    across, unit = 1 if len(by_epoch) > 5 else 2, "minutes"
    if max(line.points[-1][0] for line in by_time) < 2:
        unit = "seconds"
        by_time = [replace(line, points=[(60 * at, value) for at, value in line.points]) for line in by_time]
    what = "error, %" if alone else "test error, %"
    by_epoch, every = _thinned(by_epoch)
    by_time, _ = _thinned(by_time)
    caption = f"One epoch of {every} is drawn." if every > 1 else ""
    return section.add(
        drawings(
            Drawing(f"{name}-curves", "By epoch", charts.curves(by_epoch, what=what), caption, across),
            Drawing(
                f"{name}-curves-time", "By time", charts.curves(by_time, across=f"{unit} of training"), caption, across
            ),
        )
    )


def _thinned(drawn: Sequence[Line]) -> tuple[list[Line], int]:
    """The lines with every nth point, the last among them, so that a page of many runs stays small; and n."""
    every = -(-sum(len(line.points) for line in drawn) // MOST_POINTS)
    return [
        replace(line, points=line.points[::-1][::every][::-1], band=line.band[::-1][::every][::-1]) for line in drawn
    ], every


def errors(groups: Groups) -> Section:
    """One row per run."""
    section = Section("Errors", "Test error at the last epoch, and the lowest of all epochs.")
    columns = [
        "run",
        "error %",
        "lowest %",
        "at epoch",
        "top-5 %",
        "samples/s",
        "time",
        "seed",
        "K",
        "M",
        "batch",
        "lr",
        "state",
    ]
    rows = []
    for label, group in groups.items():
        for run in group:
            recipe, best = run.recipe, run.best
            setting = (
                [f"{recipe.seed}", f"{recipe.K}", f"{recipe.M}", f"{recipe.batch_size}", f"{recipe.lr:g}"]
                if (recipe)
                else ["-"] * 5
            )
            rows.append(
                [
                    label,
                    _cell(run.error),
                    _cell(best.test_error if best else None),
                    f"{best.number}" if best else "-",
                    _cell(run.top5),
                    _cell(run.samples_per_second, ",.0f"),
                    duration(run.seconds) if run.seconds else "-",
                    *setting,
                    run.state,
                ]
            )
    return section.add(table(columns, rows))


def _cell(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"
