"""A benchmark: the speed of every row beside the others, what it holds and what it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.errors import first_line
from offbeat.report import bench_table
from offbeat.report import figures as drawn
from offbeat.report.overview import ran
from offbeat.report.read import INCOMPLETE, mapping, numbers, read_json
from offbeat.report.sections import Block, Drawing, ReportPart, Section, charts, figures, missing, notes, table

LETTERS = (("K", "K"), ("b", "batch_size"))


def flat(content: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text: short ones together in one line, longer ones by themselves, nested ones left out."""
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
        first.add(missing(problem, warn=True))
    return mapping(content)


def described(content: Mapping[str, Any]) -> Block:
    return ran(mapping(content.get("provenance")), more=flat(mapping(content.get("settings"))))


def title_of(content: Mapping[str, Any], path: Path, names: Sequence[tuple[str, str]] = LETTERS) -> str:
    """The network, and these settings by their letters."""
    settings = mapping(content.get("settings"))
    if not settings.get("model"):
        return path.name
    letters = [f"{letter}={settings[key]}" for letter, key in names if settings.get(key)]
    return ", ".join([str(settings["model"]), *letters])


def bench(path: Path, name: str) -> ReportPart:
    """The rows of a benchmark."""
    first = Section("What was run")
    content = opened(path / "bench.json", first)
    rows = drawn.measured(content.get("rows"))
    if rows:
        first.add(_headline(rows))
    first.add(described(content))
    title = f"Benchmark: {title_of(content, path)}"
    if not rows:
        none = missing("no row has been measured: run `offbeat bench` to its end")
        return ReportPart(title, "Benchmark", [first, Section("Speed").add(none)])
    sections = [first, _speeds(rows, content, name), *_choice(content), _memory(rows, name)]
    return ReportPart(title, "Benchmark", sections)


def _speed(row: Mapping[str, Any]) -> float:
    return median(numbers(row["samples_per_second"]))


def _headline(rows: Sequence[dict[str, Any]]) -> Block:
    def best(of: Sequence[dict[str, Any]], what: str) -> list[tuple[str, str, str]]:
        row = max(of, key=_speed, default=None)
        return [(what, f"{_speed(row):,.0f}", f"samples per second, {drawn.called(row)}")] if row else []

    ours, theirs = ([row for row in rows if row.get("family") == family] for family in ("offbeat", "torch"))
    shown = best(ours, "fastest of Offbeat") + best(theirs, "fastest of torch")
    shown += best([row for row in rows if row.get("family") == "bp"], "back-propagation")
    if ours and theirs:
        shown += _ratio(max(ours, key=_speed), max(theirs, key=_speed))
    return figures(shown)


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, str, str]]:
    try:
        return [("Offbeat : torch", f"{bench_table.times_faster(ours, theirs):.2f}", "the fastest of each, in a round")]
    except INCOMPLETE:
        return []


def _speeds(rows: Sequence[dict[str, Any]], content: dict[str, Any], name: str) -> Section:
    section = Section(
        "Speed",
        "Samples per second: the median of the rounds, whiskers from the slowest to the fastest; "
        "lighter bars have late gradients.",
    )
    bound = content.get("bound")
    limit = numbers(mapping(bound).get("samples_per_second"))
    caption = "Dashed: what the cuts of ADL allow, the slowest stage alone without messages." if limit else ""
    chart = drawn.speeds(sorted(rows, key=_speed, reverse=True), bound)
    return section.add(charts(Drawing(f"{name}-speed", "Samples per second", chart, caption)), _table(content))


def _table(content: dict[str, Any]) -> Block:
    """The rows and their notes as in table.md."""
    try:
        rows = [dict(zip(bench_table.HEAD, line, strict=True)) for line in bench_table.cells(content)]
        return table(rows, notes=bench_table.notes(content))
    except INCOMPLETE as error:
        return missing(f"no table: bench.json lacks what belongs there ({first_line(error)})", warn=True)


def _choice(content: dict[str, Any]) -> list[Section]:
    """Which row is the better choice when, where the record is complete enough."""
    try:
        advice = bench_table.advice(content)
    except INCOMPLETE:
        return []
    return [Section("Which to choose", "By this run.").add(notes(advice))] if advice else []


def _memory(rows: Sequence[dict[str, Any]], name: str) -> Section:
    section = Section("Memory and traffic")
    made = []
    for key, title in (("memory_per_worker", "Memory per worker"), ("bytes_moved", "Bytes moved per batch")):
        chart = drawn.amounts(rows, key, title="MB")
        if chart is not None:
            made.append(Drawing(f"{name}-{key.replace('_', '-')}", title, chart, across=2))
    return section.add(charts(*made) if made else missing("bench.json has no figures of them"))
