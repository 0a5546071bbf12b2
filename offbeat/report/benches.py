"""A benchmark: the speed of every row beside the others, what it holds and what it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.report.charts import Bar, bars
from offbeat.report.folders import counted, read_json
from offbeat.report.overview import ran
from offbeat.report.parts import Section, figures, missing, notes, table
from offbeat.report.stages import size
from offbeat.report.svg import Picture

LETTERS = (("K", "K"), ("b", "batch_size"))
FAMILIES = {"offbeat": 0, "torch": 1, "bp": 7}


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
    left_out = content.get("left_out")
    return title, [first, _speeds(rows, content.get("bound"), left_out, name), _memory(rows, name)]


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
        ratio = max(map(_speed, ours)) / max(map(_speed, theirs))
        shown.append(("Offbeat : torch", f"{ratio:.2f}", "the fastest of each"))
    return figures(shown)


def _speeds(rows: Sequence[dict[str, Any]], bound: Any, left_out: Any, name: str) -> Section:
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
            tip=tip + counted(len(values), "repetition"),
        ))  # fmt: skip
    limit = numbers(bound.get("samples_per_second")) if isinstance(bound, dict) else []
    if limit:
        drawn.insert(0, Bar("bound of the cuts", median(limit), f"{median(limit):,.0f}", 6,
                            tip=f"the slowest stage alone: {median(limit):,.1f} samples a second"))  # fmt: skip
    caption = "Teal is what the cuts allow: the slowest stage alone, without messages." if limit else ""
    section.pictures(Picture(f"{name}-speed", "Samples a second", lambda width: bars(drawn, width), caption))
    base = next((row for row in rows if row.get("family") == "bp"), None)
    times = f"x {base.get('name') or 'BP'}" if base else "x BP"
    columns = ["row", "samples/s", "range", times, "ms a batch", "gradient", "workers", "memory a worker",
               "moved a batch"]  # fmt: skip
    section.html(table(columns, [_cells(row, base) for row in rows]))
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.get("note"):
            said.setdefault(str(row["note"]), []).append(called(row))
    lines = [f"{'; '.join(names)}: {note}" for note, names in said.items()]
    if isinstance(left_out, dict):
        lines += [f"left out: {row} ({why})" for row, why in left_out.items()]
    return section.html(notes(lines))


def _cells(row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    values, batch = numbers(row["samples_per_second"]), numbers(row.get("seconds_per_batch"))
    peak, moved = numbers(row.get("memory_per_worker")), numbers(row.get("bytes_moved"))
    return [
        called(row), f"{median(values):,.1f}", f"{min(values):,.1f} to {max(values):,.1f}",
        f"{_speed(row) / _speed(base):.2f}" if base else "-", f"{1e3 * median(batch):,.1f}" if batch else "-",
        "-" if "exact" not in row else "exact" if row["exact"] is True else "stale",
        str(row.get("workers", "-")), size(peak[0]) if peak else "-", size(moved[0]) if moved else "-",
    ]  # fmt: skip


def _memory(rows: Sequence[dict[str, Any]], name: str) -> Section:
    section = Section("Memory and traffic")
    made = []
    for key, title in (("memory_per_worker", "Memory a worker"), ("bytes_moved", "Bytes moved a batch")):
        drawn = [Bar(called(row), value[0], size(value[0]), FAMILIES.get(str(row.get("family")), 6))
                 for row in rows if (value := numbers(row.get(key)))]  # fmt: skip
        if drawn:
            made.append(Picture(f"{name}-{key.replace('_', '-')}", title,
                                lambda width, drawn=drawn: bars(drawn, width), across=2))  # type: ignore[misc]  # fmt: skip
    return section.pictures(*made) if made else section.html(missing("bench.json has no figures of them"))
