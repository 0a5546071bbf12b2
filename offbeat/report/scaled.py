"""A scaling study: how speed, memory and staleness grow with K, by the clock and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.report.benches import described, numbers, opened, title_of
from offbeat.report.charts import Line, lines
from offbeat.report.growth import LEAST, TITLES
from offbeat.report.parts import Section, figures, missing, notes, table
from offbeat.report.svg import Picture
from offbeat.report.words import ranged, size

Rows = Sequence[Mapping[str, Any]]


def scaling(path: Path, name: str) -> tuple[str, list[Section]]:
    """The sections of a scaling study, and its title."""
    first = Section("What was run")
    content = opened(path / "scaling.json", first)
    points, counted = _rows(content.get("points")), _rows(content.get("counted"))
    simulation = content.get("simulation")
    simulation = simulation if isinstance(simulation, dict) else {}
    strong = [row for row in points if row.get("axis") == "strong"]
    first.html(_headline(strong, _rows(simulation.get("rows")))).html(described(content))
    sections = [first, _speed_ups(simulation, strong, name), _growth(counted, strong, name), _measured(points)]
    left_out = content.get("left_out")
    if isinstance(left_out, list) and left_out:
        sections[-1].html(notes([f"left out: {why}" for why in left_out]))
    return f"Scaling: {title_of(content, path, ())}", sections


def _rows(value: Any) -> list[dict[str, Any]]:
    """Those that have a K."""
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("K"), int) and row["K"] >= 1]


def _series(rows: Rows, key: str, how: Any) -> list[tuple[float, float]]:
    found = [(float(row["K"]), numbers(row.get(key))) for row in rows]
    return sorted((K, how(values)) for K, values in found if values)


def _times_alone(strong: Rows) -> list[tuple[float, float]]:
    """Measured speed-ups over one stage."""
    times = [(K, seconds) for K, seconds in _series(strong, "seconds_per_batch", median) if seconds > 0]
    alone = dict(times).get(1.0)
    return [(K, alone / seconds) for K, seconds in times] if alone else []


def _headline(strong: Rows, simulated: Rows) -> str:
    shown = []
    if speeds := _times_alone(strong):
        K, best = max(speeds, key=lambda point: point[1])
        shown.append(("measured speed-up", f"{best:.2f} x", f"at K={K:.0f}, over one stage"))
    for row in simulated:
        row_speeds = numbers(row.get("speedup"))
        if row_speeds and row is max(simulated, key=lambda other: max(numbers(other.get("speedup")) or [0.0])):
            told = f"{row.get('method', '')} at K={row['K']}, {row.get('link', '')}"
            shown.append(("by the clock, at most", f"{row_speeds[0]:.1f} x", told))
    return figures(shown) if shown else ""


def _speed_ups(simulation: Mapping[str, Any], strong: Rows, name: str) -> Section:
    section = Section("Speed-up", "Over back-propagation on one worker: lines by the clock from measured units, for "
                                  "links of several kinds; circles as measured.")  # fmt: skip
    rows = _rows(simulation.get("rows"))
    measured = _times_alone(strong)
    made = []
    for place, method in enumerate(dict.fromkeys(str(row.get("method", "")) for row in rows)):
        own = [row for row in rows if str(row.get("method", "")) == method]
        drawn = []
        for number, link in enumerate(dict.fromkeys(str(row.get("link", "")) for row in own)):
            points = _series([row for row in own if str(row.get("link", "")) == link], "speedup", max)
            drawn.append(Line(link, [point for point in points if point[1] >= LEAST], number))
        drawn += [Line("measured", measured, 7, dots=True)] if measured and not place else []
        if any(line.points for line in drawn):
            title = TITLES.get(method, method) or "Speed-up"
            made.append(_picture(f"{name}-speed-up-{method}", title, drawn, "times one worker"))
    if not made:
        return section.html(missing("not simulated: run `offbeat bench scaling` to its end"))
    section.pictures(*made)
    return section.html(notes([str(simulation["meaning"])])) if simulation.get("meaning") else section


def _growth(counted: Rows, strong: Rows, name: str) -> Section:
    section = Section("Memory and staleness", "By the clock, and circles as measured: memory that is counted leaves "
                                              "out what an operation and the interpreter need.")  # fmt: skip

    def megabytes(how: Any) -> Any:
        return lambda values: how(values) / 1e6

    memory = [Line("largest stage", _series(counted, "memory_counted", megabytes(max)), 0),
              Line("all together", _series(counted, "memory_counted", megabytes(sum)), 1),
              Line("largest, measured", _series(strong, "memory", megabytes(max)), 0, dots=True)]  # fmt: skip
    late = [Line("stage 1, the stalest", _series(counted, "staleness", max), 0),
            Line("measured", _series(strong, "staleness_measured", max), 0, dots=True)]  # fmt: skip
    made = [_picture(f"{name}-{what}", title, drawn, unit) for what, title, drawn, unit in (
        ("memory", "Memory", memory, "MB"), ("staleness", "Mean staleness", late, "updates"))
        if any(line.points for line in drawn)]  # fmt: skip
    return section.pictures(*made) if made else section.html(missing("not counted: run `offbeat bench scaling` again"))


def _picture(name: str, title: str, drawn: Sequence[Line], unit: str) -> Picture:
    return Picture(name, title, lambda width: lines(drawn, width, x="stages K", y=unit, doubling=True, form=".3g"),
                   across=2)  # fmt: skip


def _measured(points: Rows) -> Section:
    section = Section("Measured", "One core a stage; weak: the network grows with K, strong: it does not.")
    if not points:
        return section.html(missing("no point has been measured: run `offbeat bench scaling` to its end"))
    rows = []
    for point in points:
        seconds, peak, late = (numbers(point.get(key)) for key in ("seconds_per_batch", "memory", "staleness_measured"))
        counted = numbers(point.get("memory_counted"))
        rows.append([
            *(str(point.get(key, "-")) for key in ("axis", "model", "batch_size", "K")),
            ranged([1e3 * value for value in seconds]) if seconds else "-",
            size(max(peak)) if peak else "-", size(max(counted)) if counted else "-",
            f"{max(late):.2f}" if late else "-",
        ])  # fmt: skip
    columns = ["axis", "network", "batch", "K", "ms a batch", "peak memory", "counted", "staleness"]
    return section.html(table(columns, rows, names=("network",)))
