"""`offbeat compare`: several methods under one recipe, each in a run folder of its own, and one table of all.

    DIR/config.json              the request, the partition, and the complete recipe of every run
    DIR/METHOD-seedN/            a run like any other
    DIR/comparison.json, .md     the table
    DIR/curves.png, .svg         test error (of text: bits per byte) against the epoch

All runs share data order, initial weights, partition, threads and learning-rate rule. Finished runs are kept: the same
command continues where it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.errors import UserError, unknown
from offbeat.method import Method
from offbeat.methods import AUTO, parsed, settings_of, with_settings
from offbeat.report import draw_curves
from offbeat.report.comparison import Comparison, markdown, read, table
from offbeat.report.draw import draw_if_possible
from offbeat.runs import launch, lock, record
from offbeat.runs.launch import cores
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import Recipe, from_json, make_recipe
from offbeat.runs.train import file_name
from offbeat.settings import split_list
from offbeat.studies.runner import StudyRunner
from offbeat.studies.training import StudyRun, TrainingRuns, folder_name, is_done, print_table, shared_data

MATCHES = ("batch", "effective")
MOST_RUNS = 1000  # of a method, or at the same time
ASIDE = "unfinished"  # the folder of runs that were stopped


@dataclass(frozen=True)
class MethodSpec:
    """A method to compare, and settings that differ from its defaults, as in adl:M=2,corrector=sc."""

    label: str
    method: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> MethodSpec:
        """
        >>> MethodSpec.of("gpipe:m=8")
        MethodSpec(label='gpipe:m=8', method='gpipe', settings={'m': 8})
        """
        return cls(text, *parsed(text))


def compare(
    *,
    methods: str,
    match: str | None,
    seeds: int,
    M: int,
    chosen: dict[str, Any],
    out: Path | None,
    jobs: int,
    show: bool,
    together: int = 1,
) -> tuple[Comparison, Path]:
    """Run what is not finished yet, then read all records and write the table and the curves.

    match            "batch" or "effective"; None: batch, with `batch_per_update` effective
    jobs, together   runs at the same time: in processes of their own, or in turns in this one
    """
    specs = [MethodSpec.of(text) for text in split_list(methods)]
    per_update = chosen.get("batch_per_update")
    if per_update is not None and match == "batch":
        raise UserError(
            f"match={match!r} with batch_per_update={per_update}, which makes updates equal: leave out one of them"
        )
    match = match or ("batch" if per_update is None else "effective")
    _check(specs, match, seeds, M, jobs, together, chosen)
    K = chosen.get("K", 1)
    if "engine" not in chosen and chosen.get("device") != "cuda":
        chosen["engine"] = "simulate" if K == 1 or jobs > 1 or together > 1 else "processes"
    asked = {
        "methods": [spec.label for spec in specs],
        "match": match,
        "seeds": seeds,
        "M": M,
        "batch_size": 32 if per_update is None else None,
        "lr": None,
        **chosen,
    }
    recipes = {spec.label: recipe_of(spec, asked) for spec in specs}
    first = next(iter(recipes.values()))
    folder = out or Path("runs") / f"compare-{first.data}-{file_name(first.model)}-K{K}-M{M}"
    runner = StudyRunner(folder, show=show)
    with runner.opened(lambda: None):
        at_once = max(jobs, together)
        runs = _stored(runner, asked, at_once) or _created(runner, asked, at_once, recipes)
        todo = [run for run in runs if not finished(folder / run.name, run)]
        if len(todo) < len(runs):
            runner.report(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already")
        training = TrainingRuns(runner, folder, together)
        if jobs > 1:
            training.execute_jobs(todo, jobs)
        else:
            here = [run.recipe for run in todo if run.recipe.engine != "processes"]
            training.data_set = shared_data(here[0]) if here else None
            training.execute(todo)
        return written(runner), folder


def _check(
    specs: list[MethodSpec], match: str, seeds: int, M: int, jobs: int, together: int, chosen: Mapping[str, Any]
) -> None:
    if not specs:
        raise UserError("methods= names no method: give some, such as bp,adl")
    names = [folder_name(spec.label) for spec in specs]
    for spec, name in zip(specs, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{spec.label!r} is given twice in methods=: name each method once")
    if match not in MATCHES:
        raise unknown("match", match, MATCHES)
    for name, number in (
        ("seeds", seeds),
        ("M", M),
        ("jobs", jobs),
        ("together", together),
        ("K", chosen.get("K", 1)),
    ):
        if number < 1:
            raise UserError(f"{name}={number}: use a whole number from 1 up")
        if name in ("seeds", "jobs", "together") and number > MOST_RUNS:
            raise UserError(f"{name}={number}: use a whole number from 1 to {MOST_RUNS}")
    if jobs > 1 and together > 1:
        raise UserError(f"jobs={jobs} with together={together}: use one of the two")
    for name, number in (("jobs", jobs), ("together", together)):
        if number > 1 and chosen.get("engine") == "processes":
            raise UserError(
                f"{name}={number} with engine='processes': runs at the same time need an engine that keeps all "
                "stages in one process, such as engine='simulate'"
            )
    if launch.joined_group():
        raise UserError("compare under torchrun: it starts its own processes, run it without")


# ---- one recipe for all


def recipe_of(spec: MethodSpec, asked: Mapping[str, Any]) -> Recipe:
    """The recipe of a method under the comparison's rules, with its seed and cuts still open.

    M is for the methods whose gradients are late and that accumulate against it; others accumulate where their spec
    has an M. To match the effective batch a method takes b*M samples per update, in b*M / (its own M) per batch; or the
    samples per update that are given. Method auto chooses M for these samples.
    """
    settings = dict(spec.settings)
    given = {name: value for name, value in asked.items() if name not in ("methods", "match", "seeds", "M")}
    given |= {"threads_per_stage": asked.get("threads_per_stage") or max(1, cores() // asked.get("K", 1))}
    if spec.method == AUTO:
        samples = asked.get("batch_per_update") or asked["batch_size"] * asked["M"]
        given |= {"method": AUTO, "settings": settings, "batch_size": None, "batch_per_update": samples}
        return make_recipe(**given)
    if "M" not in settings and _takes_M(spec):
        settings["M"] = asked["M"]
    method = with_settings(spec.method, settings)
    b = asked["batch_size"]
    if asked["match"] == "effective" and asked.get("batch_per_update") is None:
        b, rest = divmod(b * asked["M"], method.M)
        if rest:
            raise UserError(
                f"{spec.label} with M = {method.M}: {asked['batch_size'] * asked['M']} samples per update "
                f"cannot be split into {method.M} equal batches, give another M= or batch_size="
            )
    method.check(1 if one_stage(method) else asked.get("K", 1))
    if one_stage(method):
        given |= {"K": 1, "engine": None, "cuts": None, "speeds": None, "partition": "flops"}
    return make_recipe(**{**given, "method": spec.method, "batch_size": b, "settings": settings})


def _takes_M(spec: MethodSpec) -> bool:  # noqa: N802
    lagging = with_settings(spec.method, spec.settings).lag(1, 2) > 0
    return lagging and "M" in settings_of(spec.method)


def one_stage(method: Method) -> bool:
    """Whether the method trains whole networks only: it takes one stage, and not even two."""
    return method.limit is not None and method.limit(1) is None and method.limit(2) is not None


def partitioned(recipes: Mapping[str, Recipe], asked: Mapping[str, Any]) -> dict[str, Recipe]:
    """The recipes with their cuts: one partition, decided here, for all that have several stages. It is decided on a
    batch of the size that is given, where not the samples per update are given."""
    from offbeat.runs.build import check

    b = asked["batch_size"]
    decided: dict[int, Recipe] = {}
    for label, recipe in recipes.items():
        if recipe.K not in decided:
            decided[recipe.K], known = check(recipe if b is None else replace(recipe, batch_size=b))
        if b is not None and known.samples < recipe.batch_size:
            raise UserError(
                f"{label} with match='effective': batches of {recipe.batch_size} samples, but an epoch has "
                f"{known.samples}, give a smaller batch_size= or M="
            )
        recipe.count(known.samples)
    return {
        label: replace(recipe, cuts=decided[recipe.K].cuts, units=decided[recipe.K].units)
        for label, recipe in recipes.items()
    }


# ---- the folder


def _created(runner: StudyRunner, asked: dict[str, Any], at_once: int, recipes: Mapping[str, Recipe]) -> list[StudyRun]:
    """A new comparison: its config.json holds the recipes of all runs."""
    record.check_free(runner.folder)
    launch.check_workers(recipes.values())
    recipes = partitioned(recipes, asked)
    runs = [
        StudyRun(label, seed, replace(recipe, seed=seed))
        for seed in range(asked["seeds"])
        for label, recipe in recipes.items()
    ]
    widest = max(recipes.values(), key=lambda recipe: recipe.K)
    described = [
        {"label": run.label, "seed": run.seed, "folder": run.name, "recipe": run.recipe.as_dict()} for run in runs
    ]
    partition = {"K": widest.K, "cuts": widest.cuts, "units": widest.units}
    comparison = {"asked": asked, "jobs": at_once, "partition": partition, "runs": described}
    runner.write("config.json", {"comparison": comparison, "provenance": provenance(device=widest.device)})
    return runs


def _stored(runner: StudyRunner, asked: dict[str, Any], at_once: int) -> list[StudyRun] | None:
    """The runs of the comparison in the folder, which must be the one asked for; None where there is none."""
    folder, path = runner.folder, runner.folder / "config.json"
    try:
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        there = content["comparison"]
        runs = [
            StudyRun(run["label"], run["seed"], make_recipe(**from_json(run["recipe"], path))) for run in there["runs"]
        ]
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(f"{folder} does not hold a comparison: give another folder as out=") from None
    here = json.loads(json.dumps(asked))
    for name in [*here, *there["asked"]]:
        if there["asked"].get(name) != here.get(name):
            raise UserError(
                f"{folder} holds another comparison ({name}: {_shown(there['asked'].get(name))} there, "
                f"{_shown(here.get(name))} here): give another folder as out="
            )
    if at_once > there["jobs"]:  # speeds are as good as those of the runs with the most others beside them
        there["jobs"] = at_once
        runner.write("config.json", content)
    return runs


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def finished(path: Path, run: StudyRun) -> bool:
    """Whether the run is done; a folder without a result is moved aside, and the run starts again."""
    if not path.exists():
        return False
    if is_done(path, run) and any(line["kind"] in ("result", "failed") for line in record.lines(path)):
        return True
    with lock.held(path):  # no other process uses it
        pass
    aside = path.parent / ASIDE
    aside.mkdir(exist_ok=True)
    count = 1
    while (aside / f"{path.name}-{count}").exists():
        count += 1
    path.rename(aside / f"{path.name}-{count}")
    return False


def written(runner: StudyRunner) -> Comparison:
    """The table and the curves of what the folder holds, also in files."""
    folder, comparison = runner.folder, read(runner.folder)
    runner.write("comparison.json", comparison.as_dict())
    runner.write("comparison.md", markdown(comparison))
    curves = {row.label: row.curves for row in comparison.rows}
    draw_if_possible(
        lambda path: draw_curves(curves, path, title=comparison.title, task=comparison.learning_task),
        folder / "curves.png",
        folder / "curves.svg",
    )
    return comparison


def show_comparison(comparison: Comparison, folder: Path) -> None:
    print_table(table(comparison), comparison.notes, folder)
