"""A benchmark: the speed of every row beside the others, what it holds and what it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.errors import first_line
from offbeat.report import standings
from offbeat.report.charts import Bar, bars
from offbeat.report.folders import read_json
from offbeat.report.overview import ran
from offbeat.report.parts import Section, figures, missing, notes, table
from offbeat.report.svg import Picture
from offbeat.report.words import counted, size

LETTERS = (("K", "K"), ("b", "batch_size"))
FAMILIES = {"offbeat": 0, "torch": 1, "bp": 7}
ODD = (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError)  # of a record that is not a whole one


def numbers(value: Any) -> list[float]:
    """The finite numbers in a list, or a number alone."""
    values = value if isinstance(value, list) else [value]
    return [float(item) for item in values
            if isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)]  # fmt: skip


def flat(content: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text: those of a word or two in one line, longer ones by themselves, what is nested left out."""
    short, long = [], {}
    for key, value in content.items():
        name, items = key.replace("_", " "), value if isinstance(value, list) else [value]
        if not items or len(items) > 24 or not all(isinstance(item, str | int | float) for item in items):
            continue
        text = ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
        if len(text) > 40:
            long[name] = text
        else:
            short.append(f"{name} {'yes' if value is True else 'no' if value is False else text}")
    return {**({"settings": "; ".join(short)} if short else {}), **long}


def opened(path: Path, first: Section) -> dict[str, Any]:
    """The content of a file, and what was run by it in the first section."""
    problems: list[str] = []
    content = read_json(path, problems)
    if content is not None and not isinstance(content, dict):
        problems.append(f"{path.name} holds no JSON object")
    for problem in problems:
        first.html(missing(problem, warn=True))
    return content if isinstance(content, dict) else {}


def described(content: Mapping[str, Any]) -> str:
    provenance, settings = content.get("provenance"), content.get("settings")
    return ran(provenance if isinstance(provenance, dict) else {},
               more=flat(settings if isinstance(settings, dict) else {}))  # fmt: skip


def title_of(content: Mapping[str, Any], path: Path, names: Sequence[tuple[str, str]] = LETTERS) -> str:
    """The network, and these settings by their letters."""
    settings = content.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    if not settings.get("model"):
        return path.name
    letters = [f"{letter}={settings[key]}" for letter, key in names if settings.get(key)]
    return ", ".join([str(settings["model"]), *letters])


def bench(path: Path, name: str) -> tuple[str, list[Section]]:
    """The sections of a benchmark, and its title."""
    first = Section("What was run")
    content = opened(path / "bench.json", first)
    listed = content.get("rows")
    rows = [row for row in listed if isinstance(row, dict) and _fast(row)] if (
        isinstance(listed, list)) else []  # fmt: skip
    if rows:
        first.html(_headline(rows))
    first.html(described(content))
    title = f"Benchmark: {title_of(content, path)}"
    if not rows:
        none = missing("no row has been measured: run `offbeat bench` to its end")
        return title, [first, Section("Speed").html(none)]
    return title, [first, _speeds(rows, content, name), *_choice(content), _memory(rows, name)]


def called(row: Mapping[str, Any]) -> str:
    return str(row.get("title") or row.get("name") or "unnamed")


def _fast(row: dict[str, Any]) -> bool:
    """Whether it has been measured: at least one speed, all of them above 0."""
    speeds = numbers(row.get("samples_per_second"))
    return bool(speeds) and min(speeds) > 0


def _speed(row: dict[str, Any]) -> float:
    return median(numbers(row["samples_per_second"]))


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    def best(of: Sequence[dict[str, Any]], what: str) -> list[tuple[str, str, str]]:
        row = max(of, key=_speed, default=None)
        return [(what, f"{_speed(row):,.0f}", f"samples a second, {called(row)}")] if row else []

    ours, theirs = ([row for row in rows if row.get("family") == family] for family in ("offbeat", "torch"))
    shown = best(ours, "fastest of Offbeat") + best(theirs, "fastest of torch")
    shown += best([row for row in rows if row.get("family") == "bp"], "back-propagation")
    if ours and theirs:
        shown += _ratio(max(ours, key=_speed), max(theirs, key=_speed))
    return figures(shown)


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, str, str]]:
    try:
        return [("Offbeat : torch", f"{standings.times_faster(ours, theirs):.2f}", "the fastest of each, in a round")]
    except ODD:
        return []


def _speeds(rows: Sequence[dict[str, Any]], content: dict[str, Any], name: str) -> Section:
    section = Section(
        "Speed",
        "Samples a second: the median of the repetitions, its whisker the slowest and the fastest. Blue is Offbeat, "
        "orange torch's own, grey back-propagation.",
    )
    drawn = []
    for row in sorted(rows, key=_speed, reverse=True):
        values = numbers(row["samples_per_second"])
        tip = f"{called(row)}: {median(values):,.1f} samples a second ({min(values):,.1f} to {max(values):,.1f}), "
        drawn.append(Bar(
            called(row), median(values), f"{median(values):,.0f}", FAMILIES.get(str(row.get("family")), 6),
            spread=(min(values), max(values)) if len(values) > 1 else None,
            tip=tip + counted(len(values), "repetition"), short=str(row.get("name", "")),
        ))  # fmt: skip
    bound = content.get("bound")
    limit = numbers(bound.get("samples_per_second")) if isinstance(bound, dict) else []
    if limit:
        drawn.insert(0, Bar("bound of the cuts", median(limit), f"{median(limit):,.0f}", 6,
                            tip=f"the slowest stage alone: {median(limit):,.1f} samples a second"))  # fmt: skip
    caption = "Teal is what the cuts allow: the slowest stage alone, without messages." if limit else ""
    section.pictures(Picture(f"{name}-speed", "Samples a second", lambda width: bars(drawn, width), caption))
    return section.html(_table(content))


def _table(content: dict[str, Any]) -> str:
    """The rows and their notes as in table.md."""
    try:
        return table(standings.HEAD, standings.cells(content)) + notes(standings.notes(content))
    except ODD as error:
        return missing(f"no table: bench.json lacks what belongs there ({first_line(error)})", warn=True)


def _choice(content: dict[str, Any]) -> list[Section]:
    """When which row is the better choice, where the record tells."""
    try:
        said = standings.advice(content)
    except ODD:
        return []
    return [Section("When which", "As far as this run tells.").html(notes(said))] if said else []


def _memory(rows: Sequence[dict[str, Any]], name: str) -> Section:
    section = Section("Memory and traffic")
    made = []
    for key, title in (("memory_per_worker", "Memory a worker"), ("bytes_moved", "Bytes moved a batch")):
        drawn = [Bar(called(row), value[0], size(value[0]), FAMILIES.get(str(row.get("family")), 6),
                     short=str(row.get("name", "")))
                 for row in rows if (value := numbers(row.get(key)))]  # fmt: skip
        if drawn:
            made.append(Picture(f"{name}-{key.replace('_', '-')}", title,
                                lambda width, drawn=drawn: bars(drawn, width), across=2))  # type: ignore[misc]  # fmt: skip
    return section.pictures(*made) if made else section.html(missing("bench.json has no figures of them"))
