"""A scaling study: how speed, memory and staleness grow with K, by the clock and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.report import figures as drawn
from offbeat.report.benches import described, opened, title_of
from offbeat.report.formatting import ranged, size
from offbeat.report.read import mapping, numbers
from offbeat.report.sections import Block, Drawing, ReportPart, Section, charts, figures, missing, notes, table


def scaling(path: Path, name: str) -> ReportPart:
    """Speed-up, growth and measured points of a scaling study."""
    first = Section("What was run")
    content = opened(path / "scaling.json", first)
    points = drawn.with_stages(content.get("points"))
    simulation = mapping(content.get("simulation"))
    if headline := _headline(points, drawn.with_stages(simulation.get("rows"))):
        first.add(headline)
    first.add(described(content))
    speed = Section(
        "Speed-up",
        "Over back-propagation on one worker: lines by the clock from measured units, for links of "
        "several kinds; circles as measured.",
    )
    _add(speed, drawn.speed_ups(content), name, "not simulated: run `offbeat bench scaling` to its end")
    if speed.drawings() and simulation.get("meaning"):
        speed.add(notes([str(simulation["meaning"])]))
    growth = Section(
        "Memory, staleness and time",
        "By the clock, and circles as measured: memory that is counted leaves "
        "out what an operation and the interpreter need.",
    )
    _add(growth, drawn.growth(content), name, "not counted: run `offbeat bench scaling` again")
    measured = _measured(points)
    left_out = content.get("left_out")
    if isinstance(left_out, list) and left_out:
        measured.add(notes([f"left out: {why}" for why in left_out]))
    title = f"Scaling: {title_of(content, path, ())}"
    return ReportPart(title, "Scaling study", [first, speed, growth, measured])


def _add(section: Section, made: drawn.Panels, name: str, why_not: str) -> None:
    drawings = [Drawing(f"{name}-{what}", title, chart, across=2) for what, (title, chart) in made.items()]
    section.add(charts(*drawings) if drawings else missing(why_not))


def _headline(points: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> Block | None:
    shown = []
    if speeds := drawn.measured_speed_ups([row for row in points if row.get("axis") == "strong"]):
        K, best = max(speeds, key=lambda point: point[1])
        shown.append(("measured speed-up", f"{best:.2f} x", f"at K={K:.0f}, over one stage"))
    fast = [(max(found), row) for row in simulated if (found := numbers(row.get("speedup")))]
    if fast:
        most, row = max(fast, key=lambda pair: pair[0])
        where = f"{row.get('method', '')} at K={row['K']}, {row.get('link', '')}"
        shown.append(("by the clock, at most", f"{most:.1f} x", where))
    return figures(shown) if shown else None


def _measured(points: Sequence[Mapping[str, Any]]) -> Section:
    section = Section("Measured", "One core per stage; weak: the network grows with K, strong: it does not.")
    if not points:
        return section.add(missing("no point has been measured: run `offbeat bench scaling` to its end"))
    rows = []
    for point in points:
        seconds, peak = numbers(point.get("seconds_per_batch")), numbers(point.get("memory"))
        late = drawn.first_staleness(point)
        counted = numbers(point.get("memory_counted"))
        rows.append(
            {
                "axis": str(point.get("axis", "-")),
                "network": str(point.get("model", "-")),
                "batch": str(point.get("batch_size", "-")),
                "K": str(point["K"]),
                "replicas": str(point.get("replicas", 1)),
                "ms per batch": ranged([1e3 * value for value in seconds]) if seconds else "-",
                "predicted": f"{1e3 * predicted[0]:,.0f}" if (predicted := numbers(point.get("predicted"))) else "-",
                "peak memory": size(max(peak)) if peak else "-",
                "counted": size(max(counted)) if counted else "-",
                "staleness": f"{late[0]:.2f}" if late else "-",
            }
        )
    return section.add(table(rows, names=("network",)))
