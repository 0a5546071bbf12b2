"""What a page shows of runs, of a comparison and of a reproduction: each a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from offbeat.errors import first_line
from offbeat.report import comparison as compared
from offbeat.report import overview
from offbeat.report import reproduction as reproduced
from offbeat.report.formatting import counted
from offbeat.report.read import INCOMPLETE, RunRecord, mapping, mappings, read_json, read_run
from offbeat.report.sections import Block, ReportPart, Section, facts, figures, missing, notes, slug, table
from offbeat.report.stages import stage_sections
from offbeat.runs import tables as recipes

MOST_RUNS = 12  # whose stages are shown one by one: a reproduction has hundreds


def _what_was_run(
    head: Block, runs: Iterable[tuple[str, RunRecord]], *more: Block, problems: Iterable[str] = ()
) -> Section:
    """The first section: headline figures, problems of the study and of its runs, and where they come from."""
    section = Section("What was run").add(head, *(missing(problem, warn=True) for problem in problems))
    for label, run in runs:
        where = f"{label}: " if label else ""
        failed = [f"{run.state}: {run.reason}"] if run.reason else []
        section.add(*(missing(where + text, warn=True) for text in (*failed, *run.problems)))
    return section.add(*more)


def runs(folders: Sequence[Path]) -> ReportPart:
    """Several runs, or one."""
    read = [read_run(folder) for folder in folders]
    if len(read) == 1:
        return _run(read[0])
    groups = overview.grouped(read)
    labelled = [(label, run) for label, group in groups.items() for run in group]
    commands = {
        f"{label}: {run.path.name}": " ".join(map(str, run.provenance["command"]))
        for label, run in labelled
        if isinstance(run.provenance.get("command"), list)
    }
    common = {
        key: value
        for key, value in read[0].provenance.items()
        if key != "command" and all(run.provenance.get(key) == value for run in read)
    }
    named = [(f"{label} ({run.path.name})", run) for label, run in labelled]
    made = facts(commands, code=list(commands)), overview.ran(common)
    first = _what_was_run(overview.headlines(groups), named, *made)
    sections = [first, overview.curves(groups, "runs"), overview.results(groups), *_each(groups)]
    return ReportPart(f"{counted(len(read), 'run')}: {_what(read)}", "Runs", sections)


def _run(run: RunRecord) -> ReportPart:
    recipe = run.recipe
    title = run.path.name
    if recipe:
        replicas = f", replicas={recipe.replicas}" if recipe.replicas > 1 else ""
        title = f"{recipe.model} on {recipe.data}, {recipe.method}, K={recipe.K}{replicas}, M={recipe.M}"
    first = _what_was_run(overview.headline(run), [("", run)], overview.ran(run.provenance, recipe))
    groups = {overview.labels([run])[0]: [run]}
    sections = [first, overview.curves(groups, "run"), overview.results(groups), *stage_sections(run, "run")]
    return ReportPart(title, "Run", sections)


def _what(runs: Iterable[RunRecord]) -> str:
    """Networks and data, as far as there are few."""
    found = dict.fromkeys(f"{run.recipe.model} on {run.recipe.data}" for run in runs if run.recipe)
    return ", ".join(found) if 0 < len(found) <= 2 else "several networks" if found else "recipes unknown"


def _each(groups: overview.Groups) -> list[Section]:
    """The stages of one run of every group, the first that is finished; folded, to keep the page short."""
    holder = Section("The stages of each", "One run of each setting, the first that is finished.")
    for place, (label, group) in enumerate(groups.items()):
        if place == MOST_RUNS:
            more = len(groups) - MOST_RUNS
            holder.add(missing(f"{more} more are not shown: give the folder of a run to see its stages"))
            break
        run = next((run for run in group if run.state == "finished"), group[0])
        if run.recipe is None and run.staleness is None:
            continue
        name = f"{label}, seed {run.recipe.seed}" if run.recipe and len(group) > 1 else label
        holder.below.append(Section(name, below=stage_sections(run, slug(label)), fold=not holder.below))
    return [holder] if holder.below or holder.blocks else []


def comparison(folder: Path, name: str) -> ReportPart:
    """The table, curves and stages of `offbeat compare`."""
    problems: list[str] = []
    content = mapping(read_json(folder / "config.json", problems))
    groups: dict[str, list[RunRecord]] = {}
    for entry in mappings(mapping(content.get("comparison")).get("runs")):
        if isinstance(entry.get("folder"), str) and (folder / entry["folder"]).is_dir():
            groups.setdefault(str(entry.get("label")), []).append(read_run(folder / entry["folder"]))
    try:
        found = compared.read(folder)
    except INCOMPLETE as error:
        problems.append(f"the comparison's table cannot be made ({first_line(error)}): its runs are shown as they are")
        errors = overview.results(groups)
        title = folder.name
    else:
        title = found.title
        title_of_results = overview.results_title([found.learning_task])
        errors = Section(title_of_results, "Median over the seeds, with the lowest and the highest.")
        errors.add(table(compared.filled(found)), notes(found.notes))
    named = [(f"{label}, {run.path.name}", run) for label, group in groups.items() for run in group]
    made = overview.ran(mapping(content.get("provenance")))
    first = _what_was_run(overview.headlines(groups), named, made, problems=problems)
    return ReportPart(title, "Comparison", [first, overview.curves(groups, name), errors, *_each(groups)])


def reproduction(folder: Path, name: str) -> ReportPart:
    """The table, curves and stages of `offbeat reproduce`."""
    problems: list[str] = []
    content = read_json(folder / "reproduction.json", problems) or {}
    title = folder.name
    provenance = (mappings(mapping(content).get("invocations")) or [{}])[-1]
    paths = sorted((folder / "runs").glob("*-seed[0-9]*"))
    groups: dict[str, list[RunRecord]] = {}
    for path in paths:
        groups.setdefault(path.name.rpartition("-seed")[0], []).append(read_run(path))
    try:
        known = recipes.TABLES[content["table"]]
        made = {row.name: row.recipe(**content["settings"]) for row in known.rows if row.name in groups}
        images = content.get("images") and recipes.Images(**content["images"])
        found = reproduced.read(folder, known, made, {}, content["settings"], provenance, images)
    except INCOMPLETE as error:
        why = first_line(error)
        problems.append(f"the paper's table cannot be shown beside the runs ({why}): they are shown as they are")
        results = overview.results(groups)
        head = overview.headlines(groups)
    else:
        title = found.title
        groups = {row.name: groups[row.name] for row in found.rows if row.name in groups}
        head = _reproduced(found)
        results = Section(*_RESULTS[found.learning_task.name])
        lines = zip(reproduced.lines_of(found), found.rows, strict=True)
        if rows := [{**line, "setting": row.setting} for line, row in lines]:
            results.add(table(rows, names=("state", "setting")))
        results.add(notes(found.notes))
    broken = [(run.path.name, run) for group in groups.values() for run in group if run.problems]
    first = _what_was_run(head, broken, overview.ran(provenance), problems=problems)
    return ReportPart(title, "Reproduction", [first, *_families(groups, name), results, *_each(groups)])


_RESULTS = {  # title and description of the table, by task
    "classification": (
        "Errors",
        "The paper's test error beside ours: median over the seeds, lowest, highest, how many, and ours minus the "
        "paper's.",
    ),
    "language": (
        "Validation loss",
        "In nats per token, lower is better: median over the seeds, lowest, highest, how many, and the difference to "
        "BP with the same optimizer and stages.",
    ),
}


def _reproduced(found: reproduced.Reproduction) -> Block:
    done, total = found.count("done"), sum(len(row.runs) for row in found.rows)
    off = [row.difference for row in found.rows if row.difference is not None]
    known = sum(row.error is not None for row in found.rows)
    shown = [("runs", f"{done} of {total}", "done"), ("rows", f"{known} of {len(found.rows)}", "have a result")]
    loss = found.learning_task.name == "language"
    what, unit, digits = ("late minus BP", "nats per token", 3) if loss else ("ours minus paper", "% error", 2)
    if off:
        shown.append((what, f"{median(off):+.{digits}f}", f"{unit}, median of {counted(len(off), 'row')}"))
        shown.append(("range", f"{min(off):+.{digits}f} to {max(off):+.{digits}f}", "lowest and highest row"))
    return figures(shown)


def _families(groups: dict[str, list[RunRecord]], name: str) -> list[Section]:
    """Learning curves, a section for each network: a table has more rows than a picture can hold."""
    families: dict[str, dict[str, list[RunRecord]]] = {}
    for label, group in groups.items():
        families.setdefault(label.partition("-")[0], {})[label] = group
    made = []
    for family, members in families.items():
        section = overview.curves(members, f"{name}-{slug(family)}")
        section.title += f": {family}" if len(families) > 1 else ""
        made.append(section)
    return made
