"""`offbeat report`: one HTML file about runs, comparisons, reproductions and benchmarks, that needs nothing else.

Every picture stands in it as SVG, drawn for large and for small screens; it follows the reader's light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import recipes, record
from offbeat.errors import UserError, first_line
from offbeat.report import benches, browser, comparison, look, overview, reproduction, scaled
from offbeat.report.folders import Run, kind_of, read_json, read_run
from offbeat.report.parts import WIDTHS, Section, facts, figures, missing, notes, rendered, slug, table
from offbeat.report.stages import stage_sections
from offbeat.report.svg import Canvas, Picture
from offbeat.report.words import counted

MOST_RUNS = 12  # whose stages are told one by one: a reproduction has hundreds


@dataclass(frozen=True)
class Part:
    """What a page says of one folder, or of several runs."""

    title: str
    kind: str
    sections: list[Section]


# ---- parts


def parts(folders: Sequence[Path]) -> list[Part]:
    """All runs together, and each other folder by itself."""
    kinds = [(folder, kind_of(folder)) for folder in folders]
    runs = [folder for folder, kind in kinds if kind == "run"]
    found = []
    for folder, kind in kinds:
        several = len([other for other, its in kinds if its == kind]) > 1
        name = slug(f"{folder.resolve().name}" if several else kind)
        if kind == "run":
            if folder == runs[0]:
                found.append(_runs(runs))
        elif kind == "comparison":
            found.append(_comparison(folder, name))
        elif kind == "reproduction":
            found.append(_reproduction(folder, name))
        else:
            title, sections = (benches.bench if kind == "bench" else scaled.scaling)(folder, name)
            found.append(Part(title, "Benchmark" if kind == "bench" else "Scaling study", sections))
    return found


def _problems(section: Section, runs: Iterable[tuple[str, Run]]) -> Section:
    """What is wrong with the runs, in lines of its own."""
    for label, run in runs:
        where = f"{label}: " if label else ""
        if run.reason:
            section.html(missing(f"{where}{run.state}: {run.reason}", warn=True))
        for problem in run.problems:
            section.html(missing(where + problem, warn=True))
    return section


def _runs(folders: Sequence[Path]) -> Part:
    read = [read_run(folder) for folder in dict.fromkeys(folders)]
    if len(read) == 1:
        return _run(read[0])
    groups = overview.grouped(read)
    first = Section("What was run").html(overview.headlines(groups))
    _problems(first, [(f"{label} ({run.path.name})", run) for label, group in groups.items() for run in group])
    commands = {f"{label}: {run.path.name}": " ".join(map(str, run.provenance["command"])) for label, group in
                groups.items() for run in group if isinstance(run.provenance.get("command"), list)}  # fmt: skip
    first.html(facts(commands, code=list(commands)))
    first.html(overview.ran({key: value for key, value in read[0].provenance.items() if key != "command" and all(
        run.provenance.get(key) == value for run in read)}))  # fmt: skip
    return Part(f"{counted(len(read), 'run')}: {_what(read)}", "Runs",
                [first, overview.curves(groups, "runs"), overview.errors(groups), *_each(groups)])  # fmt: skip


def _run(run: Run) -> Part:
    recipe = run.recipe
    title = f"{recipe.model} on {recipe.data}, {recipe.method}, K={recipe.K}, M={recipe.M}" if recipe else run.path.name
    first = _problems(Section("What was run").html(overview.headline(run)), [("", run)])
    first.html(overview.ran(run.provenance, recipe))
    groups = {overview.labels([run])[0]: [run]}
    return Part(title, "Run", [first, overview.curves(groups, "run"), overview.errors(groups),
                               *stage_sections(run, "run")])  # fmt: skip


def _what(runs: Iterable[Run]) -> str:
    """Networks and data, as far as there are few."""
    found = dict.fromkeys(f"{run.recipe.model} on {run.recipe.data}" for run in runs if run.recipe)
    return ", ".join(found) if 0 < len(found) <= 2 else "several networks" if found else "recipes unknown"


def _each(groups: overview.Groups) -> list[Section]:
    """The stages of one run of every group, the first that is finished; folded, or the page would have no end."""
    holder = Section("The stages of each", "One run of each setting, the first that is finished.")
    for place, (label, group) in enumerate(groups.items()):
        if place == MOST_RUNS:
            more = len(groups) - MOST_RUNS
            holder.html(missing(f"{more} more are not told here: give the folder of a run to see its stages"))
            break
        run = next((run for run in group if run.state == "finished"), group[0])
        if run.recipe is None and run.staleness is None:
            continue
        name = f"{label}, seed {run.recipe.seed}" if run.recipe and len(group) > 1 else label
        holder.below.append(Section(name, below=stage_sections(run, slug(label)), fold=not holder.below))
    return [holder] if holder.below or holder.blocks else []


def _comparison(folder: Path, name: str) -> Part:
    problems: list[str] = []
    content = read_json(folder / "config.json", problems) or {}
    groups: dict[str, list[Run]] = {}
    for entry in _dicts(_at(content, "comparison", "runs")):
        if isinstance(entry.get("folder"), str) and (folder / entry["folder"]).is_dir():
            groups.setdefault(str(entry.get("label")), []).append(read_run(folder / entry["folder"]))
    first = Section("What was run")
    try:
        told = comparison.read(folder)
    except (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        problems.append(f"the comparison's table cannot be made ({first_line(error)}): its runs are shown as they are")
        errors = overview.errors(groups)
        title = folder.name
    else:
        title = told.title
        cells = [comparison.cells(row) for row in told.rows]
        shown = [place for place in range(len(comparison.COLUMNS)) if any(row[place] != "-" for row in cells)]
        columns = [comparison.COLUMNS[place] for place in shown]
        errors = Section("Errors", "Median over the seeds, with the lowest and the highest.")
        errors.html(table(columns, [[row[place] for place in shown] for row in cells]))
        errors.html(notes(told.notes))
    first.html(overview.headlines(groups))
    for problem in problems:
        first.html(missing(problem, warn=True))
    _problems(first, [(f"{label}, {run.path.name}", run) for label, group in groups.items() for run in group])
    first.html(overview.ran(_dict(_at(content, "provenance"))))
    return Part(title, "Comparison", [first, overview.curves(groups, name), errors, *_each(groups)])


def _reproduction(folder: Path, name: str) -> Part:
    problems: list[str] = []
    content = read_json(folder / "reproduction.json", problems) or {}
    first, title = Section("What was run"), folder.name
    invocations = [_dict(each) for each in _at(content, "invocations") or [] if isinstance(each, dict)] if isinstance(
        _at(content, "invocations"), list) else []  # fmt: skip
    provenance = invocations[-1] if invocations else {}
    sections: list[Section] = []
    paths = sorted((folder / "runs").glob("*-seed[0-9]*"))
    groups: dict[str, list[Run]] = {}
    for path in paths:
        groups.setdefault(path.name.rpartition("-seed")[0], []).append(read_run(path))
    try:
        known = recipes.TABLES[content["table"]]
        made = {row.name: row.recipe(**content["settings"]) for row in known.rows if row.name in groups}
        images = content.get("images") and recipes.Images(**content["images"])
        told = reproduction.read(folder, known, made, {}, content["settings"], provenance, images)
    except (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = first_line(error)
        problems.append(f"the paper's table cannot be put beside the runs ({why}): they are shown as they are")
        sections.append(overview.errors(groups))
        first.html(overview.headlines(groups))
    else:
        title = told.title
        groups = {row.name: groups[row.name] for row in told.rows if row.name in groups}
        first.html(_reproduced(told))
        columns = (*(reproduction.TOP5 if told.top5 else reproduction.COLUMNS), "setting")
        cells = [{**reproduction.cells(row), "setting": row.setting} for row in told.rows]
        section = Section("Errors", "The paper's test error beside ours: median over the seeds, lowest, highest, how "
                                    "many, and ours minus the paper's.")  # fmt: skip
        if cells:
            listed = [[row[column] for column in columns] for row in cells]
            section.html(table(columns, listed, names=("state", "setting")))
        sections.append(section.html(notes(told.notes)))
    for problem in problems:
        first.html(missing(problem, warn=True))
    _problems(first, [(run.path.name, run) for group in groups.values() for run in group if run.problems])
    first.html(overview.ran(provenance))
    return Part(title, "Reproduction", [first, *_families(groups, name), *sections, *_each(groups)])


def _reproduced(told: reproduction.Reproduction) -> str:
    done, total = told.count("done"), sum(len(row.runs) for row in told.rows)
    off = [row.difference for row in told.rows if row.difference is not None]
    known = sum(row.error is not None for row in told.rows)
    shown = [("runs", f"{done} of {total}", "done"), ("rows", f"{known} of {len(told.rows)}", "have a result")]
    if off:
        shown.append(("ours minus paper", f"{median(off):+.2f}", f"% error, median of {counted(len(off), 'row')}"))
        shown.append(("range", f"{min(off):+.2f} to {max(off):+.2f}", "lowest and highest row"))
    return figures(shown)


def _families(groups: dict[str, list[Run]], name: str) -> list[Section]:
    """Learning curves, a section for each network: a table has more rows than a picture can hold."""
    families: dict[str, dict[str, list[Run]]] = {}
    for label, group in groups.items():
        families.setdefault(label.partition("-")[0], {})[label] = group
    made = []
    for family, members in families.items():
        section = overview.curves(members, f"{name}-{slug(family)}")
        section.title += f": {family}" if len(families) > 1 else ""
        made.append(section)
    return made


def _at(content: Any, *names: str) -> Any:
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# ---- the page


def html(made: Sequence[Part]) -> str:
    """The file."""
    title = made[0].title if len(made) == 1 else f"{made[0].title} and {counted(len(made) - 1, 'more')[:-1]}".rstrip()
    body, links = [], []
    for number, part in enumerate(made):
        before = f"p{number}-" if len(made) > 1 else ""
        places = [before + slug(section.title) for section in part.sections]
        if len(made) > 1:
            body.append(f'<section class="part" id="p{number}"><p class="kicker">{escape(part.kind)}</p>'
                        f"<h1>{escape(part.title)}</h1></section>")  # fmt: skip
            links.append((f"p{number}", part.title))
        else:
            links += [(place, section.title) for place, section in zip(places, part.sections, strict=True)]
        body += [rendered(section, place=place) for place, section in zip(places, part.sections, strict=True)]
    index = "".join(f'<a href="#{place}">{escape(name)}</a>' for place, name in links)
    kicker = f"Offbeat &middot; {escape(made[0].kind if len(made) == 1 else 'Report')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{look.PAGE}</style></head>\n'
        f'<body><header><p class="kicker">{kicker}</p><h1>{escape(title)}</h1><nav>{index}</nav></header>\n'
        f"<main>{''.join(body)}</main>\n"
        "<footer>Made by <code>offbeat report</code> from the records of the runs alone; figures are as they were "
        f"written.</footer>\n<script>{look.SCRIPT}</script></body></html>\n"
    )


def alone(picture: Picture) -> Canvas:
    """A picture with its title, to stand in a file of its own."""
    drawn = picture.draw(WIDTHS[picture.across])
    made = Canvas(drawn.width + 48, drawn.height + 76)
    made.parts = [f"<style>{look.PICTURE}</style>", '<rect width="100%" height="100%" style="fill:#fff"/>']
    made.text(24, 34, picture.title, "title")
    made.parts += ['<g transform="translate(24 56)">', *drawn.parts, "</g>"]
    return made


def write_report(folders: Sequence[Path], out: Path, pictures: Path | None = None) -> tuple[int, list[str]]:
    """Write the page, and each picture to its own file; how many pictures there are, and what there is to say."""
    made = parts(folders)
    _write(out, html(made).encode())
    drawn = {picture.name: picture for part in made for section in part.sections for picture in section.all_pictures()}
    return len(drawn), _pictures(list(drawn.values()), pictures) if pictures else []


def _pictures(drawn: Sequence[Picture], folder: Path) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--pictures {folder}: {error.strerror or first_line(error)}; choose another folder") from error
    canvases = {picture.name: alone(picture) for picture in drawn}
    for picture in drawn:
        text = canvases[picture.name].svg(picture.title, css=' xmlns="http://www.w3.org/2000/svg"')
        _write(folder / f"{picture.name}.svg", text.encode())
    try:
        with browser.Browser() as opened:
            for name, canvas in canvases.items():
                shot = opened.picture((folder / f"{name}.svg").resolve().as_uri(), canvas.width, canvas.height)
                _write(folder / f"{name}.png", shot)
    except browser.NoBrowser as error:
        return [f"pictures as SVG alone, not as PNG: {error}"]
    return []


def _write(path: Path, content: bytes) -> None:
    try:
        record.write(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or first_line(error)}): choose another place") from error
